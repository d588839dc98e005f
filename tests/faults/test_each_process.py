"""Each kind of process of a whole run is stopped (SIGSTOP), then killed (SIGKILL): `make test-slow`
runs this file alone of the folder.
"""

from collections.abc import Iterator
from pathlib import Path

import kills
import psutil
import pytest
from box import Box
from helpers import wait_for

from megatron_rl.data.toy import write_toy

NAMED_S = 60  # the promise
END_S = 300
RECIPE = (
    "model.init=random",
    "model.path=data/toy/model",
    "reward.name=chance:score",
    "sync.probe_budget=1000",
    "checkpoint.every=1",
)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    write_toy(tmp_path / "data" / "toy")
    with Box(tmp_path) as box:
        box.reward(0.01)
        yield box


def processes(box: Box, launcher: int) -> dict[str, psutil.Process]:
    return {
        "rank 0": box.rank(0),
        "rank 1": box.rank(1),
        "engine": box.processes("engine.child")[0],
        "reward worker 0": box.processes("rewards.worker")[0],
        "the launcher": psutil.Process(launcher),
    }


def stuck(box: Box) -> str | None:
    return (box.status().get("stuck") or {}).get("process")


@pytest.mark.timeout(900)
@pytest.mark.fault(
    "each kind of process of a whole run is stopped, then killed",
    "named within 60 s; the run goes on, or the next attempt does, and no prompt is lost",
)
def test_each_process(box: Box) -> None:
    run = box.begin(*RECIPE, "--attempts", "4", steps=2)
    for name, process in processes(box, run.pid).items():
        process.suspend()
        wait_for(lambda name=name: stuck(box) == name, f"{name} is named", NAMED_S)
        process.resume()
        wait_for(lambda: stuck(box) is None, "it goes on", NAMED_S)
        box.goes_on(1)
    for name in ("engine", "reward worker 0"):
        processes(box, run.pid)[name].kill()
        box.goes_on(2)
    assert sum(line.get("rollout/restarts", 0) for line in box.metrics()) == 1
    for attempt, rank in enumerate((1, 0), start=2):
        box.rank(rank).kill()
        box.until(lambda attempt=attempt: box.status()["attempt"] == attempt, "the next attempt")
        assert f"rank {rank}: ended by SIGKILL" in box.status()["before"]["reason"]
        assert f"why: SIGKILL: rank {rank}" in box.screen
        box.until(lambda: box.status()["state"] == "running", "it runs")
        box.goes_on(1)
    run.kill()
    box.until_over(END_S)
    recorded = len(kills.lines(box.run / "ledger.jsonl"))
    # a step is in the ledger before its weight sync, and in the status after it
    assert recorded - box.status()["step"] in (0, 1)
    assert not kills.miscounted(box.run, recorded)
