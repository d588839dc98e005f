"""docs/getting-started/your-own-task.md: its ten commands, run as they stand on the page, and what was measured
there.
"""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
from helpers import block, small_recipes, typed

from megatron_rl.tracking.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "getting-started" / "your-own-task.md"
COMMANDS = block(PAGE, "bash").splitlines()
# the page's server, until it has answered what the page asks
ASKED = """{serve} &> serve.log &
trap "kill $!; wait" EXIT
until curl -sf localhost:8123/health; do kill -0 $! || {{ tail -n 40 serve.log >&2; exit 1; }}; sleep 1; done
{ask}"""
DRY = """megatron-rl() {
    [ $1 != train ] || set -- "$@" model.init=random model.path=data/$task/model --dry-run; command megatron-rl "$@"; }
set -e\n"""
TASKS = re.findall(r"^def (\w+)\(draw\)", block(PAGE, "python"), re.M)


@pytest.fixture
def place(empty: Path) -> Path:
    """The repository's folder, as far as the commands can tell, with what the page has one
    write.
    """
    small_recipes(empty, sft=1, own=4)
    (empty / "tools").symlink_to(ROOT / "tools")
    (empty / "own.py").write_text(block(PAGE, "python"))
    return empty


@pytest.mark.parametrize("task", TASKS)
def test_the_reward_finds_the_rows_answers_right_and_no_others(place: Path, task: str) -> None:
    typed(place, COMMANDS[0].replace("reverse", task))
    reward = runpy.run_path("own.py")["reward"]
    for row in map(json.loads, (place / "data/own/test.jsonl").read_text().splitlines()):
        assert reward(row, "answer", row["answer"])["acc"]
        assert not reward(row, "answer", row["answer"] + "1")["acc"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_runs_that_were_measured_could_start(place: Path) -> None:
    assert typed(place, DRY + block(PAGE, "sh", 1)).count("(dry run)") == 12


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
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
    # as the page says of the template
    assert answer["usage"]["prompt_tokens"] == len("Reverse: stressed") + 8
