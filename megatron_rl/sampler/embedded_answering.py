"""Prompts that embedded engines are answering, over their deaths too."""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any

from megatron_rl.sampler.child_engine import ChildEngine, EngineDied, Replies
from megatron_rl.sampler.protocol import SamplerError, request_seed, versions_of_tokens
from megatron_rl.sampler.restarting_engine import RestartingEngine
from megatron_rl.types import Prompt, Rollout, SamplingParams, written

REQUEST = "generate"


class Meter:
    """Counts tokens, and the time in which something was open, whoever has asked."""

    def __init__(self) -> None:
        self.tokens = 0
        self._lock = threading.Lock()
        self._open, self._since, self._seconds = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._open else 0.0)

    def count(self, groups: int, tokens: int = 0) -> None:
        """`groups`: how many more are open; below 0: how many less."""
        with self._lock:
            now = time.perf_counter()
            if self._open:
                self._seconds += now - self._since
            self._since = now
            self._open += groups
            self.tokens += tokens


class EngineAnswering:
    """One engine's share of the prompts. What is open when it dies is asked of the next one, from the beginning."""

    def __init__(
        self,
        engine: RestartingEngine,
        params: SamplingParams,
        seed: int,
        *,
        version: Callable[[], int],
        format: str,
        meter: Meter,
        patient: bool,
    ) -> None:
        """`version`: the one that is served, as far as is known here. `patient`: see Engine.generate."""
        self._engine, self._params, self._seed = engine, params, seed
        self._version, self._format, self._meter, self._patient = version, format, meter, patient
        self._open: dict[int, Prompt] = {}  # by group
        self._child: ChildEngine | None = None
        self._asked: dict[int, list[int]] = {}  # by request to that child: the groups
        self._replies: Replies = queue.SimpleQueue()

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        more = dict(enumerate(prompts, first_group))
        if not more:
            return
        self._open |= more
        self._meter.count(len(more))
        self._ask(list(more))

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @property
    def has_replies(self) -> bool:
        """Whether `finished` finds something without waiting: perhaps the end of the engine."""
        return not self._replies.empty()

    def finished(self) -> list[list[Rollout]]:
        groups: list[list[Rollout]] = []
        while self._open and not groups:
            child = self._child
            assert child is not None
            try:
                groups += self._read(child.next_reply(REQUEST, self._replies))
                while not self._replies.empty():
                    groups += self._read(child.next_reply(REQUEST, self._replies))
            except EngineDied as error:
                if self._open:
                    self._engine.revive(child, error)
                    self._ask(list(self._open))
        return groups

    def close(self) -> None:
        if self._open and self._child is not None:
            with suppress(SamplerError):  # an engine that has ended has given up by itself
                self._child.call("abandon", requests=list(self._asked))
            self._child.forget(list(self._asked))
        self._meter.count(-len(self._open))
        self._open.clear()
        self._asked.clear()

    def _ask(self, groups: list[int]) -> None:
        """Ask the present engine for these groups; one that has come meanwhile is asked for all that is open."""
        while True:
            child = self._engine.child
            if child is not self._child:
                self._child, self._asked, self._replies = child, {}, queue.SimpleQueue()
                groups = list(self._open)
            try:
                self._asked[self._send(child, groups)] = groups
            except EngineDied as error:
                self._engine.revive(child, error)
            else:
                return

    def _send(self, child: ChildEngine, groups: list[int]) -> int:
        return child.ask(
            REQUEST,
            self._replies,
            prompts=[self._open[group].token_ids for group in groups],
            seeds=[request_seed(self._seed, group) for group in groups],
            policy_version=self._version(),
            patient=self._patient,
            **asdict(self._params),
        )

    def _read(self, reply: dict[str, Any]) -> list[list[Rollout]]:
        answer, asked = reply["value"], self._asked[reply["id"]]
        prompts = {asked[place]: self._open.pop(asked[place]) for place in answer["places"]}
        groups = unpack(answer, prompts, self._params.samples, self._format)
        if not answer["left"]:
            del self._asked[reply["id"]]
        self._meter.count(-len(groups), sum(answer["lengths"]))
        return groups


class EmbeddedAnswering:
    """See protocol.Answering."""

    def __init__(self, engines: Sequence[EngineAnswering]) -> None:
        self._engines = engines
        self._next = 0  # whom to wait for

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        """Divide prompts in equal parts, neighbours together; where they are few, engines take turns."""
        engines, count = len(self._engines), len(prompts)
        for part in range(engines):
            start, stop = part * count // engines, (part + 1) * count // engines
            self._engines[(first_group + part) % engines].add(prompts[start:stop], first_group + start)

    def finished(self) -> list[list[Rollout]]:
        """Read all engines that have replied; where none has, wait for the next one."""
        groups: list[list[Rollout]] = []
        while not groups and (busy := [engine for engine in self._engines if engine.is_open]):
            self._next += 1
            for engine in [engine for engine in busy if engine.has_replies] or [busy[self._next % len(busy)]]:
                groups += engine.finished()
        return groups

    def close(self) -> None:
        with ExitStack() as ends:
            for engine in self._engines:
                ends.callback(engine.close)


def unpack(answer: dict[str, Any], prompts: dict[int, Prompt], samples: int, format: str) -> list[list[Rollout]]:
    """Rollouts, by group, of what the child has packed: tokens and logprobs lie back to back."""
    tokens, logprobs = memoryview(answer["tokens"]), memoryview(answer["logprobs"])  # four bytes each
    groups: list[list[Rollout]] = []
    start = row = 0
    for group, prompt in prompts.items():
        rollouts: list[Rollout] = []
        for sample in range(samples):
            length = answer["lengths"][row]
            stop = start + 4 * length
            rollouts.append(
                Rollout(
                    prompt=prompt,
                    group=group,
                    sample=sample,
                    token_ids=array("i", tokens[start:stop].tobytes()),
                    logprobs=array("f", logprobs[start:stop].tobytes()),
                    loss_mask=written(length),
                    finish_reason=answer["finish"][row],
                    policy_version=answer["versions"][row],
                    format=format,
                    versions=versions_of_tokens(answer["spans"][row]) if row in answer["spans"] else None,
                    **{name: array("i", answer[name][row]) for name in ("kept_ids", "kept_counts") if name in answer},
                )
            )
            start, row = stop, row + 1
        groups.append(rollouts)
    return groups
