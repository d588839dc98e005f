"""Bytes on one GPU of an engine, and how many tokens and sequences its cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.fleet import HOST_CACHE_BYTES, max_sequences
from megatron_rl.config.schema import Format, KvCache, QuantizationSection, SamplerSection
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.plan.learner_memory import chosen
from megatron_rl.preflight.plan.weights import BF16, engine_weights

GIB = 1 << 30
UTILIZATION = 0.92  # vLLM's own, where sampler.vllm.gpu_memory_utilization names no other
RUNTIME = 3 * GIB  # CUDA's context, NCCL, CUDA graphs
HOST_RUNTIME = 1.8 * GIB  # of an engine without a GPU, as measured
ASLEEP = 2 * GIB  # what of them stays
BATCHED = 4096  # tokens of a step at least: sampler/engine_settings.py
FP32 = 4


@dataclass(frozen=True)
class EngineMemory:
    """Of one GPU."""

    weights: float
    runtime: float  # context, NCCL, graphs, and what a step of the largest batch needs
    cache: float
    token: float  # bytes of the cache for one token
    asleep: float  # what it keeps while it sleeps

    @property
    def total(self) -> float:
        return self.weights + self.runtime + max(self.cache, 0)

    @property
    def tokens(self) -> int:
        """Of the engine's whole cache: its GPUs hold different heads of the same tokens."""
        return int(max(self.cache, 0) / self.token)


def of_engine(
    model: Model,
    sampler: SamplerSection,
    quantization: QuantizationSection,
    format: Format,
    longest: int,
    capacity: float | None,
    host: bool = False,
) -> EngineMemory:
    """`longest`: tokens of a prompt with its answer. `capacity`: bytes of a GPU; None: not known, and no cache."""
    shape, tp, given = model.shape, sampler.tensor_parallel, sampler.vllm
    weights = engine_weights(shape, format, quantization.ignore).of_rank(tp, shape.kv_heads)
    runtime = RUNTIME + _step(model, tp, max(longest, BATCHED), given, max_sequences(sampler))
    token = cache_token(shape, tp, quantization.kv_cache)
    cache = given.get("kv_cache_memory_bytes")
    if host:
        runtime, cache = HOST_RUNTIME, cache or HOST_CACHE_BYTES
    elif cache is None:
        share = float(given.get("gpu_memory_utilization") or UTILIZATION)
        cache = share * capacity - weights - runtime if capacity else 0.0
    return EngineMemory(weights, runtime, float(cache), token, ASLEEP)


def cache_token(shape: ModelShape, tp: int, cache: KvCache) -> float:
    """Keys and values of all layers, on one GPU; ranks beyond the key-value heads hold copies."""
    heads = shape.kv_heads / min(tp, shape.kv_heads)
    return 2 * shape.layers * heads * shape.head_dim * (1 if cache == KvCache.fp8 else BF16)


def _step(model: Model, tp: int, batched: int, given: Mapping[str, Any], sequences: int) -> float:
    """What vLLM's profiling run finds: a layer's widest results, and FP32 logits twice."""
    tokens = int(given.get("max_num_batched_tokens") or batched)
    shape = model.shape
    width = 3 * (chosen(model) * shape.expert_ffn if shape.experts else shape.ffn)
    return tokens * BF16 * (width / tp + 3 * shape.hidden) + 2 * sequences * shape.vocab * FP32
