"""A run is asked to end: what the clock expects, what is decided, and that what was given up comes
again exactly.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kills
import pytest
from helpers import logged, wait_for
from preloaded import run

from megatron_rl.checkpoint import checkpoints
from megatron_rl.config.schema import IfExists
from megatron_rl.data.toy import write_toy
from megatron_rl.processes.process import hold
from megatron_rl.supervision.stop_request import (
    ASKS,
    SAVE_LIMIT_S,
    StepAborted,
    StopRequest,
    ask_driver,
)
from megatron_rl.tracking.run_dir import open_run
from megatron_rl.tracking.status import mark_status, read_status
from megatron_rl.tracking.timeline import PhaseClock

ROOT = Path(__file__).parent.parent.parent


def test_the_rest_of_a_step_is_what_the_longest_of_the_last_ones_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = PhaseClock()
    assert clock.rest() == math.inf
    # of the last eight
    for rollout, update in (
        (9.0, 9.0),
        (4.0, 2.0),
        *[(1.0, 1.0)] * 6,
        (6.0, 1.0),
    ):
        for name, seconds in (("rollout", rollout), ("update", update)):
            clock.enter(name)
            now += seconds
            clock.leave()
        clock.finish_step()
    clock.enter("rollout")
    now += 1.0
    assert (clock.rest(), clock.rest(after=True)) == (7.0, 2.0)
    now += 60.0
    assert (clock.rest(), clock.rest(after=True)) == (2.0, 2.0)
    clock.leave()
    clock.enter("update")
    assert (clock.rest(), clock.rest(after=True)) == (2.0, 0.0)


class Clock(PhaseClock):
    """Fix the time of the rest of the step, independent of measurements."""

    seconds = 0.0

    def rest(self, after: bool = False) -> float:
        return self.seconds


class Alone:
    def broadcast(self, value: object = None) -> object:
        return value


@pytest.fixture
def asked(run_folder: Path, handlers: None) -> Iterator[StopRequest]:
    open_run(run_folder, IfExists.refuse, "run: {name: run}")
    mark_status(run_folder, "running")
    try:
        with StopRequest(Clock(), run_folder) as request:
            request.save_s = 1.0
            yield request
    finally:
        hold(signal.SIGUSR1)


LISTENS = """
import os, signal, sys, time
from pathlib import Path
from compiled_kernel import compile_here
from megatron_rl.tracking.timeline import PhaseClock
from megatron_rl.supervision.stop_request import StopRequest
with StopRequest(PhaseClock(), Path(sys.argv[1])) as request:
    request.step = 1
    compile_here()
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1)
    assert request.reason, "lost"
"""


@pytest.mark.fault(
    "USR1 comes to a rank that has compiled Triton kernels", "the run stops after its step"
)
def test_a_compiler_does_not_take_the_request(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LISTENS, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def said(run: Path, word: str) -> dict:
    wait_for(lambda: word in (read_status(run).get("stopping") or {"said": ""})["said"], word)
    return read_status(run)["stopping"]


@pytest.mark.fault(
    "a run is asked to end and has the time", "its status says so; the step is finished"
)
@pytest.mark.parametrize("number", ASKS)
def test_a_step_that_has_the_time_is_finished(
    asked: StopRequest, run_folder: Path, number: int
) -> None:
    asked.begin(3)
    with asked.waiting():
        os.kill(os.getpid(), number)
        stopping = said(run_folder, "of step 3: the step is finished")
    asked.check()
    assert (stopping["limit_s"] is None) == (number == signal.SIGUSR1)
    assert asked.reason.startswith(signal.Signals(number).name)
    assert asked.reason.endswith("of step 3")
    with pytest.raises(StepAborted):
        asked.begin(4)


@pytest.mark.fault("a run is asked to end and has no time", "what it waits for is left at once")
def test_a_step_that_has_no_time_is_given_up(asked: StopRequest, run_folder: Path) -> None:
    asked._clock.seconds = 1e6  # type: ignore[attr-defined]
    asked.begin(3)

    def generate() -> None:
        with asked.waiting():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
            waited.append(True)

    waited: list[bool] = []
    with pytest.raises(StepAborted, match=r"SIGTERM .*step 3"):
        ask_driver(Alone(), generate)
    assert not waited, "it is left, and not waited for"
    assert "the newest finished update is saved" in said(run_folder, "saved")["said"]
    assert not asked._waiting


@pytest.mark.fault("a run is asked to end before its first step", "it ends at once")
@pytest.mark.parametrize("number", ASKS)
def test_what_ends_a_run_at_once(asked: StopRequest, run_folder: Path, number: int) -> None:
    with pytest.raises(KeyboardInterrupt, match="stopped by SIG"):
        os.kill(os.getpid(), number)
    said(run_folder, "nothing yet to be saved")


@pytest.mark.fault(
    "Slurm sends SIGTERM to a job, and srun once more to its step", "that is one request, not two"
)
def test_a_signal_that_comes_twice(asked: StopRequest, run_folder: Path) -> None:
    asked.begin(3)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    said(run_folder, "the step is finished")
    asked.check()


@pytest.fixture
def limited(asked: StopRequest, monkeypatch: pytest.MonkeyPatch) -> StopRequest:
    """A request in step 3 of a job that ends in two hours."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 7200)))
    asked.begin(3)
    return asked


@pytest.mark.fault("the time limit of a job is too near for the step", "the step is given up")
def test_the_time_limit_of_a_job_counts(limited: StopRequest, run_folder: Path) -> None:
    limited._clock.seconds = 10_000.0  # type: ignore[attr-defined]
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "2h46m, with 1h" in said(run_folder, "the newest finished update")["said"]


def test_a_late_save_has_its_time(limited: StopRequest, run_folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    said(run_folder, "is finished and saved first")
    limited._asked_at -= 1000
    limited._end = time.monotonic()
    assert said(run_folder, "time is up")["limit_s"] > 1000 + SAVE_LIMIT_S


def test_a_step_is_given_up_once(limited: StopRequest, run_folder: Path) -> None:
    notes = logged()
    limited._clock.seconds = 600.0  # type: ignore[attr-defined]
    for number, words in (
        (signal.SIGUSR1, "is finished and saved first"),
        (signal.SIGTERM, "whose rest takes"),
    ):
        os.kill(os.getpid(), number)
        limit_s = said(run_folder, words)["limit_s"]
    assert limit_s > SAVE_LIMIT_S
    os.kill(os.getpid(), signal.SIGTERM)
    said(run_folder, "is about to end")
    assert len(notes) == 3


# in a worker that has scored so many answers of the training set, or of the other one: USR1 to the
# run
REWARD = """
import os, signal, time, zlib
scored = {"train": 0, "eval": 0}
moment = os.environ["MOMENT"].split()
def score(row, key, response):
    kind = row["kind"]
    scored[kind] += 1
    if moment and (kind, scored[kind]) == (moment[0], int(moment[1])):
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(60)  # longer than it takes to be noticed
    return zlib.crc32(response.encode()) % 7 / 6
"""
SETTINGS = (
    "run.name=run",
    "run.steps=3",
    "run.if_exists=resume",
    "model.path=toy/model",
    "model.init=random",
    "data.train=train.jsonl",
    "data.eval=eval.jsonl",
    "reward.name=signals:score",
    "reward.workers=1",
    "reward.timeout_s=100",
    "run.variables=[MOMENT]",
    "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    "rollout.max_gen_batches=1",
    "rollout.max_response_tokens=12",
    "eval.every=1",
    "eval.max_prompts=8",
    "checkpoint.every=600min",
    "sampler.vllm.max_num_seqs=64",
    "checkpoint.export_hf=true",
    "learner.n_minibatches=1",
    "quantization.smoothing=0.5",
    "sync.probe_every=0",
)


def train(place: Path, moment: str) -> str:
    """An attempt in a job whose time is up."""
    env = {**os.environ, "MOMENT": moment, "SLURM_JOB_END_TIME": "1"}
    command = [
        sys.executable,
        "-m",
        "megatron_rl.cli",
        "train",
        str(ROOT / "recipes" / "quickstart.yaml"),
        *SETTINGS,
    ]
    done = run("torch", command, cwd=place, timeout=400, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.fault(
    "steps are given up in a rollout and in an evaluation",
    "they come again, and nothing else differs",
)
def test_what_is_given_up_comes_again(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")
    for kind, name in (("train", "train"), ("eval", "test")):
        rows = [
            json.loads(line)
            for line in (tmp_path / "toy" / f"{name}.jsonl").read_text().splitlines()
        ]
        (tmp_path / f"{kind}.jsonl").write_text(
            "".join(json.dumps(row | {"kind": kind}) + "\n" for row in rows)
        )
    (tmp_path / "signals.py").write_text(REWARD)
    folder = tmp_path / "runs" / "run"
    train(tmp_path, "")
    undisturbed = folder.rename(tmp_path / "undisturbed")

    screen = train(tmp_path, "train 50")  # of 32 answers a step
    status = read_status(folder)
    assert status["state"] == "stopped"
    assert "rollout of step 2" in status["reason"], status
    assert "the newest finished update is saved" in screen
    assert "tools/convert.py export" in screen
    assert not (folder / "model").exists()
    assert (checkpoints.steps(folder / "checkpoints"), len(records_of(folder))) == ([1], 2)

    train(tmp_path, "eval 4")  # this attempt's first evaluation is of step 2
    status = read_status(folder)
    assert "eval of step 2" in status["reason"], status
    assert checkpoints.steps(folder / "checkpoints") == [2, 1]
    assert len(records_of(folder)) == 2  # its line is in the checkpoint, as far as it goes
    assert status["before"]["state"] == "stopped"

    train(tmp_path, "")
    assert not kills.differences(folder, undisturbed)


def records_of(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()
