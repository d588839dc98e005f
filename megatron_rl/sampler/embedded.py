"""The embedded sampler: one engine that this process owns, in a child process of its own (child_engine.py).

One that dies is started again (lasting_engine.py).

On a GPU the same code runs with other engine arguments (engine_settings.py, `sampler.vllm`); that has not been run yet.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.torch
import torch

from megatron_rl.models.points import Kind, Point
from megatron_rl.sampler.engine_settings import WORKER_EXTENSION, EngineSettings
from megatron_rl.sampler.lasting_engine import LastingEngine
from megatron_rl.sampler.protocol import SamplerStats, request_seed
from megatron_rl.types import Prompt, Rollout, SamplingParams, written
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError


class EmbeddedSampler:
    """See protocol.Sampler. Start it from a thread that outlives it: the kernel ties the child to that thread."""

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
        self.stats = SamplerStats()
        self._format = settings.quantization.format.value
        self._engine = LastingEngine(settings, hf_folder, log_dir / "sampler.log", worker_extension, note)

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
        if not prompts:
            return []
        start = time.perf_counter()
        answer = self._engine.call(
            "generate",
            prompts=[prompt.token_ids for prompt in prompts],
            seeds=[request_seed(seed, first_group + i) for i in range(len(prompts))],
            samples=params.samples,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=params.stop_token_ids,
            candidates=params.candidates,
            policy_version=self.policy_version,
        )
        rollouts = unpack(
            answer,
            prompts,
            params.samples,
            first_group=first_group,
            version=self.policy_version,
            format=self._format,
        )
        self.stats = replace(
            self.stats,
            tokens=self.stats.tokens + sum(answer["lengths"]),
            seconds=self.stats.seconds + time.perf_counter() - start,
            restarts=self._engine.restarts,
        )
        return rollouts

    def activations(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        answer = self._engine.call("activations", tokens=list(tokens), policy_version=self.policy_version)
        logprobs = torch.tensor(answer["logprobs"], dtype=torch.float32).unsqueeze(1)
        return safetensors.torch.load(bytes(answer["values"])) | {str(Point(Kind.logprob)): logprobs}

    def routed_experts(self, sequences: Sequence[Sequence[int]]) -> list[bytes]:
        return self._engine.call(
            "routed_experts", sequences=[list(one) for one in sequences], policy_version=self.policy_version
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._engine.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._engine.call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.last_sync = self._engine.call("finish_weight_update")
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


def unpack(
    answer: dict[str, Any], prompts: Sequence[Prompt], samples: int, *, first_group: int, version: int, format: str
) -> list[Rollout]:
    """What the child has packed: tokens and logprobs lie back to back."""
    tokens, logprobs = memoryview(answer["tokens"]), memoryview(answer["logprobs"])  # four bytes each
    rollouts = []
    start = 0
    for row, (length, finish) in enumerate(zip(answer["lengths"], answer["finish"], strict=True)):
        index, sample = divmod(row, samples)
        stop = start + 4 * length
        rollouts.append(
            Rollout(
                prompt=prompts[index],
                group=first_group + index,
                sample=sample,
                token_ids=array("i", tokens[start:stop].tobytes()),
                logprobs=array("f", logprobs[start:stop].tobytes()),
                loss_mask=written(length),
                finish_reason=finish,
                policy_version=version,
                format=format,
                **{name: array("i", answer[name][row]) for name in ("kept_ids", "kept_counts") if name in answer},
            )
        )
        start = stop
    return rollouts
