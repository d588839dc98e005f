"""Children one after the other, and what signals to this process mean for them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial

from megatron_rl.processes.process import STOP_AFTER_STEP, die_with_parent, hold, release

STOP_TIMEOUT_S = 30.0  # a run stops its own children within ten seconds


class Runner:
    """One child at a time. Signals to this process stop the child first."""

    def __init__(self, train: Sequence[str]) -> None:
        self._train = list(train)
        self._child: subprocess.Popen[bytes] | None = None
        self.interrupted = self.last = False
        signal.signal(STOP_AFTER_STEP, self._finish)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)

    def run(self, arguments: Sequence[str]) -> int:
        # a session of its own: the terminal's Ctrl-C reaches the child once, through _stop; it ends with this process
        end_with_us = partial(die_with_parent, os.getpid(), signal.SIGTERM)
        hold(STOP_AFTER_STEP)
        self._child = subprocess.Popen([*self._train, *arguments], start_new_session=True, preexec_fn=end_with_us)
        release(STOP_AFTER_STEP)
        if self.interrupted:  # the signal came while the child was being started
            self._child.send_signal(signal.SIGINT)
        while self._child.poll() is None:
            if self.interrupted:
                return self._wait_stopped(self._child)
            time.sleep(0.1)
        return self._child.returncode

    def _stop(self, number: int, _frame: object) -> None:
        if self.interrupted:
            return
        self.interrupted = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)

    def _finish(self, number: int, _frame: object) -> None:
        self.last = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    @staticmethod
    def _wait_stopped(child: subprocess.Popen[bytes]) -> int:
        try:
            return child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return child.wait()
