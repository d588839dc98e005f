"""The embedded sampler: engines that this process owns, each in a child process of its own (child_engine.py).

One that dies is started again (restarting_engine.py). There may be several on a host, each on its share of the cores:
what a step of an engine costs outside of the kernels is one thread's work, and several do it side by side. Of a small
model that is most of the time. An update becomes the live weights of all, or of none: each engine has taken it before
the first is told to go over.

On a GPU the same code runs with other engine arguments (engine_settings.py, `sampler.vllm`); that has not been run yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from megatron_rl.config.schema import Cache
from megatron_rl.models.points import Kind, Point
from megatron_rl.sampler.embedded_answering import EmbeddedAnswering, EngineAnswering, Meter
from megatron_rl.sampler.engine_process import share_of_cores
from megatron_rl.sampler.engine_settings import WORKER_EXTENSION, EngineSettings
from megatron_rl.sampler.protocol import BaseSampler, SamplerStats, answer_all
from megatron_rl.sampler.restarting_engine import RestartingEngine
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION


class EmbeddedSampler(BaseSampler):
    """See protocol.Sampler. Any thread may ask it; one at a time may update its weights, or close it."""

    def __init__(
        self,
        settings: EngineSettings,
        hf_folder: Path,
        log_dir: Path,
        *,
        note: Callable[[str], None] = lambda line: None,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        super().__init__()
        self._meter = Meter()
        self._keeps_cache = settings.in_flight_cache == Cache.keep
        self._format = settings.quantization.format.value
        count = settings.sampler.engines
        self._engines = [
            RestartingEngine(
                settings,
                hf_folder,
                log_dir / (f"sampler-{number + 1}.log" if number else "sampler.log"),
                worker_extension,
                share_of_cores(number, count),
                note,
            )
            for number in range(count)
        ]
        self._first = self._engines[0]

    def launch(self) -> None:
        """Start the children without waiting for them: the learner can start meanwhile."""
        self.policy_version = NO_VERSION
        for engine in self._engines:
            engine.launch()

    def wait_ready(self) -> None:
        for engine in self._engines:
            engine.wait_ready()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, first_group: int, step: int
    ) -> list[Rollout]:
        return answer_all(self._answering(params, seed, patient=False), prompts, first_group)

    def answering(self, params: SamplingParams, *, seed: int, step: int = 0) -> EmbeddedAnswering:
        return self._answering(params, seed, patient=True)

    def _answering(self, params: SamplingParams, seed: int, patient: bool) -> EmbeddedAnswering:
        """`patient`: see Engine.generate."""
        return EmbeddedAnswering(
            [
                EngineAnswering(
                    engine,
                    params,
                    seed,
                    version=lambda: self.policy_version,
                    format=self._format,
                    meter=self._meter,
                    patient=patient,
                )
                for engine in self._engines
            ]
        )

    @property
    def stats(self) -> SamplerStats:
        restarts = sum(engine.restarts for engine in self._engines)
        return SamplerStats(tokens=self._meter.tokens, seconds=self._meter.seconds, restarts=restarts)

    def activations(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        answer = self._first.call("activations", tokens=list(tokens), policy_version=self.policy_version)
        logprobs = torch.tensor(answer["logprobs"], dtype=torch.float32).unsqueeze(1)
        return safetensors.torch.load(bytes(answer["values"])) | {str(Point(Kind.logprob)): logprobs}

    def routed_experts(self, sequences: Sequence[Sequence[int]]) -> list[bytes]:
        asked = [list(tokens) for tokens in sequences]
        return self._first.call("routed_experts", sequences=asked, policy_version=self.policy_version)

    @contextmanager
    def updating(self) -> Iterator[None]:
        with ExitStack() as turns:
            for engine in self._engines:
                turns.enter_context(engine.in_turn())
            yield

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call_each("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._call_each("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call_each("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        if len(self._engines) > 1:  # until each has taken the update; their weights are the old ones still
            self._call_each("await_weight_update")
        told = self._call_each("finish_weight_update", keep_cache=self._keeps_cache)
        self._serve(max(told, key=lambda sync: sync["load_s"]), weight_version, "engine")

    def sleep(self, level: int = 1) -> None:
        self._call_each("sleep", level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        self._call_each("wake", tags=tags)

    def health(self) -> dict[str, Any]:
        """The health of the first engine that is not well; of the first one, where all are."""
        told = self._call_each("health")
        return next((one for one in told if one["torn"] or one["refusal"]), told[0])

    def close(self) -> None:
        with ExitStack() as ends:
            for engine in self._engines:
                ends.callback(engine.close)

    def _call_each(self, method: str, **arguments: Any) -> list[Any]:
        return [engine.call(method, **arguments) for engine in self._engines]
