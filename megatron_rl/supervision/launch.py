"""Launcher of the learner's ranks on this machine: starts, watches and ends them, and writes how
the run has ended.

Ranks live in sessions of their own: Ctrl-C reaches this process alone, which tells the driver rank
(stop_request.py). The driver's stdout is the terminal; every other stream is a file under
logs/attempt_N/.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_rl.config import to_yaml
from megatron_rl.config.schema import Config
from megatron_rl.files import last_lines
from megatron_rl.logs import configure, logger
from megatron_rl.models.layout import Layout
from megatron_rl.processes import process
from megatron_rl.processes.environment import DRIVER_SECRETS, compiled_code, without_secrets
from megatron_rl.processes.heartbeat import phase_of
from megatron_rl.processes.job import memory_kills
from megatron_rl.processes.scratch import Scratch
from megatron_rl.supervision.watch import HangDetector, kill
from megatron_rl.tracking.causes import HANG, HANG_HINT, LOST_PEER, Cause, of_error, read_end
from megatron_rl.tracking.console import Silence
from megatron_rl.tracking.disk import RecordLost
from megatron_rl.tracking.run_dir import LAUNCHER, RunDir, open_run
from megatron_rl.tracking.status import ENDED, mark_status, read_status

# for a driver that has not begun to stop; and for one that has, beyond the time that it reported
log = logger("launcher")
STOP_GRACE_S = 4.0
SILENT_S = 15.0  # for a driver to report its plan, which is immediate unless it is stuck
PEER_GRACE_S = 4.0  # for the other ranks to notice that one has terminated
# for the kernel to end killed processes; one that waits for a device may not be interruptible
REAP_S = 5.0
LOG_LINES_SHOWN = 25
ENDS_WITH = {signal.SIGINT: 130, signal.SIGTERM: 143, process.STOP_AFTER_STEP: 0}


def launch(config: Config, report: Callable[[RunDir], str] = lambda run: "") -> int:
    """Run every rank to its end; return the exit status. `report` writes the report before the
    final status.
    """
    configure(sys.stdout)
    kills = memory_kills()
    with Scratch() as scratch, process.ending_orphans(REAP_S):
        given = compiled_code() | scratch.environment
        run, moved = open_run(config.run.folder, config.run.if_exists, to_yaml(config))
        if moved:
            log.info(moved)
        watch = HangDetector(run.path, config.run.hang_timeout_s)
        ranks = RankProcesses(
            run, Layout.from_config(config.learner).world, scratch.path, given, watch
        )
        try:
            status = ranks.wait()
        finally:
            ranks.end()
            # for the next run of this process, if there is one
            process.hold(process.STOP_AFTER_STEP)
        failure = ranks.failure(out_of_memory=memory_kills() > kills)
    try:
        if status or read_status(run.path).get("state") not in ENDED:
            conclude(run, ranks, failure, report)
        elif said := report(run):
            log.info(said)
    finally:
        if run.lock is not None:
            run.lock.close()  # the next attempt is this process's, too
    return status


@dataclass(frozen=True)
class Failure:
    """First failure of a rank, with its cause."""

    rank: int
    reason: str
    cause: Cause


def conclude(
    run: RunDir, ranks: "RankProcesses", failure: Failure | None, report: Callable[[RunDir], str]
) -> None:
    """Write how the run ended, unless the driver has, and print it last."""
    said = read_status(run.path)
    state, reason = ending(said, ranks.stopping, failure)
    cause = Cause.read(said.get("cause"))
    if (state, reason) != (said.get("state"), said.get("reason")):
        known: dict[str, Any] = {}
        if failure:
            cause = failure.cause
            known = {"cause": cause.as_fields()}
        try:
            mark_status(run.path, state, reason, **known)
        except OSError as error:
            log.error(f"{run.status} could not be written: {error.strerror}")
    if summary := report(run):
        log.info(summary)
    if failure is None:
        return
    if lines := last_lines(ranks.log_of(failure.rank), LOG_LINES_SHOWN):
        print(f"\nrank {failure.rank} failed; the end of its log:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in lines), file=sys.stderr)
    why = f"{cause.paragraph()}\n" if cause else ""
    print(f"\n{why}{state}: {reason.partition(chr(10))[0]}", file=sys.stderr, flush=True)


def ending(
    said: Mapping[str, Any], stopping: str | None, failure: Failure | None
) -> tuple[str, str]:
    """Return state and reason, from the driver's status, a signal to this process, and the first
    failure.
    """
    state = str(said.get("state"))
    own = (state, str(said.get("reason", "")))
    if failure is None:
        if state in ENDED:
            return own
        return ("stopped", stopping) if stopping else ("finished", "")
    cause = said.get("cause") or {}
    # the driver does not know why another rank ended
    followed = failure.rank and (state == "stopped" or cause.get("class") == LOST_PEER)
    if failure.cause.name == HANG or followed or state not in ENDED:
        return ("failed", failure.reason)
    return own


class RankProcesses:
    """Processes of the ranks of one attempt."""

    def __init__(
        self, run: RunDir, count: int, scratch: Path, given: Mapping[str, str], watch: HangDetector
    ) -> None:
        """`scratch`: the run's temporary folder. `given`: variables for every rank."""
        self._run = run
        self._count = count
        self._scratch = scratch
        self._given = given
        self._watch = watch
        self._silence = Silence(run.logs)
        self.stopping: str | None = None
        self._hang: Failure | None = None
        self._stopped_by: signal.Signals = process.STOP_AFTER_STEP
        self._asked_at = 0.0
        self._asked_twice = False
        self._failed: list[int] = []  # ranks that ended by themselves
        self._processes: list[subprocess.Popen[bytes]] = []
        process.hold(process.STOP_AFTER_STEP)  # a rank starts with what its parent holds
        for number in ENDS_WITH:
            signal.signal(number, self._on_signal)
        for rank in range(count):
            self._processes.append(self._start(rank))
        process.release(process.STOP_AFTER_STEP)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        log = self.log_of(rank).open("ab")
        kept = () if rank else DRIVER_SECRETS
        inherited = without_secrets(os.environ, keep=kept)
        locks: list[int] = []
        if self._run.lock:  # held until the last rank has ended
            locks.append(self._run.lock.fileno())
        with log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "megatron_rl.rank",
                    str(self._run.path),
                    str(os.getpid()),
                ],
                env={
                    **inherited,
                    **self._given,
                    **rank_environment(rank, self._count, self._scratch / "store"),
                },
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=log,
                pass_fds=locks,
                start_new_session=True,
            )

    def log_of(self, rank: int) -> Path:
        return self._run.logs / f"rank_{rank}.log"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if (
            number != process.STOP_AFTER_STEP
            and self.stopping
            and self._stopped_by != process.STOP_AFTER_STEP
        ):
            self._asked_twice = True  # now
            return
        self._stopped_by = signal.Signals(number)
        self._asked_at = time.monotonic()
        self.stopping = f"stopped by {self._stopped_by.name}"
        if number == process.STOP_AFTER_STEP:
            again = ""
        else:
            again = " (again to end the run at once)"
        log.info(f"{self._stopped_by.name} is passed on to the driver{again}")
        for child in self._processes[:1]:  # none yet, while the ranks are being started
            child.send_signal(number)

    def wait(self) -> int:
        """Wait until every rank has ended, one has failed, or the time to stop is over."""
        while True:
            codes = [child.poll() for child in self._processes]
            has_stopped = codes[0] == 0 or (codes[0] is not None and self._stops())
            if self.stopping and (has_stopped or self._overdue()):
                return ENDS_WITH[self._stopped_by]
            failed = [code for code in codes if code]
            if failed and not self._stops():
                self._settle(PEER_GRACE_S)
                self._failed = [rank for rank, child in enumerate(self._processes) if child.poll()]
                # as a shell gives it
                if failed[0] < 0:
                    return 128 - failed[0]
                return failed[0]
            if reason := self._watch.look():
                return self._give_up(reason)
            self._silence.look(lambda: phase_of(self._run.path, 0))
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.05)

    def _give_up(self, reason: str) -> int:
        """End the hanging processes; the others notice, and the driver closes its engines."""
        worst = self._watch.blocking[0]
        rank = worst.rank or 0
        cause = Cause(HANG, worst.process, worst.phase, str(self.log_of(rank)), HANG_HINT)
        self._hang = Failure(rank, reason, cause)
        self._failed = [rank]
        kill(worst)
        self._processes[rank].kill()
        self._settle(PEER_GRACE_S)
        return 1

    def _stops(self) -> bool:
        """True if the run is stopping on request; otherwise a rank that ends has failed."""
        return self.stopping is not None and read_status(self._run.path).get("state") in (
            "starting",
            "stopped",
        )

    def _overdue(self) -> bool:
        """True after a second request, if the driver is silent, or its reported time is over."""
        status = read_status(self._run.path)
        silent_s = 0.0 if status.get("state") == "starting" else SILENT_S
        limit_s = (status.get("stopping") or {"limit_s": silent_s})["limit_s"]
        late = limit_s is not None and time.monotonic() - self._asked_at > limit_s + STOP_GRACE_S
        return late or self._asked_twice

    def _settle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(child.poll() is not None for child in self._processes):
                return
            time.sleep(0.05)

    def end(self) -> None:
        """Terminate remaining ranks, then kill them. Engines die with their rank."""
        for child in self._processes:
            if child.poll() is None:
                child.send_signal(process.AT_ONCE)
        self._settle(1.0)
        for child in self._processes:
            if child.poll() is None:
                child.kill()
        for one in self._watch.issues:
            if one.how == "stopped":
                kill(one)
        self._settle(REAP_S)

    def failure(self, out_of_memory: bool) -> Failure | None:
        """Return the rank that failed first: ranks that only lost a peer followed another."""
        if not self._failed:
            return None
        if not self._run.path.is_dir():
            error = RecordLost(f"{self._run.path} was removed or moved during the run")
            cause = of_error(error, f"rank {self._failed[0]}")
            return Failure(self._failed[0], f"RecordLost: {error}", cause)
        if self._hang:
            return self._hang
        found = []
        for rank in self._failed:
            code = self._processes[rank].returncode
            log = self.log_of(rank)
            folders = (self._scratch, self._run.logs)
            reason, cause = read_end(folders, log, rank, code, out_of_memory)
            cause = replace(cause, phase=phase_of(self._run.path, rank))
            found.append(Failure(rank, f"rank {rank}: {reason}", cause))
        return next((one for one in found if one.cause.name != LOST_PEER), found[0])


def rank_environment(rank: int, count: int, store: Path) -> Mapping[str, str]:
    """Ranks on one machine meet in a file and talk over the loopback interface: no port is open to
    others.
    """
    return {
        LAUNCHER: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MEGATRON_RL_RENDEZVOUS": f"file://{store}",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # megatron-core overlaps products with what ranks exchange only where both wait in one queue
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        "PYTHONUNBUFFERED": "1",
    }
