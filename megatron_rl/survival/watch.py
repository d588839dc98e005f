"""Hang detection from the launcher or a rank: names processes that are stopped or silent, ends a
run without progress.

It reads the heartbeats of the ranks (processes/pulse.py) and, of processes on this machine, their
states in /proc:

stopped   SIGSTOP or a debugger holds the process silent    a rank's heartbeat has not changed for a
while, and it is not seen to be stopped: something holds its
          interpreter, or its machine is gone
hangs     no rank has made progress for `run.hang_timeout_s`, or, while rank 0 waits for an engine
or a reward, for the
          time that those have: whoever is waited for, else the ranks that have entered fewer phases
          than the others,
          else those that are in no collective, else all of them

A process that is stopped or silent ends nothing by itself: the run ends when it has made no
progress for as long.
"""

import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_rl.files import read_json
from megatron_rl.processes.process import STOPPED, state_of
from megatron_rl.processes.pulse import FOLDER, PULSE, file_of
from megatron_rl.processes.stacks import ask
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.runs.status import mark_status, mark_stuck
from megatron_rl.survival.trouble import MARGIN_S, Seen, Trouble, behind, here, of_child, of_rank

LOOK_S = 1.0
AWAKE_S = 10.0  # what is longer between two looks, this process has slept through
STOPPED_S = 5.0  # a shorter pause is nobody's business
SILENT_S = 30.0  # without a heartbeat
LINES = 40
LAUNCHER = "the launcher"


@dataclass
class Watch:
    """`look` every now and then. Its time stands still while this process is stopped."""

    run_dir: Path
    timeout_s: float  # run.hang_timeout_s
    temporary: Path | None = None  # the folder in which processes of this machine show their stacks
    pids: Mapping[int, int] = field(default_factory=dict)  # of ranks, before they have a pulse
    launcher: int | None = None  # process id, where it is to be watched too
    silent_s: float = SILENT_S
    stopped_s: float = STOPPED_S
    clock: Callable[[], float] = time.monotonic
    troubles: list[Trouble] = field(default_factory=list)
    _seen: dict[int, Seen] = field(default_factory=dict)
    # process id -> for how long it has been seen stopped
    _held: dict[int, float] = field(default_factory=dict)
    _last: float | None = None
    _passed: float = 0.0

    def look(self, rank: int | None = None) -> tuple[list[Trouble], list[Trouble]]:
        """Who is in trouble now and was not before, and who was and is not. `rank`: only where no
        lower one looks.
        """
        now = self.clock()
        if self._last is not None and now - self._last < LOOK_S:
            return [], []
        if self._last is None:
            self._passed = 0.0
        else:
            self._passed = min(now - self._last, AWAKE_S)
        self._last = now
        lower = range(rank or 0)
        if any(self._is_alive(one) for one in lower):
            free = [one for one in self.troubles if not (one.here and _held(one.pid))]
            self.troubles = []
            return [], free
        paths = (self.run_dir / "logs" / FOLDER).glob("rank_*.json")
        self._read(
            path for path in paths if path not in {file_of(self.run_dir, one) for one in lower}
        )
        before = {one.key: one for one in self.troubles}
        self.troubles = list(self._find())
        new = [one for one in self.troubles if one.key not in before]
        kept = {one.key: one.stack for one in before.values()} | {
            one.key: self._stack(one) for one in new
        }
        self.troubles = [replace(one, stack=kept[one.key]) for one in self.troubles]
        present = {one.key: one for one in self.troubles}
        gone = [one for key, one in before.items() if key not in present]
        return [present[one.key] for one in new], gone

    def over(self) -> str | None:
        """Why the run has to end: it has made no progress for as long as it may, because of the
        first of `blocking`.
        """
        for one in self.blocking[:1]:
            limit_s, key = self._limit(self._seen.get(one.rank or 0), one)
            if self._without_progress_s() >= limit_s:
                return f"{one}; no progress for {limit_s:g} s: raise {key} if it was only slow"
        return None

    @property
    def blocking(self) -> list[Trouble]:
        return [one for one in self.troubles if one.blocks]

    def phase_of(self, rank: int) -> str | None:
        """The phase that a rank's last pulse was in."""
        self._read([file_of(self.run_dir, rank)])
        if rank in self._seen:
            return self._seen[rank].pulse["phase"]
        return None

    def _without_progress_s(self) -> float:
        return min((one.age_s for one in self._present_ranks()), default=0.0)

    def _limit(self, one: Seen | None, trouble: Trouble | None = None) -> tuple[float, str]:
        """Seconds without progress, and the key that sets them. A rank that is stopped itself waits
        for nobody.
        """
        waits = one.pulse["waits"] if one else None
        if one and trouble and (trouble.how, trouble.pid) == ("stopped", one.pulse["pid"]):
            waits = None
        if waits:
            return waits["limit_s"] + MARGIN_S, waits["key"]
        return self.timeout_s, f"run.hang_timeout_s={self.timeout_s:g}"

    def _is_alive(self, rank: int) -> bool:
        self._read([file_of(self.run_dir, rank)])
        one = self._seen.get(rank)
        if one is None or one.quiet_s >= self.silent_s or one.pulse.get("ended"):
            return False
        return not (here(one.pulse) and _held(one.pulse["pid"]))

    def _read(self, paths: Iterable[Path]) -> None:
        for path in paths:
            with suppress(OSError, ValueError):
                pulse = read_json(path)
                before = self._seen.get(pulse["rank"])
                same = before is not None and all(
                    before.pulse[name] == pulse[name] for name in ("pid", "beat")
                )
                quiet_s = before.quiet_s + self._passed if before and same else 0.0
                self._seen[pulse["rank"]] = Seen(pulse, quiet_s)

    def _present_ranks(self) -> list[Seen]:
        return [one for _, one in sorted(self._seen.items()) if not one.pulse.get("ended")]

    def _find(self) -> Iterator[Trouble]:
        held = list(self._stopped())
        alive = []
        stopped = {one.pid for one in held}
        yield from (one for one in held if one.seconds >= self.stopped_s)
        for one in self._present_ranks():
            if one.pulse["pid"] in stopped:
                continue
            alive.append(one)
            if one.quiet_s >= self.silent_s:
                if here(one.pulse):
                    note = "; it is not stopped"
                else:
                    note = "; it was ended or stopped, or its machine was"
                held.append(of_rank(one, "silent", one.quiet_s, note))
                yield held[-1]
        if alive and not any(one.blocks for one in held):
            yield from self._hanging(alive)

    def _stopped(self) -> Iterator[Trouble]:
        before = self._held
        self._held = {}
        for one in self._present_ranks():
            if not here(one.pulse):
                continue
            yield from (
                of_rank(one, "stopped", held_s) for held_s in self._held_s(one.pulse["pid"], before)
            )
            for child in one.pulse["children"]:
                yield from (
                    of_child(one, child, "stopped", held_s)
                    for held_s in self._held_s(child["pid"], before)
                )
        host = platform.node()
        for rank, pid in self.pids.items():
            if rank not in self._seen:
                for held_s in self._held_s(pid, before):
                    yield Trouble(
                        "stopped",
                        f"rank {rank}",
                        pid,
                        host,
                        "start",
                        held_s,
                        rank,
                        blocks=True,
                        here=True,
                    )
        for held_s in self._held_s(self.launcher, before):
            note = "; the run goes on, and ends by itself alone"
            yield Trouble("stopped", LAUNCHER, self.launcher, host, "", held_s, note=note)

    def _held_s(self, pid: int | None, before: Mapping[int, float]) -> Iterator[float]:
        """Seconds for which a process has been seen stopped, if it is."""
        if pid and _held(pid):
            self._held[pid] = before[pid] + self._passed if pid in before else 0.0
            yield self._held[pid]

    def _hanging(self, ranks: list[Seen]) -> Iterator[Trouble]:
        """Whoever a run without progress waits for."""
        waiting = next((one for one in ranks if one.pulse["waits"]), None)
        if self._without_progress_s() < self._limit(waiting)[0]:
            return
        if waiting is None:
            yield from (of_rank(one, "hangs", one.age_s) for one in behind(ranks))
            return
        whom = waiting.pulse["waits"]["whom"]
        children = [child for child in waiting.pulse["children"] if child["name"].startswith(whom)]
        for child in children or [{"name": whom, "pid": None}]:
            yield of_child(waiting, child, "hangs", waiting.age_s)

    def _stack(self, one: Trouble) -> tuple[str, ...]:
        """What it has told by itself, else what it shows when it is asked."""
        if (
            one.stack
            or one.how == "stopped"
            or not one.here
            or one.pid is None
            or self.temporary is None
        ):
            return one.stack
        return tuple(ask(one.pid, self.temporary).splitlines()[:LINES])


def _held(pid: int | None) -> bool:
    return pid is not None and state_of(pid) in STOPPED


class Guard:
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def look(self, rank: int | None = None) -> str | None:
        """Why the run has to end, if it has to. `rank`: see Watch.look."""
        new, gone = self.watch.look(rank)
        for one in new:
            self._say("\n".join((f"stuck    {one}", *(f"           {line}" for line in one.stack))))
        still = {(one.process, one.pid) for one in self.watch.troubles}  # in another way
        for one in (one for one in gone if (one.process, one.pid) not in still):
            gone_on = one.pid is None or not one.here or state_of(one.pid)
            what = "goes on" if gone_on else "is no longer there,"
            self._say(
                f"stuck    {one.process} (process {one.pid}) {what} after {one.seconds:.0f} s"
            )
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
        with (
            suppress(OSError),
            (RunDir(self.watch.run_dir).logs / "driver.log").open("a", encoding="utf-8") as log,
        ):
            log.write(text + "\n")


class RankGuard(Guard):
    """A guard that a rank's pulse calls, for runs that no launcher watches. It ends the run by
    ending this process.
    """

    def __init__(self, watch: Watch, rank: int) -> None:
        super().__init__(watch)
        self._rank = rank

    def __call__(self) -> None:
        watch = self.watch
        if watch.launcher and state_of(watch.launcher) not in STOPPED and not watch.troubles:
            return  # that one looks
        reason = self.look(self._rank)
        if reason is None:
            return
        with suppress(OSError):
            mark_status(watch.run_dir, "failed", reason, stuck=watch.blocking[0].about())
        print(f"failed: {reason}", flush=True)
        for one in watch.blocking:
            kill(one)
        for _, pid in PULSE.owned:
            _kill_group(pid)
        # this one's main thread may hear of nothing; whoever started the ranks ends the others
        os._exit(1)


def kill(one: Trouble) -> None:
    """Kill a process in trouble and what it leads, where it can be reached from here."""
    if one.pid and one.here and one.pid != os.getpid():
        _kill_group(one.pid)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
