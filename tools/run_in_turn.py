"""Children in turn, one or several at a time, and what signals to this process mean for them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from megatron_rl.processes.process import STOP_AFTER_STEP, die_with_parent, hold, release

STOP_TIMEOUT_S = 30.0  # a run stops its own children within ten seconds
NOT_STARTED = "not started"
FINISHED = "finished"
STOPPED = "stopped"


@dataclass(frozen=True)
class Job:
    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's own


@dataclass(frozen=True)
class _Child:
    job: Job
    process: subprocess.Popen[bytes]
    cores: frozenset[int]
    begun: float


def shares(cores: Sequence[int], jobs: int) -> list[frozenset[int]]:
    """Neighbours together, all of them used, none twice."""
    bounds = [len(cores) * number // jobs for number in range(jobs + 1)]
    return [frozenset(cores[low:high]) for low, high in pairwise(bounds)]


class Runner:
    """Signals to this process stop the children first. Of several at a time each has its own cores,
    and says what it has to say into a file of `logs`.
    """

    def __init__(self, command: Sequence[str], logs: Path, at_once: int = 1) -> None:
        self.command = command
        self._logs = logs
        self.at_once = at_once
        self._free = shares(sorted(os.sched_getaffinity(0)), at_once)
        self._children: list[_Child] = []
        self.interrupted = self.last = False
        signal.signal(STOP_AFTER_STEP, self._finish)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)

    def run(
        self,
        jobs: Sequence[Job],
        started: Callable[[Job], None] = lambda job: None,
        ended: Callable[[Job, str, float], None] = lambda job, outcome, seconds: None,
    ) -> dict[str, str]:
        """Run the jobs and return how each has ended, by its name."""
        outcomes = {job.name: NOT_STARTED for job in jobs}
        waiting = list(jobs)
        while self._children or (waiting and not (self.interrupted or self.last)):
            while waiting and self._free and not (self.interrupted or self.last):
                started(job := waiting.pop(0))
                self._start(job)
                # the signal came while the child was being started; the others have heard of it
                if self.interrupted:
                    self._children[-1].process.send_signal(signal.SIGINT)
            if self.interrupted:
                self._wait_stopped()
            for child in list(self._ended()):
                status = child.process.returncode
                outcome = FINISHED if status == 0 else f"failed, exit status {status}"
                outcomes[child.job.name] = STOPPED if self.interrupted else outcome
                ended(
                    child.job,
                    outcomes[child.job.name],
                    time.monotonic() - child.begun,
                )
            time.sleep(0.1)
        return outcomes

    def log_of(self, name: str) -> Path | None:
        """Return the log of one of several children; a single child inherits this stdout."""
        if self.at_once > 1:
            return self._logs / f"{name}.log"
        return None

    def progress(self, job: Job) -> str:
        return job.name + (f"  its output: {log}" if (log := self.log_of(job.name)) else "")

    def _start(self, job: Job) -> None:
        # a session of its own: the terminal's Ctrl-C reaches the child once, through _stop; it ends
        # with this process
        cores = self._free.pop(0)
        parent = os.getpid()
        hold(STOP_AFTER_STEP)
        with ExitStack() as files:
            output = None
            if log := self.log_of(job.name):
                log.parent.mkdir(parents=True, exist_ok=True)
                output = files.enter_context(log.open("ab"))
            process = subprocess.Popen(
                [*self.command, *job.arguments],
                env=os.environ | job.environment,
                stdout=output,
                stderr=output and subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(_begin, parent, cores),
            )
        self._children.append(_Child(job, process, cores, time.monotonic()))
        release(STOP_AFTER_STEP)

    def _ended(self) -> Iterator[_Child]:
        for child in self._children[:]:
            if child.process.poll() is not None:
                self._children.remove(child)
                self._free.append(child.cores)
                yield child

    def _stop(self, number: int, _frame: object) -> None:
        if not self.interrupted:
            self.interrupted = True
            self._send(signal.SIGINT)

    def _finish(self, number: int, _frame: object) -> None:
        self.last = True
        self._send(number)

    def _send(self, number: int) -> None:
        for child in self._children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    def _wait_stopped(self) -> None:
        until = time.monotonic() + STOP_TIMEOUT_S
        for child in self._children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()


def _begin(parent: int, cores: frozenset[int]) -> None:
    """Set up a child before it executes its command."""
    os.sched_setaffinity(0, cores)
    die_with_parent(parent, signal.SIGTERM)
