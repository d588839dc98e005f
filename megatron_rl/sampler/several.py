"""Several embedded engines on a host, each on its share of the cores: what a step of an engine costs outside of the
kernels is one thread's work, and several do it side by side. Of a small model that is most of the time.

An update becomes the live weights of all, or of none: each engine has taken it before the first is told to go over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_rl.sampler.answering import answer_all
from megatron_rl.sampler.embedded import EmbeddedSampler
from megatron_rl.sampler.embedded_answering import EmbeddedAnswering, Meter
from megatron_rl.sampler.engine_process import share_of_cores
from megatron_rl.sampler.engine_settings import WORKER_EXTENSION, EngineSettings
from megatron_rl.sampler.protocol import SamplerStats
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION


class SeveralEngines:
    """See protocol.Sampler."""

    def __init__(
        self,
        settings: EngineSettings,
        hf_folder: Path,
        log_dir: Path,
        *,
        note: Callable[[str], None] = lambda line: None,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        self.policy_version = NO_VERSION
        self.last_sync: dict[str, Any] = {}
        count, meter = settings.sampler.engines, Meter()
        self._each = [
            EmbeddedSampler(
                replace(settings, cores=share_of_cores(number, count)),
                hf_folder,
                log_dir,
                note=note,
                worker_extension=worker_extension,
                log=f"sampler-{number + 1}.log" if number else "sampler.log",
                meter=meter,
            )
            for number in range(count)
        ]
        self._first = self._each[0]

    @property
    def stats(self) -> SamplerStats:
        return replace(self._first.stats, restarts=sum(one.stats.restarts for one in self._each))

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        self.policy_version = NO_VERSION
        for one in self._each:
            one.launch()

    def wait_ready(self) -> None:
        for one in self._each:
            one.wait_ready()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, first_group: int, step: int
    ) -> list[Rollout]:
        answering = SeveralAnswering([one.answering(params, seed=seed, patient=False) for one in self._each])
        return answer_all(answering, prompts, first_group)

    def answering(self, params: SamplingParams, *, seed: int, step: int = 0) -> SeveralAnswering:
        return SeveralAnswering([one.answering(params, seed=seed) for one in self._each])

    def activations(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        return self._first.activations(tokens)

    def routed_experts(self, sequences: Sequence[Sequence[int]]) -> list[bytes]:
        return self._first.routed_experts(sequences)

    @contextmanager
    def updating(self) -> Iterator[None]:
        with ExitStack() as all_of_them:
            for one in self._each:
                all_of_them.enter_context(one.updating())
            yield

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for one in self._each:
            one.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        for one in self._each:
            one.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        for one in self._each:
            one.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for one in self._each:
            one.await_weight_update()
        for one in self._each:
            one.finish_weight_update(weight_version)
        self.policy_version = self._first.policy_version
        self.last_sync = max((one.last_sync for one in self._each), key=lambda told: told["load_s"])

    def sleep(self, level: int = 1) -> None:
        for one in self._each:
            one.sleep(level)

    def wake(self, tags: list[str] | None = None) -> None:
        for one in self._each:
            one.wake(tags)

    def health(self) -> dict[str, Any]:
        """Of the first that is not well."""
        told = [one.health() for one in self._each]
        return next((one for one in told if one["torn"] or one["refusal"]), told[0])

    def close(self) -> None:
        with ExitStack() as all_of_them:
            for one in self._each:
                all_of_them.callback(one.close)

    def __enter__(self) -> SeveralEngines:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SeveralAnswering:
    """See protocol.Answering."""

    def __init__(self, each: Sequence[EmbeddedAnswering]) -> None:
        self._each = each
        self._next = 0  # whom to wait for

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        """In equal parts, neighbours together; few in turns."""
        engines, count = len(self._each), len(prompts)
        for part in range(engines):
            start, stop = part * count // engines, (part + 1) * count // engines
            self._each[(first_group + part) % engines].add(prompts[start:stop], first_group + start)

    def finished(self) -> list[list[Rollout]]:
        """Of all engines that have something to say; where none has, of the next one that will."""
        groups: list[list[Rollout]] = []
        while not groups and (busy := [one for one in self._each if one.is_open]):
            self._next += 1
            for one in [one for one in busy if one.has_replies] or [busy[self._next % len(busy)]]:
                groups += one.finished()
        return groups

    def close(self) -> None:
        with ExitStack() as all_of_them:
            for one in self._each:
                all_of_them.callback(one.close)
