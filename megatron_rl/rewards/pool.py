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

import msgspec

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import RewardSection

START_TIMEOUT_S = 60.0
# Tasks are handed to a worker ahead of their turn, but never more than its two pipes hold: neither side can block.
IN_FLIGHT = 64
PIPE_BYTES = 32 << 10


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
        start = {"name": self._config.name, "path": [os.getcwd(), *filter(None, sys.path)]}
        self._send(json.dumps(start).encode() + b"\n")
        try:
            reply = self._receive(START_TIMEOUT_S) or {"error": f"no start within {START_TIMEOUT_S:.0f} s"}
        except EOFError:
            reply = {"error": "the reward worker died at its start"}
        if "error" in reply:
            self.stop()
            raise ConfigError(f"reward.name: {reply['error']}")

    def score(self, tasks: Sequence[tuple[Mapping[str, Any], str]]) -> list[Score]:
        scores: list[Score] = []
        while len(scores) < len(tasks):
            scores += self._score_some(self._window(tasks[len(scores) : len(scores) + IN_FLIGHT]))
        return scores

    def _window(self, tasks: Sequence[tuple[Mapping[str, Any], str]]) -> list[bytes]:
        """The messages of the first tasks: as many as an idle pipe takes, and at least one."""
        messages: list[bytes] = []
        size = 0
        for row, response in tasks:
            task = {"row": row, "answer_key": self._answer_key, "response": response}
            messages.append(msgspec.json.encode(task, enc_hook=str) + b"\n")
            size += len(messages[-1])
            if size > PIPE_BYTES:
                return messages[: max(1, len(messages) - 1)]
        return messages

    def _score_some(self, messages: Sequence[bytes]) -> list[Score]:
        """Scores of these tasks, or of the first of them up to one that the worker did not survive."""
        if self._closed:  # by another thread, with tasks left
            return [Score(0.0, "the rewards were closed")] * len(messages)
        if self._process is None or self._process.poll() is not None:
            self.start()
        scores: list[Score] = []
        try:
            self._send(b"".join(messages))
            for _ in messages:
                reply = self._receive(self._config.timeout_s)
                if reply is None:
                    self.stop()
                    late = f"no score within reward.timeout_s={self._config.timeout_s:g}"
                    return [*scores, Score(0.0, late)]
                scores.append(Score(reply.get("score", 0.0), reply.get("error")))
        except (BrokenPipeError, EOFError):
            self.stop()
            scores.append(Score(0.0, "the reward worker died"))
        return scores

    def _send(self, data: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(data)
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
        return msgspec.json.decode(line)

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
