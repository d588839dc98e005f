"""Runs of conversations with what happens to runs: kills between turns, updates between them,
attempts that go on.
"""

from collections.abc import Iterator
from pathlib import Path

import kills
import pytest
from box import PATIENCE_S, Box

from megatron_rl.apps.toy_tools import write_tools
from megatron_rl.tracking.rollout_file import read_rollouts

# a policy that knows nothing stops after any token: sessions of one turn to three
TALK = """
import time, zlib
from megatron_rl.environments.environment import Environment, Step
class Talk(Environment):
    def reset(self, row):
        self.turn = 0
        return [{"role": "user", "content": row["prompt"]}]
    def step(self, answer):
        time.sleep(0.02)
        self.turn += 1
        return Step("7*8", zlib.crc32(answer.text.encode()) % 7 / 6, self.turn == 3)
"""
RECIPE = (
    "environment.name=talk:Talk",
    "model.path=data/tools/model",
    "model.init=random",
    "learner.tensor_parallel=2",
    "rollout.max_response_tokens=24",
    "rollout.max_context_tokens=128",
    "reward.overlong_filter=false",
)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    write_tools(tmp_path / "data" / "tools")
    (tmp_path / "talk.py").write_text(TALK)
    with Box(tmp_path) as box:
        box.reward()
        yield box


def finish(box: Box) -> None:
    """Train to the last step, from where the run stands."""
    status = box.train(*kills.RECIPE, *RECIPE, recipe="tools.yaml").wait(PATIENCE_S)
    assert status == 0, box.screen


def begin(box: Box, *overrides: str) -> None:
    box.begin(
        *RECIPE,
        "checkpoint.every=2",
        "checkpoint.keep_last=2",
        *overrides,
        recipe="tools.yaml",
        steps=4,
    )


@pytest.mark.fault(
    "an engine or the environments die between two turns", "they come back; no session is lost"
)
def test_killed_between_two_turns(box: Box) -> None:
    begin(box, "rollout.max_staleness=2", "rollout.in_flight=interrupt")
    for words in ("megatron_rl.engine.child", "environments.worker", "megatron_rl.engine.child"):
        for process in box.processes(words):
            process.kill()
        box.goes_on(5)
    lines = box.metrics()
    assert sum(line.get("rollout/restarts", 0) for line in lines) == 2, box.screen
    assert not any(line.get("session/errors", 0) for line in lines)
    assert all(line["session/turns_max"] > 1 for line in lines if "session/turns_max" in line)
    kills.whole(box)


@pytest.mark.fault(
    "weights are updated between the turns of a session", "each token knows its version; it goes on"
)
def test_updated_between_two_turns(box: Box) -> None:
    begin(
        box,
        "rollout.max_staleness=2",
        "rollout.in_flight=interrupt",
        "environment.max_concurrent=16",
    )
    box.goes_on(9)
    files = sorted((box.run / "rollouts").glob("step_*.parquet"))
    rows = [row for path in files for row in read_rollouts(path).to_pylist()]
    assert any(len(set(row["versions"] or ())) > 1 for row in rows), (
        "updates came in the middle of sessions"
    )
    assert not kills.too_old(box.run, 2)
    for line in box.metrics()[1:]:
        assert 0 <= line["rollout_corr/k3_kl"] < 0.1


@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "a run of sessions is killed at random moments and goes on",
    "as one left alone, but for rounding",
)
def test_a_killed_run_goes_on(box: Box, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Box(tmp_path_factory.mktemp("undisturbed")) as other:
        for name in ("data", "talk.py", "chance.py"):
            (other.folder / name).symlink_to(box.folder / name)
        finish(other)
    for victim, line in (("everything", 3), ("rank 1", 5), ("launcher", 8)):
        assert (
            kills.strike(
                box,
                kills.Moment(victim, line, 0.3),
                None,
                RECIPE,
                recipe="tools.yaml",
            )
            is None
        )
    finish(box)
    assert not kills.miscounted(box.run)
    assert (box.run / "ledger.jsonl").read_text() == (other.run / "ledger.jsonl").read_text()
    for mine, theirs in zip(box.metrics(), other.metrics(), strict=True):
        # turns meet in other batches, which round otherwise
        for key in kills.repeated(mine, theirs):
            if not key.endswith("tool_seconds_mean"):
                assert mine[key] == pytest.approx(
                    theirs[key],
                    rel=0.01,
                    abs=1e-4,
                    nan_ok=True,
                ), key
