"""Four moments of the kill test (tests/faults/test_kill.py): everything, rank 0, SIGTERM, the
engine.

Processes are forks here, which are known by the run's files that they hold open.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kills
import psutil
import pytest
from box import ROOT, SMALL, Box
from helpers import wait_for
from preloaded import Process

from megatron_rl.checkpoint.checkpoints import steps
from megatron_rl.data.toy import write_toy

STEPS = 6
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
RECIPE = (
    *(
        f"run.steps={STEPS}",
        "run.name=run",
        "run.if_exists=resume",
        "checkpoint.every=1",
        "checkpoint.export_hf=true",
    ),
    *(
        "model.path=data/toy/model",
        "model.init=random",
        "reward.name=chance:score",
        "learner.tensor_parallel=1",
    ),
)
PATIENCE_S = 400


class Forks(Box):
    def train(self, *overrides: str, **options: Any) -> Any:
        command = [
            "python",
            "-m",
            "megatron_rl.cli",
            "train",
            QUICKSTART,
            *SMALL,
            *RECIPE,
            *overrides,
        ]
        with (self.folder / "screen").open("a") as screen:
            environment = os.environ | {"TMPDIR": str(self.tmp)}
            return Process(
                "torch",
                command,
                cwd=self.folder,
                env=environment,
                stdout=screen,
                stderr=subprocess.STDOUT,
            )

    def holders(self) -> dict[int, set[str]]:
        """Process -> the run's files that it has open."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                names = {os.readlink(file) for file in (folder / "fd").iterdir()}
            except OSError:
                continue
            if mine := {Path(name).name for name in names if name.startswith(f"{self.run}/")}:
                found[int(folder.name)] = mine
        return found

    def first(self, file: str) -> list[int]:
        """The oldest of those that have it open."""
        return sorted(pid for pid, names in self.holders().items() if file in names)[:1]

    def step(self) -> int:
        """The last one that the latest attempt has made."""
        logs = sorted(
            self.run.glob("logs/attempt_*/driver.log"), key=lambda path: int(path.parent.name[8:])
        )
        found = (
            re.findall(
                r" train: step\s+(\d+)/",
                logs[-1].read_text(),
                re.M,
            )
            if logs
            else []
        )
        return int(found[-1]) if found else 0

    def kept(self) -> int:
        """The newest checkpoint's."""
        return max(steps(self.run / "checkpoints"), default=0)

    def close(self) -> None:
        for pid in self.holders():
            psutil.Process(pid).kill()
        super().close()


MOMENTS: list[
    tuple[int, int, Callable[[Forks], list[int]]]
] = [  # after which step, the signal, to whom
    (1, signal.SIGKILL, lambda box: list(box.holders())),
    (2, signal.SIGKILL, lambda box: box.first("rank_0.log")),
    (3, signal.SIGTERM, lambda box: box.first("owner.lock")),
]


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[tuple[Forks, Forks]]:
    made = []
    for name in ("killed", "alone"):
        write_toy(tmp_path / name / "data" / "toy")
        made.append(Forks(tmp_path / name))
        made[-1].reward()
    try:
        yield made[0], made[1]
    finally:
        for box in made:
            box.close()


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.fault(
    "everything, rank 0 or the engine is killed, or SIGTERM comes", "it ends as a run left alone"
)
def test_a_killed_run_goes_on(boxes: tuple[Forks, Forks]) -> None:
    box, alone = boxes
    assert alone.train().wait(PATIENCE_S) == 0, alone.screen[-3000:]
    for step, number, victims in MOMENTS:
        process = box.train()
        reached = lambda step=step: box.kept() >= step or process.poll() is not None  # noqa: B023, E731
        wait_for(reached, f"the checkpoint of step {step}")
        assert process.poll() is None, box.screen[-3000:]
        for pid in victims(box):
            os.kill(pid, number)
        assert process.wait(PATIENCE_S) != 0
        wait_for(lambda: not box.holders(), "the end of all processes")
    process = box.train()
    wait_for(lambda: box.step() >= 4 or process.poll() is not None, "step 4")
    for pid in box.first("sampler.log"):
        os.kill(pid, signal.SIGKILL)
    # where the run ends with its engine, the next attempt does the rest
    if process.wait(PATIENCE_S):
        assert box.train().wait(PATIENCE_S) == 0, box.screen[-3000:]
    assert len(list((box.run / "logs").iterdir())) >= 4
    assert not kills.differences(box.run, alone.run)
    assert not kills.miscounted(box.run, STEPS)
