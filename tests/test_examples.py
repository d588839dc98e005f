"""examples/: the commands of each README.md with small steps, and what its reward accepts."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import block, typed

from megatron_rl import Answer
from megatron_rl.tracking.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
TRAINED = ("countdown", "tool_use")
SMALL = (
    "run.steps=2 rollout.prompts_per_step=8 rollout.max_gen_batches=1 learner.n_minibatches=1 "
    "eval.max_prompts=8"
)


def example(name: str) -> dict:
    return runpy.run_path(str(ROOT / "examples" / name / f"{name}.py"))


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("(5+9)*3", 1.0),
        (" 9*5-3 ", 1.0),
        ("3+5", 0.1),
        ("9+9", 0.0),
        ("42", 0.0),
        ("5/(3-3)", 0.0),
        ("3**5", 0.0),
        ("abs(3)", 0.0),
        ("((", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_scores_expressions(response: str, score: float) -> None:
    row = {"numbers": [3, 5, 9], "target": 42}
    scored = example("countdown")["reward"](row, "answer", response)
    assert scored["score"] == score
    assert scored["acc"] == (score == 1.0)


def test_countdown_holds_problems_out() -> None:
    countdown = example("countdown")
    train, test = countdown["rows"]()
    assert all(countdown["reward"](row, "answer", row["answer"])["acc"] for row in train)
    found = [{(row["target"], *sorted(row["numbers"])) for row in rows} for rows in (train, test)]
    assert found[1] and not found[0] & found[1]


def test_orders_reward_the_total_of_the_prices() -> None:
    tool_use = example("tool_use")
    for row in tool_use["orders"]()[:20]:
        orders = tool_use["Orders"]()
        orders.reset(row)
        *calls, last = tool_use["looked_up"](row)
        assert [f'[price(item="{item}")]' for item in row["items"]] == [
            turn["answer"] for turn in calls
        ]
        total = sum(map(orders.price, row["items"]))
        assert last["answer"] == str(total)
        step = orders.step(Answer(str(total), str(total)))
        assert (step.reward, step.done, step.numbers) == (1.0, True, {"looked_up": len(calls)})
        assert orders.step(Answer("0", "0")).reward == 0.0


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TRAINED)
def test_the_commands_of_an_example(empty: Path, name: str) -> None:
    shutil.copytree(ROOT / "examples", empty / "examples")
    for folder in ("conf", "recipes", "tools"):
        (empty / folder).symlink_to(ROOT / folder)
    curve = empty / "examples" / name / "curve.svg"
    curve.unlink(missing_ok=True)
    for line in block(ROOT / "examples" / name / "README.md", "bash").splitlines():
        typed(empty, line.replace("run.sh", f"run.sh {SMALL}"))
    for run in (f"{name}_sft", name):
        assert read_metrics(empty / "runs" / run / "metrics.jsonl")[-1]["progress/step"] == 2
    assert f">{name}</text>" in curve.read_text()


@pytest.mark.timeout(300)
def test_the_comparison_is_valid(empty: Path) -> None:
    grid = ROOT / "examples" / "compare_corrections" / "compare.yaml"
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "compare_corrections.py", grid, "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.endswith("to run")]
    drawn = re.search(r"runs/(\w+)\{(.+)\}(\w+)", (grid.parent / "run.sh").read_text())
    assert drawn and {drawn[1] + one + drawn[3] for one in drawn[2].split(",")} <= {*listed}
