"""Ends of whole runs: status.json is true, the last line on the screen is the reason, the one above
the cause.
"""

import json
import shutil
import signal
import subprocess

import pytest
from box import Box, lines
from helpers import file_system, wait_for

from megatron_rl.tracking.causes import Cause
from megatron_rl.tracking.status import read_status

PATIENCE_S = 400
ALONE = "learner.tensor_parallel=1"  # where it does not matter how many ranks there are


def last_line(box: Box) -> str:
    assert "Traceback" not in box.screen.rpartition("failed; the end of")[0]
    assert "Tokenizer not available" not in box.screen
    return box.screen.rstrip().splitlines()[-1]


def cause(box: Box) -> tuple[str, str, str]:
    """Class, process and phase in status.json, as on the screen."""
    found = box.status()["cause"]
    why = box.screen.rstrip().splitlines()[-2]
    assert why == Cause.read(found).paragraph()
    return found["class"], found["process"], found["phase"]


@pytest.mark.fault("a whole run's output goes to `head`", "it goes on to its end")
def test_a_pipe_that_is_closed(box: Box) -> None:
    head = subprocess.Popen(
        ["head", "-n", "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    process = box.train("run.steps=2", ALONE, stdout=head.stdin)
    assert head.stdin is not None
    head.stdin.close()
    assert process.wait(PATIENCE_S) == 0, box.screen
    assert box.status()["state"] == "finished"


@pytest.mark.fault(
    "the engine, or a worker of it, is killed",
    "another takes its place; after three, the run says why",
)
def test_a_killed_engine(box: Box) -> None:
    process = box.begin("sampler.tensor_parallel=2", ALONE)
    for kill in range(4):
        engine = min(box.processes("engine.child"), key=lambda one: one.create_time())
        second = [one for one in engine.children() if "Worker_TP1" in str(one.cmdline())]
        second[0].kill()
        if kill < 3:
            box.goes_on(3)
    assert process.wait(PATIENCE_S) != 0, box.screen
    assert sum(line.get("rollout/restarts", 0) for line in box.metrics()) == 3
    assert box.status()["state"] == "failed"
    # vLLM may have seen that its worker is gone before the system says how it ended
    of_two = ("VllmWorker-1 was ended by SIGKILL", "VllmWorker-1 was gone")
    assert any(end in last_line(box) for end in of_two)
    assert not box.processes("engine")
    assert cause(box)[:2] == ("NoServerLeft", "the sampler's engine")


REWARDS = """
import subprocess
left, asked = [], []
def later(row, answer_key, response):  # a start asks it for a few rows
    asked.append(response)
    return 1 / (len(asked) <= 8)
def leaves(row, answer_key, response):
    if not left:
        left.append(subprocess.Popen(["sleep", "10000"], start_new_session=True))
    return 0.5
"""
WRONG = {
    "reward": (("reward.name=broken:later",), ("RewardError", "the reward workers", "rollout")),
    "non_finite": (
        (
            "reward.name=chance:score",
            "optim.lr=1e30",
            "optim.warmup_steps=0",
            "learner.n_minibatches=4",
        ),
        ("NonFiniteError", "rank 0", "update"),
    ),
    "probe": (("sync.probe_budget=1e-9",), ("SyncMismatch", "the sampler's engine", "sync")),
}


@pytest.mark.fault(
    "rewards crash, a loss is no number, a probe is beyond its budget",
    "the cause is named with its phase",
)
@pytest.mark.parametrize("what", WRONG)
def test_why(box: Box, what: str) -> None:
    overrides, expected = WRONG[what]
    box.reward(0)
    (box.folder / "broken.py").write_text(REWARDS)
    assert box.train("run.steps=10", *overrides).wait(PATIENCE_S) == 1, box.screen
    assert cause(box) == expected
    assert last_line(box).startswith("failed: ")


@pytest.mark.fault(
    "an alarm is to end a whole run", "it ends after that step, whole, and says which alarm it was"
)
def test_an_alarm_that_stops(box: Box) -> None:
    process = box.train("run.steps=100000", ALONE, "log.alarms={ess: {stop: 1.0}}")
    assert process.wait(PATIENCE_S) == 0, box.screen
    status = box.status()
    assert (status["state"], status["step"]) == ("stopped", 5)
    assert "alarm ess: 0.9" in status["reason"]
    assert (box.run / "checkpoints" / "step_5" / "checkpoint.json").exists()


@pytest.mark.fault(
    "reward workers of a whole run are killed, which left programs behind, then W&B's",
    "it goes on; all end with it",
)
def test_a_killed_reward_worker(box: Box) -> None:
    (box.folder / "broken.py").write_text(REWARDS)
    process = box.begin("reward.workers=2", "reward.name=broken:leaves", "log.wandb=offline", ALONE)
    for _ in range(3):
        box.processes("rewards.worker")[0].kill()
        box.goes_on(3)
    assert len(box.processes("rewards.worker")) == 2
    assert sum(line.get("reward/errors", 0) for line in box.metrics()) <= 3
    # one of each worker so far; the newest may not have begun
    box.until(lambda: len(box.processes("sleep 10000")) == 5, "a program of every worker")
    assert box.processes("wandb-core")
    for one in box.processes("wandb-core"):
        one.kill()
    box.goes_on(3)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(PATIENCE_S) == 0, box.screen
    box.until_over(60)


@pytest.mark.fault(
    "the disk of a whole run is full, and has room again",
    "the run goes on, and says what is missing",
)
def test_a_full_disk(box: Box) -> None:
    with file_system(box.folder / "small", "16m") as folder:
        if not folder.is_mount():
            pytest.skip("needs the right to mount")
        run = folder / "run"
        process = box.begin(
            f"run.root={folder}", "checkpoint.every=2", "checkpoint.keep_last=1", steps=0
        )
        box.until((run / "metrics.jsonl").exists, "the first lines")
        with (folder / "filler").open("wb", buffering=0) as filler:
            filler.write(b"x" * shutil.disk_usage(folder).free)
        box.until(lambda: box.screen.count(" train: step ") > 8, "steps without room")
        assert box.screen.count("has no room for") <= 2
        assert "was not saved" in box.screen
        box.until(lambda: "alarm: failed_saves: 3, above 2" in box.screen, "an alarm")
        box.until(lambda: "failed_saves" in read_status(run)["alarms"], "the alarm in status.json")
        (folder / "filler").unlink()
        wait_for(lambda: "has room again: lines" in box.screen, "room")
        box.until(lambda: "alarm: failed_saves: 0, cleared" in box.screen, "a save")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE_S) == 0, box.screen
        status = json.loads((run / "status.json").read_text())
        assert status["state"] == "stopped"
        assert status["unrecorded"]["lines"] == 0
        assert status["unrecorded"]["rollouts"] > 0
        steps = [line["progress/step"] for line in lines(run / "metrics.jsonl")]
        assert steps == [*range(len(steps))]


@pytest.mark.fault(
    "five whole runs are started at once under one name", "one runs to its end, the others fail"
)
def test_five_starts_at_once(box: Box) -> None:
    starts = []
    for number in range(5):
        screen = (box.folder / f"screen_{number}").open("w")
        starts.append(box.train("run.steps=2", ALONE, "run.if_exists=archive", stdout=screen))
    codes = [process.wait(PATIENCE_S) for process in starts]
    said = [(box.folder / f"screen_{number}").read_text() for number in range(5)]
    assert sorted(codes) == [0, 2, 2, 2, 2], "\n".join(said)
    for code, text in zip(codes, said, strict=True):
        assert code == 0 or ("error: run.name: run directory" in text and "Traceback" not in text)
    assert box.status()["state"] == "finished"
    assert [
        path.name for path in (box.folder / "runs").iterdir() if path.name.startswith("run")
    ] == ["run"]
