"""What a scheduler sends, on a cluster made for the occasion; and Ctrl-C of the rehearsal."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from box import ROOT, SMALL, Box, wait_for

from megatron_rl.checkpoint import checkpoints

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))),
    reason="needs root and Debian's slurm-wlm and munge",
)
END_S = 400
LISTENING = (
    "env",
    "--default-signal=INT",
)  # what is started in the background ignores it, and a shell cannot undo that


class Rehearsal:
    """`slurm/rehearse.sh` in the repository's folder, with the box's data and run directory."""

    def __init__(self, box: Box) -> None:
        self.box = box
        toy = box.folder / "data" / "toy"
        settings = [
            "run.name=run",
            f"run.root={box.folder / 'runs'}",
            "run.steps=100000",
            "log.export=true",
            "checkpoint.every=2",
            *SMALL,
        ]
        settings += [f"model.path={box.folder / 'runs' / 'toy_sft' / 'model'}", f"data.train={toy / 'train.jsonl'}"]
        settings += [f"data.eval={toy / 'test.jsonl'}"]
        with (box.folder / "screen").open("w") as screen:
            self.process = subprocess.Popen(
                [*LISTENING, "slurm/rehearse.sh", "slurm/dapo_int8.sbatch", "recipes/quickstart.yaml", *settings],
                cwd=ROOT, env=os.environ | {"TMPDIR": str(box.tmp)}, stdout=screen, stderr=screen,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.below: list[psutil.Process] = []

    @property
    def job(self) -> str:
        """Empty before there is one."""
        found = re.search(r"^rehearse: job (\d+)", self.box.screen, re.M)
        return found[1] if found else ""

    def scancel(self, *words: str) -> bool:
        return self._slurm("scancel", "--signal=USR1", *words).returncode == 0

    def step(self) -> str:
        """The learner's, once there is one."""
        steps = self._slurm("squeue", "-h", "-s", "-o", "%j %i").stdout.split("\n")
        return next((line.split()[1] for line in steps if line.startswith("learner ")), "")

    def _slurm(self, *command: str) -> subprocess.CompletedProcess[str]:
        (conf,) = {one.environ()["SLURM_CONF"] for one in self.daemons() if "slurmctld" in one.name()}
        return subprocess.run(command, env=os.environ | {"SLURM_CONF": conf}, capture_output=True, text=True)

    def daemons(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ended_well(self) -> None:
        assert self.process.wait(END_S) == 0, self.box.screen
        assert (self.box.run / "model" / "model.safetensors.index.json").exists()
        assert checkpoints.steps(self.box.run / "checkpoints")
        self.left_nothing()

    def ended_in_the_start(self) -> None:
        """There was nothing to save."""
        self.process.wait(END_S)
        assert not (self.box.run / "status.json").exists() or self.box.status()["state"] == "stopped", self.box.screen
        self.left_nothing()

    def left_nothing(self) -> None:
        assert self.box.steps() < 1000
        assert not self.box.processes()
        assert not list(self.box.tmp.iterdir())


@pytest.fixture
def rehearsal(box: Box) -> Iterator[Rehearsal]:
    rehearsal = Rehearsal(box)
    try:
        yield rehearsal
    finally:
        rehearsal.process.terminate()
        rehearsal.process.wait(120)


@pytest.mark.fault(
    "scancel sends USR1 to every process of a step", "the step is finished, the model exported, status 0"
)
def test_usr1_to_every_process_of_the_step(rehearsal: Rehearsal) -> None:
    # how long a save takes is known from one that was made: before that, nothing is begun that may not end in time
    wait_for(lambda: checkpoints.steps(rehearsal.box.run / "checkpoints"), END_S, "a checkpoint")
    saved = rehearsal.box.steps()
    wait_for(lambda: rehearsal.box.steps() >= saved + 2, END_S, "steps after it")
    assert rehearsal.scancel(rehearsal.job)
    rehearsal.ended_well()


@pytest.mark.fault("scancel sends USR1 as soon as there is a step", "it is kept; the run ends before its first step")
def test_usr1_in_the_first_moment_of_the_ranks(rehearsal: Rehearsal) -> None:
    wait_for(lambda: rehearsal.job, END_S, "the job")
    wait_for(lambda: f"job {rehearsal.job}, start 1" in rehearsal.box.screen, END_S, "the prologue's last word")
    wait_for(lambda: (step := rehearsal.step()) and rehearsal.scancel(step), 60, "a step that can be signalled")
    rehearsal.ended_in_the_start()


@pytest.mark.fault("USR1 reaches a batch script that still checks the recipe", "the job ends, and is not queued again")
def test_usr1_in_the_prologue(rehearsal: Rehearsal) -> None:
    wait_for(lambda: rehearsal.job, END_S, "the job")
    wait_for(lambda: rehearsal.scancel("--batch", rehearsal.job), 60, "a batch script that can be signalled")
    rehearsal.ended_in_the_start()


@pytest.mark.fault("Ctrl-C of a rehearsal", "the job ends, and the daemons after it")
def test_an_interrupted_rehearsal_leaves_nothing(rehearsal: Rehearsal) -> None:
    wait_for(lambda: rehearsal.box.steps() >= 2, END_S, "the first steps")
    started = rehearsal.daemons()
    os.killpg(rehearsal.process.pid, signal.SIGINT)  # as a terminal does
    assert rehearsal.process.wait(120) != 0
    psutil.wait_procs(started, 30)
    assert not [one for one in started if one.is_running()]
    assert not rehearsal.box.processes()
    assert rehearsal.box.status()["state"] == "stopped"
    assert not Path(rehearsal.box.tmp).exists() or not list(rehearsal.box.tmp.iterdir())
