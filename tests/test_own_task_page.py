"""docs/own_task.md: its ten commands, run as they stand on the page; its tasks and what it says of settings."""

import json
import re
from pathlib import Path

import pytest
from helpers import Command, block, small_recipes, typed

from megatron_rl.config import load
from megatron_rl.runs.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own_task.md"
COMMANDS = block(PAGE, "bash").splitlines()
# the page's server, until it has answered what the page asks
ASKED = """{serve} &> serve.log &
trap "kill $!; wait" EXIT
until curl -sf localhost:8123/health; do kill -0 $! || {{ tail -n 40 serve.log >&2; exit 1; }}; sleep 1; done
{ask}"""
TASKS = re.findall(r"^def (\w+)\(draw\)", block(PAGE, "python"), re.M)


@pytest.fixture
def place(empty: Path) -> Path:
    """The repository's folder, as far as the commands can tell, with what the page has one write."""
    small_recipes(empty, sft=1, own=4)
    (empty / "tools").symlink_to(ROOT / "tools")
    (empty / "own.py").write_text(block(PAGE, "python"))
    return empty


@pytest.mark.parametrize("task", TASKS)
def test_the_dry_runs_take_every_task_of_the_page(place: Path, command: Command, task: str) -> None:
    """The recipes as they are: prompts and answers fit, and the reward finds the rows' own answers right."""
    rows, model = (line.replace("reverse", task) for line in COMMANDS[:2])
    typed(place, rows)
    command(*model.split()[1:])
    for recipe, given in (("sft", ()), ("own", ("model.path=data/own/model", "model.init=random"))):
        assert "data/own/test.jsonl" in command.dry_run(*given, recipe=ROOT / "recipes" / f"{recipe}.yaml")
    scope: dict = {"__name__": "own"}
    exec(block(PAGE, "python"), scope)
    held_out = [json.loads(line) for line in (place / "data/own/test.jsonl").read_text().splitlines()]
    longest = load(ROOT / "recipes" / "sft.yaml").rollout.max_response_tokens
    for row in held_out:
        assert scope["reward"](row, "answer", row["answer"])["acc"]
        assert not scope["reward"](row, "answer", row["answer"] + "1")["acc"]
        assert len(row["answer"]) < longest


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_the_ten_commands(place: Path) -> None:
    *before, serve = COMMANDS
    assert len(before) == 9
    said = {" ".join(line.split()[:3]): typed(place, line) for line in before}
    for name in ("sft", "own"):
        assert read_metrics(place / "runs" / name / "metrics.jsonl")[-1]["progress/step"] == 2
    assert "finished" in said["megatron-rl status runs/own"]
    assert "evals/own-int8" in said["megatron-rl eval runs/own"]
    assert (place / "exported/own/model.safetensors").is_file()
    assert json.loads((place / "served/own/config.json").read_text())["quantization_config"]
    answer = json.loads(typed(place, ASKED.format(serve=serve, ask=block(PAGE, "sh"))))
    assert answer["usage"]["prompt_tokens"] == len("Reverse: stressed") + 8  # as the page says of the template
