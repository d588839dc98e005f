"""The embedded sampler: one engine that this process owns, in a child process of its own (child_engine.py).

One that dies is started again (lasting_engine.py).

On a GPU the same code runs with other engine arguments (engine_settings.py, `sampler.vllm`); that has not been run yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.torch
import torch

from megatron_rl.config.schema import Cache
from megatron_rl.models.points import Kind, Point
from megatron_rl.sampler.answering import answer_all
from megatron_rl.sampler.embedded_answering import EmbeddedAnswering, Meter
from megatron_rl.sampler.engine_settings import WORKER_EXTENSION, EngineSettings
from megatron_rl.sampler.lasting_engine import LastingEngine
from megatron_rl.sampler.protocol import SamplerStats
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError


class EmbeddedSampler:
    """See protocol.Sampler. Any thread may ask it; one at a time may update its weights, or close it."""

    def __init__(
        self,
        settings: EngineSettings,
        hf_folder: Path,
        log_dir: Path,
        *,
        note: Callable[[str], None] = lambda line: None,
        worker_extension: str = WORKER_EXTENSION,
        log: str = "sampler.log",
        meter: Meter | None = None,
    ) -> None:
        """`meter`: one that several count in."""
        self.policy_version = NO_VERSION
        self.last_sync: dict[str, Any] = {}
        self._meter = meter or Meter()
        self._keeps_cache = settings.in_flight_cache == Cache.keep
        self._format = settings.quantization.format.value
        self._engine = LastingEngine(settings, hf_folder, log_dir / log, worker_extension, note)

    def start(self) -> None:
        """Start the child and wait until its engine answers."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the child without waiting for it: the learner can start meanwhile."""
        self.policy_version = NO_VERSION
        self._engine.launch()

    def wait_ready(self) -> None:
        self._engine.wait_ready()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, first_group: int, step: int
    ) -> list[Rollout]:
        return answer_all(self.answering(params, seed=seed, patient=False), prompts, first_group)

    def answering(self, params: SamplingParams, *, seed: int, step: int = 0, patient: bool = True) -> EmbeddedAnswering:
        """`patient`: see Engine.generate."""
        return EmbeddedAnswering(
            self._engine,
            params,
            seed,
            version=lambda: self.policy_version,
            format=self._format,
            meter=self._meter,
            patient=patient,
        )

    @property
    def stats(self) -> SamplerStats:
        return SamplerStats(tokens=self._meter.tokens, seconds=self._meter.seconds, restarts=self._engine.restarts)

    def activations(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        answer = self._engine.call("activations", tokens=list(tokens), policy_version=self.policy_version)
        logprobs = torch.tensor(answer["logprobs"], dtype=torch.float32).unsqueeze(1)
        return safetensors.torch.load(bytes(answer["values"])) | {str(Point(Kind.logprob)): logprobs}

    def routed_experts(self, sequences: Sequence[Sequence[int]]) -> list[bytes]:
        return self._engine.call(
            "routed_experts", sequences=[list(one) for one in sequences], policy_version=self.policy_version
        )

    def updating(self) -> AbstractContextManager[None]:
        return self._engine.in_turn()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._engine.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._engine.call("update_weights", update_info=update_info)

    def await_weight_update(self) -> None:
        """Until the engine has taken the update; raises where it does not. Its weights are the old ones still."""
        self._engine.call("await_weight_update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.last_sync = self._engine.call("finish_weight_update", keep_cache=self._keeps_cache)
        self.policy_version = self.last_sync["policy_version"]
        if weight_version is not None and weight_version != str(self.policy_version):
            raise WeightSyncError(f"the engine loaded policy version {self.policy_version}, not {weight_version}")

    def sleep(self, level: int = 1) -> None:
        self._engine.call("sleep", level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        self._engine.call("wake", tags=tags)

    def health(self) -> dict[str, Any]:
        return self._engine.call("health")

    def close(self) -> None:
        """Stop the engine; safe to call twice and in any state."""
        self._engine.close()

    def __enter__(self) -> EmbeddedSampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
