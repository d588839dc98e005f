"""Reward pool: scores tasks (row, response) in worker processes, replaces bad ones; tries a user's
reward before a run.

A worker that is late, dies or answers out of turn is replaced; its answer gets an `error` (after a
death: if twice).
"""

import os
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import VERIFIERS, RewardSection
from megatron_rl.processes import heartbeat
from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.processes.environment import for_rewards
from megatron_rl.processes.process import end_with_descendants
from megatron_rl.rewards.task import Score, Task
from megatron_rl.rewards.user_process import (
    START_TIMEOUT_S,
    RewardLog,
    as_json,
    first_reply,
    user_process,
)
from megatron_rl.types import Prompt, Verdict

WORKER = "reward worker"  # and its number, in what is said of it
# Tasks are handed to a worker ahead of their turn, but never more than the channel holds: neither
# side can block.
IN_FLIGHT = 64
CHANNEL_BYTES = 32 << 10
LARGEST_REPLY = 1 << 20
WATCHED = 32  # answers that the breaker looks at ...
TOO_LATE = 30  # ... and so many late ones among them end the run


class RewardsHang(RuntimeError):
    """Nearly every response misses the deadline: a run would wait for hours and learn nothing."""

    process = "the reward workers"
    hint = (
        "Fix the function that reward.name names, or give it more time (reward.timeout_s) or more "
        "workers (reward.workers)."
    )


DIED = Score(0.0, Verdict.error, "the reward worker died")
GARBLED = Score(0.0, Verdict.error, "the reward worker's channel held something else than a score")


class _ScoreReply(msgspec.Struct):
    """A reward runs in the worker, and may write what it likes into its channel."""

    id: int
    score: Score


class RewardPool:
    """Worker processes; `score` returns one Score per task, in order. Threads take turns."""

    def __init__(self, config: RewardSection, variables: Sequence[str] = ()) -> None:
        """`variables`: of the environment, which the workers see beside the usual ones."""
        breaker = _Breaker(config)
        self._config = config
        self._log = RewardLog()
        names = [f"{WORKER} {number}" for number in range(config.workers)]
        self._workers = [_Worker(name, config, variables, breaker, self._log) for name in names]
        self._turn = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=config.workers, thread_name_prefix="reward")

    def start(self) -> None:
        """Fails here, with the key's name, where the reward cannot be imported."""
        for worker in self._workers:
            worker.start()

    def score(self, tasks: Sequence[Task]) -> list[Score]:
        count = len(self._workers)
        shares = [tasks[index::count] for index in range(count)]
        waiting = heartbeat.waiting(WORKER, self._config.timeout_s + START_TIMEOUT_S)
        with self._turn, waiting:
            done = list(self._threads.map(_Worker.score, self._workers, shares))
        return [done[index % count][index // count] for index in range(len(tasks))]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._log.close()


class Unreachable(ConfigError):
    """A reward whose judge cannot be reached yet: the job may start it later."""


def check_importable(
    config: RewardSection, tasks: Sequence[Task] = (), variables: Sequence[str] = ()
) -> list[Score]:
    """Raises what `start` would. The user's module is imported in a process of its own, as it will
    be later, and judges these tasks there; none where all is built in.
    """
    if set(config.weights) <= set(VERIFIERS):
        return []
    pool = RewardPool(replace(config, workers=1), variables)
    try:
        pool.start()
        return pool.score(tasks)
    finally:
        pool.close()


def check_called(config: RewardSection, prompts: Sequence[Prompt], variables: Sequence[str]) -> str:
    """Return the scores of the user's reward for these rows' own answers; raise if it has none."""
    tasks = [
        Task(one.row, str(one.answer or 1), "stop", one.prompt_key, one.answer_key)
        for one in prompts
    ]
    scores = check_importable(config, tasks, variables)
    if scores and all(one.error for one in scores):
        last = f"for {tasks[-1].response[:40]!r} to {prompts[-1].text[-60:]!r}"
        why = f"reward.name: {config.name} gives no score, {last} for one: {scores[-1].error}"
        if all(one.away for one in scores):
            raise Unreachable(f"{why}; start the service that it uses, or fix the address")
        raise ConfigError(f"{why}; fix it there, or name another")
    shown = ", ".join(f"{one.reward:g}" for one in scores)
    return shown and f"(answers of some rows score {shown})"


class _Breaker:
    """Ends the scoring of all workers once nearly all of the last answers were late."""

    def __init__(self, config: RewardSection) -> None:
        self._config = config
        self._late: deque[bool] = deque(maxlen=WATCHED)
        self._lock = threading.Lock()

    def note(self, late: bool) -> None:
        with self._lock:
            self._late.append(late)
            count = sum(self._late) if late else 0  # one in time cannot make them too many
        if count >= TOO_LATE:
            raise RewardsHang(
                f"reward.timeout_s: {count} of the last {WATCHED} responses had no score within "
                f"{self._config.timeout_s:g} s; fix reward.name={self._config.name}, or raise it"
            )


class _Worker:
    def __init__(
        self,
        name: str,
        config: RewardSection,
        variables: Sequence[str],
        breaker: _Breaker,
        log: RewardLog,
    ) -> None:
        self._name = name
        self._variables = variables
        self._config = config
        self._breaker = breaker
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._asked = 0  # number of the last task that was sent
        self._closed = False

    def start(self) -> None:
        variables = for_rewards(os.environ, self._variables)
        self._process, ours = user_process(
            "megatron_rl.rewards.worker", self._name, self._log, variables
        )
        self._channel = Channel(ours)
        start = {"weights": self._config.weights, "wrong": self._config.wrong}
        try:
            first_reply(self._channel, start, LARGEST_REPLY, "reward.name", self._config.name)
        except ConfigError:
            self.stop()
            raise

    def score(self, tasks: Sequence[Task]) -> list[Score]:
        """Score in order. A task that a worker died with is judged again: kills change no score."""
        scores: list[Score] = []
        again = False  # the next task was a worker's last
        while len(scores) < len(tasks):
            found = self._score_some(self._window(tasks[len(scores) : len(scores) + IN_FLIGHT]))
            first_time = (
                found[-1] in (DIED, GARBLED)
                and not (again and len(found) == 1)
                and not self._closed
            )
            scores += found[:-1] if first_time else found
            again = first_time
        return scores

    def _window(self, tasks: Sequence[Task]) -> list[bytes]:
        """The first tasks as messages: as many as an idle channel takes, and at least one."""
        messages: list[bytes] = []
        size = 0
        for task in tasks:
            messages.append(as_json(vars(task)))
            size += len(messages[-1])
            if size > CHANNEL_BYTES:
                return messages[: max(1, len(messages) - 1)]
        return messages

    def _score_some(self, messages: Sequence[bytes]) -> list[Score]:
        """Scores of these tasks, or of the first ones if the worker dies on the way."""
        if self._closed:  # by another thread, with tasks left
            return [Score(0.0, Verdict.error, "the rewards were closed")] * len(messages)
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self.start()
        channel = self._channel
        scores = list[Score]()
        first = self._asked + 1
        assert channel is not None  # it goes with its process
        try:
            self._asked += len(messages)
            tasks = [
                {"id": number, "task": message} for number, message in enumerate(messages, first)
            ]
            channel.send(*tasks, timeout_s=self._config.timeout_s)
            for number in range(first, first + len(messages)):
                reply = msgspec.convert(
                    channel.receive(self._config.timeout_s, LARGEST_REPLY), _ScoreReply
                )
                heartbeat.mark()
                if reply.id != number:
                    self.stop()
                    return [
                        *scores,
                        Score(0.0, Verdict.error, "the reward worker answered out of turn"),
                    ]
                scores.append(reply.score)
                self._breaker.note(False)
        except TimeoutError:
            self.stop()
            scores.append(
                Score(
                    0.0,
                    Verdict.timeout,
                    f"no score within reward.timeout_s={self._config.timeout_s:g}",
                )
            )
            if not self._closed:
                self._breaker.note(True)
        except (ChannelClosed, msgspec.DecodeError) as error:
            self.stop()
            scores.append(DIED if isinstance(error, ChannelClosed) else GARBLED)
        return scores

    def close(self) -> None:
        """End the worker for good. A thread that waits for a reply sees the end of its channel."""
        self._closed = True
        process = self._process
        if process is not None and process.poll() is None:
            end_with_descendants(process.pid)

    def stop(self) -> None:
        process = self._process
        self._process = None
        channel = self._channel
        self._channel = None
        if process is not None:
            end_with_descendants(process.pid)
            process.wait()
        if channel is not None:
            channel.close()
