"""Every recipe: fits its own cluster, and takes two steps where everything is small.

Whole runs of all of them take half an hour: `make test-recipes`; the suite has one for each family
and precision.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import recipes_table
from grid import is_grid
from preloaded import run

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.plan import plan
from megatron_rl.config import cluster, load, read
from megatron_rl.data.toy import write_toy
from megatron_rl.preflight.checks import check
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named

ROOT = Path(__file__).parents[1]
ALL = sorted(
    path for path in (ROOT / "recipes").glob("*.yaml") if not is_grid(path) and cluster(path)[0]
)
IN_THE_SUITE = {  # qwen2 in BF16, qwen3 in FP8, llama in INT8, and both kinds of experts
    *("dapo-qwen2.5_7b-1n8g-bf16", "dapo_fp8", "grpo-llama3.1_8b-1n8g-int8"),
    *("gspo-qwen3_30b_a3b-4n32g-fp8", "grpo-mixtral_8x7b-4n32g-int8"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "whole" in metafunc.fixturenames:
        every = metafunc.config.getoption("--recipes")
        chosen = [one for one in ALL if every or one.stem in IN_THE_SUITE]
        metafunc.parametrize("whole", chosen, ids=lambda one: one.stem)


@pytest.fixture(params=ALL, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> Path:
    return request.param


def tiny(recipe: Path, folder: Path) -> list[str]:
    """Overrides that make a recipe small, with a model of the same family in `folder`."""
    write_toy(folder, like=read_card(load(recipe).model.path))
    data = {
        key: f"data.{key}={folder}/{name}.jsonl"
        for key, name in (("train", "train"), ("eval", "test"))
    }
    return ["cluster=cpu", f"model.path={folder}/model", *data.values()]


def test_a_recipe_fits_its_own_cluster(recipe):
    _, machine = cluster(recipe)
    assert machine is not None
    check(*read(recipe), on=named(machine))


def test_a_recipe_fits_the_memory_of_its_cluster(recipe):
    config, (_, machine) = load(recipe), cluster(recipe)
    made = plan(Case(config, read_card(config.model.path), named(machine)))
    assert (made.verdict, made.problems) == ("fits", ())
    assert made.case.roles.nodes == named(machine).nodes


def test_a_recipe_is_called_what_it_is(recipe):
    config, (name, _) = load(recipe), cluster(recipe)
    if match := re.fullmatch(
        r"([a-z_]+)-([a-z0-9._]+)-(\d+n\d+g)-(bf16|int8|fp8)(-\w+)?", recipe.stem
    ):
        _, model, place, precision, _ = match.groups()
        assert place == name
        published = Path(config.model.path).name.lower().partition("-instruct")[0]
        assert re.sub(r"\W", "", published) == re.sub(r"[\W_]", "", model)
        assert config.quantization.format == precision.replace("bf16", "none")
    else:
        assert recipe.stem in ("dapo_int8", "dapo_fp8")


def test_the_table_is_that_of_the_recipes():
    assert (ROOT / "recipes" / "README.md").read_text() == recipes_table.table()


def test_a_recipe_can_be_made_small(recipe, tmp_path):
    check(*read(recipe, tiny(recipe, tmp_path)))


@pytest.mark.engine
def test_a_recipe_takes_two_small_steps_and_leaves_a_model(whole, tmp_path, request):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    overrides = [*tiny(whole, tmp_path / "tiny"), f"run.root={tmp_path}", "run.name=run"]
    command = [sys.executable, "-m", "megatron_rl.cli", "train", str(whole), *overrides]
    if request.config.getoption("--recipes"):  # as a user starts it
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    else:
        done = run("torch", command, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["progress/step"] for line in lines] == [0, 1, 2]
    assert "eval/accuracy" in lines[-1]
    folder = tmp_path / "run" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    assert (
        model.config.model_type
        == json.loads((tmp_path / "tiny/model/config.json").read_text())["model_type"]
    )
    assert AutoTokenizer.from_pretrained(folder)("1+1=").input_ids
