"""Kills a run at random moments, lets it go on, and counts from its files alone what came of it."""

import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from box import Box, lines
from helpers import wait_for

from megatron_rl.checkpoint.checkpoints import steps

STEPS = 12
START_S = 400.0
END_S = 180.0
RECIPE = (
    f"run.steps={STEPS}",
    "run.if_exists=resume",
    "checkpoint.every=2",
    "checkpoint.keep_last=2",
    "eval.every=4",
    "eval.max_prompts=32",
    "learner.n_minibatches=2",
    "rollout.max_gen_batches=2",
    "checkpoint.export_hf=true",
    "reward.name=chance:score",
)
VICTIMS = ("rank 0", "rank 1", "everything", "engine", "launcher", "TERM", "USR1")
REPLACED = ("engine", "reward worker")  # the run goes on with another one
UNEQUAL = ("time/", "perf/", "rollout/restarts")  # what differs between two runs that are the same


@dataclass(frozen=True)
class Moment:
    victim: str
    line: int  # of metrics.jsonl that has to be there first; 0: while the run starts
    delay_s: float

    def __str__(self) -> str:
        return f"{self.victim} {self.delay_s:.1f} s after line {self.line}"


def moments(seed: int, count: int) -> list[Moment]:
    """Ascending in the run, so that each attempt gets there; the last step is left to the end."""
    choice = random.Random(seed)
    lines = sorted(choice.randrange(STEPS - 1) for _ in range(count))
    return [
        Moment(choice.choice(VICTIMS), line, choice.uniform(0, 1.5 if line else 30))
        for line in lines
    ]


def strike(
    box: Box,
    moment: Moment,
    goes_on: subprocess.Popen[str] | None,
    more: Sequence[str] = (),
    **at: str,
) -> subprocess.Popen[str] | None:
    """Kills a run at a moment, and waits until nothing is left of it.

    `goes_on`: the run as the strike before has left it; None: it is started, or goes on from what
    it has kept. What is REPLACED ends no run: that run is the one that goes on, and is returned.
    """
    begun = 0.0 if goes_on else time.time()
    process = goes_on or box.train(*RECIPE, *more, **at)

    def there() -> bool:
        return _step(box, begun) >= moment.line or process.poll() is not None

    wait_for(there, f"line {moment.line}", START_S)
    time.sleep(moment.delay_s)
    for pid, number in _targets(box, moment.victim, process.pid):
        try:
            psutil.Process(pid).send_signal(number)
        except psutil.NoSuchProcess:  # the run was faster
            pass
    if moment.victim in REPLACED and process.poll() is None:
        return process
    process.wait(START_S)
    box.until_over(END_S)
    return None


def unkept(box: Box, moment: Moment) -> list[str]:
    """Omissions of a run that was asked to end: no word of it, or no state of its last step."""
    status = box.status()
    kept = steps(box.run / "checkpoints")
    if moment.victim not in ("TERM", "USR1") or status["state"] == "finished":
        return []
    found = []
    if status["state"] != "stopped":
        found.append(f"the run is {status['state']}: {status.get('reason')}")
    if moment.line and (status.get("step") or 0) > max(kept, default=0):
        found.append(
            f"checkpoints of steps {kept} after step {status.get('step')}: {status.get('reason')}"
        )
    return found


def _step(box: Box, begun: float) -> int:
    """The last step that the newest attempt has recorded; 0 before the first, and before one that
    began after that.
    """
    logs = [
        log for log in box.run.glob("logs/attempt_*/driver.log") if log.stat().st_mtime >= begun
    ]
    newest = max(logs, key=lambda log: int(log.parent.name[8:]), default=None)
    steps = re.findall(r" train: step\s+(\d+)/", newest.read_text(), re.M) if newest else []
    return int(steps[-1]) if steps else 0


def _targets(box: Box, victim: str, launcher: int) -> list[tuple[int, int]]:
    found = {each.pid: " ".join(each.info["cmdline"] or []) for each in box.processes()}
    ranks = sorted(pid for pid, words in found.items() if "megatron_rl.rank" in words)
    engines = [pid for pid, words in found.items() if "megatron_rl.engine" in words]
    chosen = {
        "rank 0": ranks[:1],
        "rank 1": ranks[1:2],
        "everything": list(found),
        "engine": engines,
        "reward worker": [pid for pid, words in found.items() if "rewards.worker" in words],
    }.get(victim, [launcher])
    number = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1}.get(victim, signal.SIGKILL)
    return [(pid, number) for pid in chosen]


def differences(run: Path, undisturbed: Path) -> list[str]:
    """Differences of two runs: metrics (times aside), ledger, bytes of the weights."""
    found = []
    mine, theirs = (lines(each / "metrics.jsonl") for each in (run, undisturbed))
    if len(mine) != len(theirs):
        found.append(f"{len(mine)} lines of metrics, not {len(theirs)}")
    for one, other in zip(mine, theirs, strict=False):
        unequal = [key for key in repeated(one, other) if one.get(key) != other.get(key)]
        if unequal:
            found.append(f"step {one.get('progress/step')}: {unequal[:3]} differ")
    if (run / "ledger.jsonl").read_text() != (undisturbed / "ledger.jsonl").read_text():
        found.append("the ledgers differ")
    for path in sorted((undisturbed / "model").iterdir()):
        if (run / "model" / path.name).read_bytes() != path.read_bytes():
            found.append(f"model/{path.name} differs")
    return found


def repeated(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys that are equal in two equal runs: no times."""
    return [
        key
        for key in sorted(one.keys() | other.keys())
        if not key.startswith(UNEQUAL) and not key.endswith("_s")
    ]


def whole(box: Box, most: int = 2) -> None:
    """Check a resumed run: each prompt is drawn once, and no rollout exceeds the staleness."""
    assert not too_old(box.run, most)
    assert not miscounted(box.run, len((box.run / "ledger.jsonl").read_text().splitlines()))


def miscounted(run: Path, count: int = STEPS) -> list[str]:
    """Each prompt of the order is drawn by one step, and trained on by no other."""
    found = []
    expected = 0
    trained = []
    for line in lines(run / "ledger.jsonl"):
        first, end = line["drawn"]
        if first != expected:
            found.append(f"step {line['step']} drew from {first}, not from {expected}")
        if not all(first <= ordinal < end for ordinal in line["trained"]):
            found.append(f"step {line['step']} trained on what it had not drawn")
        expected = end
        trained = trained + line["trained"]
    if len(set(trained)) != len(trained):
        found.append("a prompt was trained on twice")
    steps = [line["step"] for line in lines(run / "ledger.jsonl")]
    if steps != list(range(1, count + 1)):
        found.append(f"the ledger holds the steps {steps}")
    return found


def too_old(run: Path, most: int) -> list[str]:
    """Steps with an answer of a policy that more updates have gone by since than may."""
    stale = {
        line["progress/step"]: line.get("rollout/staleness_max", 0)
        for line in lines(run / "metrics.jsonl")
    }
    return [f"step {step}: {age} updates" for step, age in stale.items() if age > most]
