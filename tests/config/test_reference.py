"""The reference of keys: its page is current, its examples are taken, and who has set a key is said
as it is.
"""

import re
from pathlib import Path

import pytest
from grid import is_grid
from helpers import refusal

from megatron_rl.config import all_keys, load
from megatron_rl.config.load import changes, flat, sources
from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.config.reference import OF_A_LIST, OF_A_NAME, entries, explain
from megatron_rl.config.schema import VERIFIERS, Config
from megatron_rl.config.shape import schema_errors
from megatron_rl.config.unknown import ELSEWHERE

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if not is_grid(path))
ENTRIES = list(entries())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(
        "cluster: cpu\noptim: {lr: 1.0e-3, warmup_steps: 3}\ncorrection: icepop\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "base: base.yaml\noptim: {lr: 2.0e-3, decay: cosine}\nlog: {alarms: {ess: off}}\n"
    )
    return tmp_path / "mine.yaml"


def test_every_key_is_there_and_says_what_it_does() -> None:
    assert set(all_keys()) <= {one.name for one in ENTRIES}
    assert [one.name for one in ENTRIES if len(one.about.split()) < 2] == []
    assert not [one.name for one in ENTRIES if not one.takes or not one.example]
    assert all(
        verifier in about
        for verifier in VERIFIERS
        for about in (one.description for one in ENTRIES if one.name == "reward.name")
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_its_example_and_its_default_are_taken(entry) -> None:
    for text in (entry.example, entry.default):
        value = read_yaml(text)
        for part in reversed(entry.name.replace(OF_A_NAME, ".mine").split(".")):
            is_list = part.endswith(OF_A_LIST)
            rule = {"level": "token", "stat": "ratio", **value} if is_list else value
            value = {part.removesuffix(OF_A_LIST): [rule] if is_list else value}
        assert list(schema_errors(value, Config)) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_last_source_of_a_key_has_its_value(path: Path) -> None:
    """Sources and merged values agree for every key of every shipped recipe."""
    overrides = ["correction=adaptive", "optim.lr=3e-3", "learner.megatron.fp8=null"]
    values = flat(load(path, overrides))
    by = sources(path, overrides)
    assert by["optim.lr"][-1] == ("the command line", 3e-3)
    untouched = flat(Config())
    for key, value in values.items():
        assert value == (by[key][-1][1] if key in by else untouched[key]) or key == "run.name", key


@pytest.mark.parametrize(
    ("key", "overrides", "value", "origin"),
    [
        (
            "optim.lr",
            ["optim.lr=5e-3"],
            "0.005",
            r"the command line, over \S+mine\.yaml \(0\.002\), \S+base\.yaml \(0\.001\)",
        ),
        (
            "correction.weight.low",
            [],
            "0.5",
            r"conf/correction/icepop\.yaml, named in \S+base.yaml",
        ),
        (
            "correction.weight.low",
            ["correction.weight.low=0.1"],
            "0.1",
            "the command line, over",
        ),
        # a preset takes back what was set in its section
        (
            "correction.weight.low",
            ["correction.weight.low=0.1", "correction=tis"],
            "null",
            "its default",
        ),
        ("run.device", [], "cpu", r"conf/cluster/cpu\.yaml, named in \S+base\.yaml"),
        ("run.device", ["cluster=null"], "auto", "its default"),
        ("run.steps", ["run.steps=3", "cluster=cpu"], "3", "the command line"),
    ],
)
def test_an_explanation_says_where_from(
    recipe: Path, key: str, overrides: list[str], value: str, origin: str
) -> None:
    said = explain(recipe, overrides, key)
    assert re.search(rf"value +{value}\n +from +{origin}", said), said


def test_an_explanation_lists_values_and_keys(recipe: Path) -> None:
    assert "constant, linear, cosine" in explain(recipe, [], "optim.decay")
    assert "drain: " in explain(recipe, [], "rollout.in_flight")
    assert (
        len(
            re.findall(
                r"^optim\.\w+: ",
                explain(recipe, [], "optim"),
                re.M,
            )
        )
        == 5
    )
    assert explain(recipe, ["learner.megatron.fp8=e4m3"], "learner.megatron.fp8").count("e4m3") == 1
    assert "eval.samples" in explain(recipe, [], "eval.sets.aime.samples")


def test_what_a_recipe_changes_of_its_base(recipe: Path) -> None:
    said = list(changes(recipe, ["correction.weight.low=0.4", "learner.megatron.fp8=e4m3"]))
    assert [line.split(" (")[0] for line in said] == [
        "correction.weight.low 0.4, was 0.5",
        "optim.lr 0.002, was 0.001",
        "optim.decay cosine, was constant",
        "learner.megatron.fp8 e4m3, was unset",
        "log.alarms {ess: false}, was {}",
    ]
    assert said[0].endswith("(the command line)")
    assert said[1] == "optim.lr 0.002, was 0.001"  # by the recipe's own file
    said = list(changes(recipe, ["data=dapo_math", "data.train=a.jsonl", "data.eval=b.jsonl"]))
    preset = "conf/data/dapo_math.yaml, named in the command line"
    assert [line for line in said if "for its own" in line] == [
        f"data.{key}, which {preset} sets for its own data.train"
        for key in ("answer_format solution", "chat_template_kwargs {}", "long_prompts drop")
    ]


def test_names_of_other_projects_lead_to_keys_that_there_are(recipe: Path) -> None:
    keys = all_keys()
    assert not ELSEWHERE.keys() & {key.rpartition(".")[2] for key in keys}
    for ours in ELSEWHERE.values():
        named = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+", ours) or ["correction"]
        assert all(
            any(one.startswith(key) or key.startswith(one) for key in keys) for one in named
        ), ours
    given = {
        one.format(written): ours
        for name, ours in ELSEWHERE.items()
        for written in (name, name.replace("_", "-"))
        for one in ("{}", "loss.{}", "actor_rollout_ref.rollout.{}")
    }
    said = refusal(load, recipe, [f"{key}=3" for key in given]).splitlines()
    assert {key: f"{ours}?" for key, ours in given.items()} == {
        line.partition(":")[0]: line.partition("did you mean ")[2] for line in said
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "algorithm.kl_ctrl.kl_coef=0.1",
            "algorithm.kl_ctrl.kl_coef: unknown key; did you mean loss.kl_coef?",
        ),
        ("eval.sets.aime.n_samples=3", "did you mean eval.sets.aime.samples?"),
        ("trainer.nothing.here=1", "trainer: unknown key; known here: run, model"),
    ],
)
def test_a_wrong_name(recipe: Path, given: str, said: str) -> None:
    assert said in refusal(load, recipe, [given])
    assert given.partition("=")[0].partition(".")[0] in refusal(
        explain, recipe, [], given.partition("=")[0]
    )
