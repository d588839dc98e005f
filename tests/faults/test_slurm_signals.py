"""Signals of a scheduler, on a cluster made for the occasion; a rank that is killed there; Ctrl-C
of the rehearsal.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from box import Box, needs_slurm
from helpers import wait_for

from megatron_rl.checkpoint import checkpoints
from megatron_rl.tracking.causes import LOST_PEER
from megatron_rl.tracking.status import known_status

pytestmark = needs_slurm
END_S = 400
# what is started in the background ignores it, and no shell undoes that
LISTENING = (
    "env",
    "--default-signal=INT",
)


class Rehearsal:
    """A run without an end under `slurm/rehearse.sh`, with the box's data and run directory."""

    def __init__(self, box: Box) -> None:
        self.box = box
        settings = ("run.steps=100000", "checkpoint.export_hf=true", "checkpoint.every=2")
        model = f"model.path={box.folder}/runs/toy_sft/model"
        self.process = box.rehearse("dapo_int8", *settings, model, under=LISTENING)

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
        (conf,) = {
            one.environ()["SLURM_CONF"] for one in self.daemons() if "slurmctld" in one.name()
        }
        return subprocess.run(
            command, env=os.environ | {"SLURM_CONF": conf}, capture_output=True, text=True
        )

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
        assert (
            not (self.box.run / "status.json").exists() or self.box.status()["state"] == "stopped"
        ), self.box.screen
        self.left_nothing()

    def left_nothing(self) -> None:
        assert self.box.steps() < 1000
        self.box.left_nothing()


@pytest.fixture
def rehearsal(box: Box) -> Iterator[Rehearsal]:
    rehearsal = Rehearsal(box)
    try:
        yield rehearsal
    finally:
        rehearsal.process.terminate()
        rehearsal.process.wait(120)


@pytest.mark.fault(
    "scancel sends USR1 to every process of a step",
    "the step is finished, the model exported, status 0",
)
def test_usr1_to_every_process_of_the_step(rehearsal: Rehearsal) -> None:
    # how long a save takes is known from one that was made: before that, nothing is begun that may
    # not end in time
    wait_for(lambda: checkpoints.steps(rehearsal.box.run / "checkpoints"), "a checkpoint")
    saved = rehearsal.box.steps()
    wait_for(lambda: rehearsal.box.steps() >= saved + 2, "steps after it")
    assert rehearsal.scancel(rehearsal.job)
    rehearsal.ended_well()


@pytest.mark.fault(
    "scancel sends USR1 as soon as there is a step",
    "it is kept; the run ends before its first step",
)
def test_usr1_in_the_first_moment_of_the_ranks(rehearsal: Rehearsal) -> None:
    wait_for(lambda: rehearsal.job, "the job")
    wait_for(
        lambda: f"job {rehearsal.job}, start 1" in rehearsal.box.screen, "the prologue's last word"
    )
    wait_for(
        lambda: (step := rehearsal.step()) and rehearsal.scancel(step),
        "a step that can be signalled",
    )
    rehearsal.ended_in_the_start()


@pytest.mark.fault(
    "USR1 reaches a batch script that still checks the recipe",
    "the job ends, and is not queued again",
)
def test_usr1_in_the_prologue(rehearsal: Rehearsal) -> None:
    wait_for(lambda: rehearsal.job, "the job")
    wait_for(
        lambda: rehearsal.scancel("--batch", rehearsal.job), "a batch script that can be signalled"
    )
    rehearsal.ended_in_the_start()


@pytest.mark.fault("Ctrl-C of a rehearsal", "the job ends, and the daemons after it")
def test_an_interrupted_rehearsal_leaves_nothing(rehearsal: Rehearsal) -> None:
    wait_for(lambda: rehearsal.box.steps() >= 2, "the first steps")
    started = rehearsal.daemons()
    os.killpg(rehearsal.process.pid, signal.SIGINT)  # as a terminal does
    assert rehearsal.process.wait(120) != 0
    psutil.wait_procs(started, 30)
    assert not [one for one in started if one.is_running()]
    assert not rehearsal.box.processes()
    assert rehearsal.box.status()["state"] == "stopped"
    assert not list(rehearsal.box.tmp.glob("*"))


def task(rank: int, runs: str) -> psutil.Process:
    """By the words of its command: what srun starts has not the environment by which a box knows
    its processes.
    """
    for process in psutil.process_iter(["cmdline", "environ", "name"]):
        words = " ".join(process.info["cmdline"] or [])
        environ = process.info["environ"] or {}
        mine = (
            f"run.root={runs}" in words
            and "--ranks slurm" in words
            and process.info["name"] != "srun"
        )
        if mine and environ.get("SLURM_PROCID") == str(rank):
            return process
    raise AssertionError(f"no rank {rank}")


@pytest.mark.fault(
    "a rank is killed under srun", "the run is known to have failed, not to go on or be interrupted"
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(rehearsal: Rehearsal, rank: int) -> None:
    box = rehearsal.box
    wait_for(lambda: box.steps() > 2, "the first steps")
    task(rank, f"{box.folder}/runs").kill()
    assert rehearsal.process.wait(END_S) != 0
    status = known_status(box.run)
    assert status["state"] == "failed", status
    # rank 0 may notice before Slurm tells it
    lost_peer = (status.get("cause") or {}).get("class") == LOST_PEER
    assert lost_peer or ("terminated" if rank == 0 else "another rank") in status["reason"]
