"""Hang detection from the launcher or a rank: names processes that are stopped, ends a run without
progress and names the process that it waits for.

It reads the heartbeats of the ranks (processes/heartbeat.py) and, of processes on this machine,
their states in /proc. Progress is a new phase, a micro-batch, a response of an engine or a reward;
the run hangs when no rank has made any for `run.hang_timeout_s`. Waits for engines and rewards have
limits of their own, and end by themselves before.
"""

import os
import platform
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.files import JsonObject, read_json
from megatron_rl.logs import logger, warn
from megatron_rl.processes.heartbeat import ACTIVITY
from megatron_rl.processes.process import SHOW_STACKS, birth_of, is_stopped, state_of
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.tracking.status import mark_status, mark_stuck

LOOK_S = 1.0
AWAKE_S = 10.0  # a longer gap between two checks means that this process was suspended
STOPPED_S = 5.0  # a shorter pause is not named
SILENT_S = 30.0  # without a heartbeat
SHOW_S = 1.0  # for a process to write its stacks
MARGIN_S = 60.0  # after the limit of a wait

Beat = JsonObject  # a heartbeat, as its file has it


@dataclass(frozen=True)
class ProcessIssue:
    how: str  # stopped | hangs
    process: str
    pid: int | None
    host: str
    phase: str
    seconds: float
    rank: int | None = None  # the rank itself, or the one that started the process
    blocks: bool = False  # the run cannot continue without it
    here: bool = False  # it can be reached from this process

    @property
    def key(self) -> tuple[str, str, int | None]:
        return self.how, self.process, self.pid

    def __str__(self) -> str:
        who = self.process
        if self.pid:
            who += f" (process {self.pid} on {self.host})"
        what = "hangs"
        if self.how == "stopped":
            what = "is stopped (SIGSTOP, or a debugger)"
        where = f" in `{self.phase}`" if self.phase else ""
        return f"{who} {what} for {self.seconds:.0f} s{where}"

    def as_fields(self) -> JsonObject:
        """The fields of `stuck` in status.json."""
        return {
            "how": self.how,
            "process": self.process,
            "pid": self.pid,
            "host": self.host,
            "phase": self.phase,
            "seconds": round(self.seconds),
        }


class HangDetector:
    """Hang detection; its time stands still while this process is suspended."""

    launcher: int | None = None  # its process id, where it is watched too

    def __init__(
        self,
        run_dir: Path,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: run.hang_timeout_s."""
        self.issues: list[ProcessIssue] = []
        self._run_dir = run_dir
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_at = clock() - LOOK_S
        self._now = 0.0
        self._progressed_at = 0.0
        self._beats: dict[int, Beat] = {}
        self._heard_at: dict[int, float] = {}
        self._stopped_at: dict[int, float] = {}  # by process id

    def look(self, rank: int | None = None) -> str | None:
        """Name new issues, and return why the run has to end, if it has to. A `rank` leaves that to
        a lower one that lives.
        """
        passed = self._clock() - self._looked_at
        if passed < LOOK_S:
            return None
        self._looked_at += passed
        self._now += min(passed, AWAKE_S)
        self._read()
        before = self.issues
        if any(self._lives(one) for one in range(rank or 0)):
            self.issues = []
        else:
            self.issues = list(self._find())
        self._report(before)
        return self._over()

    @property
    def blocking(self) -> list[ProcessIssue]:
        return [one for one in self.issues if one.blocks]

    def _read(self) -> None:
        for path in RunDir(self._run_dir).heartbeats.glob("rank_*.json"):
            with suppress(ValueError, KeyError):
                beat = read_json(path)
                before = self._beats.get(beat["rank"], {})
                if _changed(before, beat, "progress"):
                    self._progressed_at = self._now
                if _changed(before, beat, "beat"):
                    self._heard_at[beat["rank"]] = self._now
                self._beats[beat["rank"]] = beat

    def _lives(self, rank: int) -> bool:
        beat = self._beats.get(rank)
        if beat is None or beat["ended"] or self._is_silent(rank):
            return False
        return not (_here(beat) and is_stopped(beat["pid"]))

    def _is_silent(self, rank: int) -> bool:
        return self._now - self._heard_at[rank] >= SILENT_S

    def _find(self) -> Iterator[ProcessIssue]:
        beats = [one for _, one in sorted(self._beats.items()) if not one["ended"]]
        stopped = list(self._stopped(beats))
        yield from (one for one in stopped if one.seconds >= STOPPED_S)
        held = {one.pid for one in stopped}
        running = [one for one in beats if one["pid"] not in held]
        if any(one.blocks for one in stopped) or not running:
            return
        waiting = next((one for one in running if one["waits"]), None)
        idle_s = self._now - self._progressed_at
        if idle_s < self._limit_s(waiting):
            return
        silent = [one for one in running if self._is_silent(one["rank"])]
        if waiting and not silent:
            yield from _waited_for(waiting, idle_s)
        else:
            for one in silent or _behind(running):
                yield _issue(one, _itself(one), "hangs", idle_s)

    def _limit_s(self, waiting: Beat | None) -> float:
        """Seconds without progress after which the run hangs."""
        if waiting is None:
            return self._timeout_s
        return max(self._timeout_s, waiting["waits"]["limit_s"] + MARGIN_S)

    def _stopped(self, beats: list[Beat]) -> Iterator[ProcessIssue]:
        before = self._stopped_at
        self._stopped_at = {}

        def seconds(pid: int) -> float:
            self._stopped_at[pid] = before.get(pid, self._now)
            return self._now - self._stopped_at[pid]

        for beat in beats:
            if not _here(beat):
                continue
            for one in (_itself(beat), *beat["children"]):
                if is_stopped(one["pid"]):
                    yield _issue(beat, one, "stopped", seconds(one["pid"]))
        if self.launcher and is_stopped(self.launcher):
            yield ProcessIssue(
                "stopped",
                "the launcher",
                self.launcher,
                platform.node(),
                phase="",
                seconds=seconds(self.launcher),
                here=True,
            )

    def _over(self) -> str | None:
        idle_s = self._now - self._progressed_at
        for one in self.blocking[:1]:
            is_rank = one.process == f"rank {one.rank}"
            limit_s = self._limit_s(None if is_rank else self._beats[one.rank or 0])
            if idle_s >= limit_s:
                return (
                    f"{one}; no progress for {limit_s:g} s (run.hang_timeout_s={self._timeout_s:g})"
                )
        return None

    def _report(self, before: list[ProcessIssue]) -> None:
        """Say which issues are new and which are over, and keep the worst in status.json."""
        keys = {one.key for one in self.issues}
        known = {one.key for one in before}
        for one in self.issues:
            if one.key not in known:
                self._say(f"stuck: {one}")
        for one in before:
            if one.key not in keys:
                what = "continues"
                if one.here and one.pid and not state_of(one.pid):
                    what = "has ended"
                self._say(
                    f"stuck: {one.process} (process {one.pid}) {what} after {one.seconds:.0f} s"
                )
        if keys != known:
            stuck = None
            for one in (*self.blocking, *self.issues)[:1]:
                stuck = one.as_fields()
            with suppress(OSError):
                mark_stuck(self._run_dir, stuck)

    def _say(self, text: str) -> None:
        warn("watch", text, RunDir(self._run_dir).logs / "driver.log")


class RankHangDetector(HangDetector):
    """A watch that a rank's heartbeat calls, for runs that no launcher watches. It ends the run by
    ending this process.
    """

    def __init__(self, run_dir: Path, timeout_s: float, rank: int, launcher: int | None) -> None:
        super().__init__(run_dir, timeout_s)
        self.launcher = launcher
        self._rank = rank

    def __call__(self) -> None:
        if self.launcher and not is_stopped(self.launcher) and not self.issues:
            return
        reason = self.look(self._rank)
        if reason is None:
            return
        with suppress(OSError):
            mark_status(self._run_dir, "failed", reason, stuck=self.blocking[0].as_fields())
        logger("watch").error(f"failed: {reason}")
        for one in self.blocking:
            kill(one)
        for _, pid in ACTIVITY.owned:
            _kill_group(pid)
        # its main thread may be blocked; srun or torchrun ends the other ranks
        os._exit(1)


def kill(one: ProcessIssue) -> None:
    """Kill a process and its group, where it can be reached from here; a rank that hangs writes its
    stacks to its log first.
    """
    if not (one.pid and one.here) or one.pid == os.getpid():
        return
    if one.how == "hangs" and one.process == f"rank {one.rank}":
        with suppress(ProcessLookupError):
            os.kill(one.pid, SHOW_STACKS)
            time.sleep(SHOW_S)
    _kill_group(one.pid)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _changed(before: Beat, beat: Beat, name: str) -> bool:
    same_process = before.get("pid") == beat["pid"]
    return not same_process or before[name] != beat[name]


def _here(beat: Beat) -> bool:
    """True if the rank is a process of this machine and this container."""
    return bool(beat["host"] == platform.node() and birth_of(beat["pid"]) == beat["birth"])


def _waited_for(waiting: Beat, seconds: float) -> Iterator[ProcessIssue]:
    whom = waiting["waits"]["whom"]
    children = [child for child in waiting["children"] if child["name"].startswith(whom)]
    for child in children or [{"name": whom, "pid": None}]:
        yield _issue(waiting, child, "hangs", seconds)


def _behind(beats: list[Beat]) -> list[Beat]:
    """Return the ranks that the others wait for."""
    first = min(one["entered"] for one in beats)
    late = [one for one in beats if one["entered"] == first]
    if len(late) == len(beats):
        late = [one for one in beats if not one["in_collective"]]
    return late or beats


def _itself(beat: Beat) -> Mapping[str, Any]:
    """Return the process of a rank, in the form of its `children`."""
    return {"name": f"rank {beat['rank']}", "pid": beat["pid"]}


def _issue(beat: Beat, process: Mapping[str, Any], how: str, seconds: float) -> ProcessIssue:
    """The issue of a rank's own process, or of one that it has started."""
    waits = beat["waits"]
    is_rank = process["pid"] == beat["pid"]
    return ProcessIssue(
        how=how,
        process=process["name"],
        pid=process["pid"],
        host=beat["host"],
        phase=beat["phase"],
        seconds=seconds,
        rank=beat["rank"],
        blocks=is_rank or bool(waits and process["name"].startswith(waits["whom"])),
        here=_here(beat),
    )
