"""Scores rollouts in worker processes with a deadline per answer.

A worker that misses its deadline or dies is ended and replaced; its answer gets no score, but an
`error` that is counted. Rewards never run in the learner's process, so they cannot hang or crash it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.schema import RewardSection

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Score:
    reward: float
    error: str | None = None


class RewardPool:
    """`score` answers in the order of its tasks: one Score for each (row, response)."""

    def __init__(self, config: RewardSection, answer_key: str) -> None:
        self._config = config
        self._workers = [_Worker(config, answer_key) for _ in range(config.workers)]
        self._threads = ThreadPoolExecutor(max_workers=config.workers, thread_name_prefix="reward")

    def start(self) -> None:
        """Fails here, with the key's name, where the reward cannot be imported."""
        for worker in self._workers:
            worker.start()

    def score(self, tasks: Sequence[tuple[Mapping[str, Any], str]]) -> list[Score]:
        count = len(self._workers)
        shares = [tasks[index::count] for index in range(count)]
        done = list(self._threads.map(lambda pair: pair[0].score(pair[1]), zip(self._workers, shares, strict=True)))
        return [done[index % count][index // count] for index in range(len(tasks))]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()


class _Worker:
    def __init__(self, config: RewardSection, answer_key: str) -> None:
        self._config = config
        self._answer_key = answer_key
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._closed = False

    def start(self) -> None:
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, which ends its workers itself
        )
        self._send({"name": self._config.name, "path": [os.getcwd(), *filter(None, sys.path)]})
        try:
            reply = self._receive(START_TIMEOUT_S) or {"error": f"no start within {START_TIMEOUT_S:.0f} s"}
        except EOFError:
            reply = {"error": "the reward worker died at its start"}
        if "error" in reply:
            self.stop()
            raise ConfigError(f"reward.name: {reply['error']}")

    def score(self, tasks: Sequence[tuple[Mapping[str, Any], str]]) -> list[Score]:
        return [self._score_one(row, response) for row, response in tasks]

    def _score_one(self, row: Mapping[str, Any], response: str) -> Score:
        if self._closed:  # by another thread, with tasks left
            return Score(0.0, "the rewards were closed")
        if self._process is None or self._process.poll() is not None:
            self.start()
        try:
            self._send({"row": row, "answer_key": self._answer_key, "response": response})
            reply = self._receive(self._config.timeout_s)
        except (BrokenPipeError, EOFError):
            self.stop()
            return Score(0.0, "the reward worker died")
        if reply is None:
            self.stop()
            return Score(0.0, f"no score within reward.timeout_s={self._config.timeout_s:g}")
        if "error" in reply:
            return Score(0.0, reply["error"])
        return Score(reply["score"])

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """One reply; None at the deadline; EOFError from a worker that is gone."""
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            piece = os.read(descriptor, 65536)
            if not piece:
                raise EOFError
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """Ends the worker for good. A thread that waits for its answer sees the end of its stream."""
        self._closed = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # unsent input of a worker that is gone
        self._process = None
