"""Stop requests by signal (USR1, TERM, Ctrl-C): the step is finished in the time left, or aborted
on every rank.

USR1 has the step finished within the job's time limit; TERM and Ctrl-C give it half a minute. If
that is too short, the step is aborted: rank 0 stops waiting, and notifies the ranks that wait for
it (`ask_driver`). Before the first step there is nothing to save, and the run ends at once.
"""

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from megatron_rl.logs import logger
from megatron_rl.processes import job
from megatron_rl.processes.process import STOP_AFTER_STEP, LastingHandler, raise_interrupt, release
from megatron_rl.tracking.console import duration
from megatron_rl.tracking.run_dir import LAUNCHER
from megatron_rl.tracking.status import beat
from megatron_rl.tracking.timeline import PhaseClock

KILL_WAIT_S = 30.0  # Slurm's default between SIGTERM and SIGKILL
MARGIN_S = 5.0  # for engines to close, and for the final report
SAVE_LIMIT_S = 600.0  # what a launcher waits for a save, beyond the time that the step has
START_LIMIT_S = 4.0
LOOK_S = 0.5
ASKS = (signal.SIGINT, signal.SIGTERM, STOP_AFTER_STEP)
WAKE = signal.SIGURG  # from the thread to the main thread, which may wait for an engine


class StepAborted(BaseException):
    """Abort of a step by every rank at the same place; the state before it is kept. No error."""


class Ranks(Protocol):
    def broadcast(self, value: Any = None) -> Any: ...


def ask_driver(ranks: Ranks, ask: Callable[[], Any]) -> Any:
    """Return rank 0's reply on every rank, or raise StepAborted on every rank."""
    answer = None
    aborted = None
    try:
        answer = ask()
    except StepAborted as error:
        aborted = str(error)
    answer, aborted = ranks.broadcast((answer, aborted))
    if aborted is not None:
        raise StepAborted(aborted)
    return answer


class StopRequest:
    """A request to stop, as rank 0 knows it from the start of its engines on. `step`: None before
    the first.
    """

    def __init__(self, clock: PhaseClock, run: Path) -> None:
        self.step: int | None = None
        self.reason: str | None = None  # None until a stop is requested
        self.save_s: float | None = None  # the longest save so far
        self._clock = clock
        self._run = run
        self._asked_at = 0.0
        self._end = math.inf  # of the time that is left, as time.monotonic() has it
        self._given_up: str | None = None
        self._waiting = False  # True while the main thread is in a wait that can be interrupted
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._listen, name="stop requests", daemon=True)

    def __enter__(self) -> Self:
        for number in (*ASKS, WAKE):
            signal.signal(number, self._on_signal)
        self._handler = LastingHandler(STOP_AFTER_STEP)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._thread.start()
        release(STOP_AFTER_STEP)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop handling requests: from here on a signal only cuts the final report short."""
        os.write(self._wakeup_write, b"\0")
        self._thread.join()
        signal.signal(STOP_AFTER_STEP, signal.SIG_IGN)
        signal.signal(WAKE, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, raise_interrupt)
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup_write)
        os.close(self._wakeup_read)

    def left(self) -> float:
        return self._end - time.monotonic()

    def has_time(self) -> bool:
        """True if there is time to write the model as a Hugging Face folder as well."""
        return self._end == math.inf or (
            self.save_s is not None and self.left() > self.save_s + MARGIN_S
        )

    def check(self) -> None:
        """Abort the step between phases if the time left does not suffice for the rest."""
        if self._given_up:
            raise StepAborted(self._given_up)

    def begin(self, step: int) -> None:
        """Begin a step, unless a stop was requested before it."""
        self.step = step
        if self.reason:
            self._given_up = self._given_up or self.reason
        self.check()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a wait for responses or scores, in which the main thread may be interrupted."""
        self._waiting = True
        try:
            self.check()
            yield
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == WAKE:
            if self._waiting and self._given_up:
                self._waiting = False  # once
                raise StepAborted(self._given_up)
            return
        if number == signal.SIGTERM and LAUNCHER not in os.environ and job.is_running():
            raise RuntimeError(job.ANOTHER_ENDED)
        if self.step is None:
            raise_interrupt(number, frame)
        # repeated signals: Slurm and srun send several. To stop at once, send SIGKILL, or AT_ONCE
        # from a launcher

    def _listen(self) -> None:
        while True:
            undecided = self.reason is not None and self._given_up is None and self._end < math.inf
            self._handler.put_back()
            ready, _, _ = select.select([self._wakeup_read], [], [], LOOK_S)
            numbers = b""
            if ready:
                numbers = os.read(self._wakeup_read, 64)
            for number in numbers:
                if number == 0:
                    return
                if number in ASKS:
                    self._notice(signal.Signals(number))
            if undecided and self._given_up is None and self._rest(after=True) > self.left():
                self._give_up(
                    "and the time is up", time.monotonic() - self._asked_at + SAVE_LIMIT_S
                )

    def _notice(self, number: signal.Signals) -> None:
        name = number.name
        phase = self._clock.phase or "between phases"
        if self.step is None:
            self._say(
                f"{name} in the start: the run ends now; there is nothing yet to be saved",
                START_LIMIT_S,
            )
            return
        self._asked_at = time.monotonic()
        self.reason = f"{name} in {phase} of step {self.step}"
        left: float | None = KILL_WAIT_S
        if number == STOP_AFTER_STEP:
            left = job.seconds_left()
        if left is not None:
            self._end = min(self._end, time.monotonic() + left - MARGIN_S)
        limit = None
        if self._end < math.inf:
            limit = max(0.0, self.left()) + SAVE_LIMIT_S
        rest = self._rest()
        if self._given_up:
            self._say(f"{self.reason}: the run is about to end", limit)
        elif rest > self.left():
            self._give_up(
                f"whose rest takes {_spoken(rest)}, with {_spoken(self.left())} left", limit
            )
        else:
            time_left = ""
            if self._end < math.inf:
                time_left = f", in the {_spoken(self.left())} that are left"
            self._say(f"{self.reason}: the step is finished and saved first{time_left}", limit)

    def _give_up(self, why: str, limit: float | None) -> None:
        self._given_up = self.reason
        self._say(
            f"{self.reason}, {why}: the rest of this step is skipped, and the newest finished update is saved",
            limit,
        )
        signal.pthread_kill(self._main, WAKE)

    def _rest(self, after: bool = False) -> float:
        """Seconds that the step and its save still take."""
        if self.save_s is None:
            return math.inf
        return self._clock.rest(after) + self.save_s

    def _say(self, text: str, limit_s: float | None) -> None:
        """`limit_s`: how long a launcher waits, from the signal on; None: for ever."""
        logger("run").info(text)
        with suppress(OSError):  # the same text is on the screen
            beat(self._run, stopping={"said": text, "limit_s": limit_s})


def _spoken(seconds: float) -> str:
    if seconds == math.inf:
        return "an unknown time"
    return duration(max(0.0, seconds))
