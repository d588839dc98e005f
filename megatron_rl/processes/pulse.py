"""Signs of life: of this process (phase, last mark, for whom it waits), which a rank writes to a
file for watch.py; of an engine, for whoever asks its server.

The loop says what it does (`phase`, `waiting`, `mark`); a rank's thread writes it to a file every
few seconds (read by watch.py). While the process is stopped, no time passes here.
"""

import asyncio
import json
import linecache
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron_rl.processes.process import birth_of, work_below

FOLDER = "pulse"  # of the run's logs
BEAT_S = 3.0
AWAKE = 3.0  # beats: what is longer between two of them, this process has slept through
# of a core, and of main threads per second: who does less does not work; an engine that waits has
# 0.01, and none
BUSY_SHARE = 0.05
BUSY_TURNS = 5.0
ANSWER_S = 4.0  # of an engine, to be known as one that answers
FRAMES = 12
START = "start"
BETWEEN = "between phases"


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...


@dataclass(frozen=True)
class Waits:
    whom: str  # processes whose names begin so
    limit_s: float  # that may pass between two marks
    key: str  # of the configuration, that says so


class Pulse:
    """Signs of life of this process. Only `mark`, `own` and `waiting` may be called by threads
    beside the main one.
    """

    def __init__(self) -> None:
        self.marks = 0
        self.entered = 0
        # of the main thread, and of another
        self._waits: dict[bool, Waits | None] = {
            True: None,
            False: None,
        }
        self._behind = False
        self._phases: list[str] = []
        self._outside = START
        self._owned: list[tuple[str, Process]] = []
        self._owning = threading.Lock()

    def mark(self) -> None:
        """Something has been done."""
        self.marks += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append(name)
        self._outside = BETWEEN
        self.entered += 1
        self.marks += 1
        try:
            yield
        finally:
            self._phases.pop()
            self.marks += 1

    @contextmanager
    def waiting(self, whom: str, limit_s: float, key: str) -> Iterator[None]:
        """Say for whom the process waits meanwhile, and how long it may: see `Waits`."""
        main = threading.current_thread() is threading.main_thread()
        before = self._waits[main]
        self._waits[main] = Waits(whom, limit_s, key)
        self.marks += 1
        try:
            yield
        finally:
            self._waits[main] = before
            self.marks += 1

    @contextmanager
    def delegate_wait(self) -> Iterator[None]:
        """The main thread waits for another one: what that one waits for, the process waits for."""
        self._behind = True
        try:
            yield
        finally:
            self._behind = False

    @property
    def waits(self) -> Waits | None:
        return self._waits[not self._behind]

    def own(self, name: str, process: Process) -> None:
        """A process that was started here, until it has ended."""
        with self._owning:
            self._owned = [(kept, one) for kept, one in self._owned if one.returncode is None] + [
                (name, process)
            ]

    @property
    def place(self) -> str:
        if self._phases:
            return self._phases[-1]
        return self._outside

    @property
    def owned(self) -> list[tuple[str, int]]:
        return [(name, one.pid) for name, one in self._owned if one.returncode is None]


PULSE = Pulse()
mark = PULSE.mark
phase = PULSE.phase
waiting = PULSE.waiting
own = PULSE.own
delegate_wait = PULSE.delegate_wait


class Beats:
    """The thread that writes the pulse of a rank to `logs/pulse/rank_N.json`, once there is such a
    folder.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.each: list[Callable[[], object]] = []  # also called at every beat
        self._path = file_of(run_dir, rank)
        self._rank = rank
        self._now = time.monotonic()
        self._count = 0
        self._marks = -1
        self._age_s = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """The last word of this rank."""
        self._end.set()
        self._thread.join(BEAT_S)

    def _run(self) -> None:
        while not self._end.is_set():
            self.beat()
            for call in list(self.each):
                with suppress(Exception):  # of every kind: the next beat tries again
                    call()
            self._end.wait(BEAT_S)
        self._write({**self._about(), "ended": True})

    def beat(self) -> None:
        now = time.monotonic()
        passed = min(now - self._now, AWAKE * BEAT_S)
        self._now = now
        self._count += 1
        if self._marks != PULSE.marks:
            self._marks = PULSE.marks
            self._age_s = 0.0
        else:
            self._age_s += passed
        self._write(self._about())

    def _about(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "host": platform.node(),
            "pid": os.getpid(),
            "birth": birth_of(os.getpid()),
            "beat": self._count,
            "phase": PULSE.place,
            "entered": PULSE.entered,
            "age_s": round(self._age_s, 1),
            "waits": asdict(PULSE.waits) if PULSE.waits else None,
            "children": [{"name": name, "pid": pid} for name, pid in PULSE.owned],
            **(_stacks() if self._age_s else {}),
        }

    def _write(self, about: Mapping[str, Any]) -> None:
        new = self._path.with_suffix(".new")
        # who starts the run makes the folder; no sign of life is worth the run
        with suppress(OSError):
            new.write_text(json.dumps(about), encoding="utf-8")
            new.replace(self._path)


def file_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / FOLDER / f"rank_{rank}.json"


def _stacks() -> dict[str, Any]:
    """The main thread's stack, and whether any thread waits for other ranks."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    main = frames.get(threading.main_thread().ident or 0)
    return {"stack": _lines(main), "meets": any(map(_meets, frames.values()))}


def _lines(frame: FrameType | None) -> list[str]:
    """The innermost calls, the last one first."""
    calls = islice(traceback.walk_stack(frame), FRAMES) if frame else ()
    return [f"{one.f_code.co_filename}:{line} {one.f_code.co_name}" for one, line in calls]


def _meets(frame: FrameType) -> bool:
    """Whether a thread is in a collective, or waits for one that it has begun."""
    name = frame.f_code.co_filename
    if "/torch/distributed/" in name:
        return True
    return "/megatron/core/" in name and ".wait(" in linecache.getline(name, frame.f_lineno)


class Heartbeat:
    """Health of an engine, for GET /health of its server: it answers, works, or hangs.

    One that does not answer at once may be busy with a long prefill, an update or a compilation;
    then its processes use the CPU, or their main threads look again and again for what they wait
    for (a lock on a cache, a worker, a page of a file). One that neither answers nor works hangs.
    """

    def __init__(self, ask: Callable[[], Awaitable[Any]], pid: int) -> None:
        """`ask`: something that the engine answers at once. `pid`: its process, whose children are
        its workers.
        """
        self._ask = ask
        self._pid = pid
        # one question at a time, however often somebody looks
        self._asked: asyncio.Future[Any] | None = None

    async def look(self) -> tuple[int, dict[str, str]]:
        """A status of HTTP, and what is known."""
        before = work_below(self._pid, itself=True)
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._ask())
            self._asked.add_done_callback(lambda one: one.cancelled() or one.exception())
        await asyncio.wait([self._asked], timeout=ANSWER_S)
        if self._asked.done():
            error = self._asked.exception()
            if error is None:
                return (200, {"engine": "answers"})
            return (503, {"error": f"its engine failed: {error}"})
        after = work_below(self._pid, itself=True)
        if after.stopped:
            return 503, {"error": f"its engine's process {after.stopped[0]} is stopped"}
        if (
            after.cpu_s - before.cpu_s >= BUSY_SHARE * ANSWER_S
            or after.turns - before.turns >= BUSY_TURNS * ANSWER_S
        ):
            return 200, {"engine": "busy"}
        return 503, {"error": f"its engine neither answers nor works (for {ANSWER_S:g} s)"}
