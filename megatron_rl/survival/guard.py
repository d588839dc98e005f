"""Looks after a run: says who is in trouble and who goes on again, once each, and why it has to end when it has to.

The launcher has one. Under srun and torchrun, or while the launcher itself is stopped, the lowest rank that lives
looks, from the thread of its pulse.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from megatron_rl.processes.process import STOPPED, state_of
from megatron_rl.processes.pulse import PULSE
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.runs.status import mark_status, mark_stuck
from megatron_rl.survival.trouble import Trouble
from megatron_rl.survival.watch import Watch


class Guard:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def look(self, rank: int | None = None) -> str | None:
        """Why the run has to end, if it has to. `rank`: see Watch.look."""
        new, gone = self.watch.look(rank)
        for one in new:
            self._say("\n".join((f"stuck    {one}", *(f"           {line}" for line in one.stack))))
        for one in gone:
            what = "goes on" if one.pid is None or state_of(one.pid) else "is no longer there,"
            self._say(f"stuck    {one.process} (process {one.pid}) {what} after {one.seconds:.0f} s")
        if new or gone:
            worst = next(iter([*self.watch.blocking, *self.watch.troubles]), None)
            with suppress(OSError):
                mark_stuck(self.watch.run_dir, worst.about() if worst else None)
        return self.watch.over()

    def end_stopped(self) -> None:
        """SIGKILL for those that would hear of no other end."""
        for one in self.watch.troubles:
            if one.how == "stopped" and one.rank is not None:
                kill(one)

    def _say(self, text: str) -> None:
        print(text, flush=True)
        with suppress(OSError), (RunDir(self.watch.run_dir).logs / "driver.log").open("a", encoding="utf-8") as log:
            log.write(text + "\n")


class RankGuard:
    """Of a rank, called by its pulse."""

    def __init__(self, watch: Watch, rank: int) -> None:
        self._guard, self._watch, self._rank = Guard(watch), watch, rank

    def __call__(self) -> None:
        launcher = self._watch.launcher
        if launcher and state_of(launcher) not in STOPPED and not self._watch.troubles:
            return  # that one looks
        if reason := self._guard.look(self._rank):
            self._end(reason)

    def _end(self, reason: str) -> None:
        """At once: whoever started the ranks ends the others, and the main thread of this one may never hear of it."""
        worst = self._watch.blocking[0]
        with suppress(OSError):
            mark_status(self._watch.run_dir, "failed", reason, stuck=worst.about())
        print(f"failed: {reason}", flush=True)
        for one in self._watch.blocking:
            kill(one)
        for _, pid in PULSE.owned:
            _kill_group(pid)
        os._exit(1)


def kill(one: Trouble) -> None:
    """Where it can be reached from here, it and what it leads."""
    if one.pid and one.here and one.pid != os.getpid():
        _kill_group(one.pid)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
