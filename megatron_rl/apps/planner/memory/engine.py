"""Bytes of a vLLM engine on one GPU or CPU: weights, runtime, cache, what stays asleep; and
its cache's tokens.

As vLLM 0.32 reckons (v1/worker/gpu_worker.py, v1/worker/utils.py, utils/mem_utils.py): a worker
makes its CUDA context and NCCL's buffers, and looks at the memory; gpu_memory_utilization times all
of it has to be free then, or the start ends. Out of that come the weights, the most that a
profiling run takes, CUDA graphs, and the cache, which gets the rest (or kv_cache_memory_bytes; the
share has to be free then, too). So context and NCCL lie beside the share, and what another process
takes while the engine profiles is taken from the cache.

Asleep (device_allocator/sleep_mode_backend.py, cumem.py) all of the share is given back. Graphs and
workspaces wake with the weights, the cache apart from them.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from megatron_rl.apps.planner.memory.activations import chosen
from megatron_rl.apps.planner.memory.learner import BF16
from megatron_rl.config.fleet import HOST_CACHE_BYTES, max_sequences
from megatron_rl.config.schema import Format, KvCache, QuantizationSection, SamplerSection
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import stored_params
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Split
from megatron_rl.quantization.formats import outputs

GIB = 1 << 30
UTILIZATION = 0.92  # vLLM's own, where sampler.vllm.gpu_memory_utilization names no other
CONTEXT = 0.8 * GIB  # CUDA's own, with the kernels of torch, Transformer Engine and cuBLAS
COMMUNICATOR = 0.3 * GIB  # NCCL's buffers for a group of ranks
RUNTIME = 2 * GIB  # CUDA graphs, workspaces of kernels
HOST_RUNTIME = 1.8 * GIB  # of an engine without a GPU, as measured
ASLEEP = 2 * GIB  # what of them stays
BATCHED = 4096  # tokens of a step at least: sampler/engine_settings.py
FP32 = 4
PLAIN = "bfloat16"  # what is not quantized


@dataclass(frozen=True)
class EngineWeights:
    """Bytes, by how the ranks of a tensor-parallel engine hold them."""

    whole: int
    split: int
    key_value: int  # split over key-value heads, of which the ranks beyond hold copies
    experts: int  # of all three: experts
    kv_heads: int

    @property
    def nbytes(self) -> int:
        return self.whole + self.split + self.key_value

    def of_rank(self, tp: int) -> int:
        """Bytes that one of so many tensor-parallel ranks loads."""
        return self.whole + self.split // tp + self.key_value // min(tp, self.kv_heads)


@cache
def engine_weights(shape: ModelShape, format: Format, ignore: tuple[str, ...]) -> EngineWeights:
    """Count the tensors that a sync sends, scales included."""
    counts = dict.fromkeys(("whole", "split", "key_value", "experts"), 0)
    joined = Fraction(2 * shape.kv_heads, shape.heads + 2 * shape.kv_heads)
    of_heads = {"k_proj": Fraction(1), "v_proj": Fraction(1), "qkv_proj": joined}
    for param in stored_params(shape):
        split = param.row.split is not Split.replicated
        for piece in param.slices(shape, Layout(), Place()):
            share = of_heads.get(piece.name.rsplit(".", 2)[-2], 0)
            for out in outputs(piece, format, ignore, PLAIN, split):
                nbytes = out.tensor.nbytes
                counts["experts"] += nbytes * param.row.expert
                if out.dim is None:
                    counts["whole"] += nbytes
                else:
                    key_value = int(nbytes * share)
                    counts["key_value"] += key_value
                    counts["split"] += nbytes - key_value
    return EngineWeights(**counts, kv_heads=shape.kv_heads)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine on one GPU."""

    context: float  # CUDA and NCCL, beside its share of the memory
    weights: float
    runtime: float  # graphs, and what a step of the largest batch needs
    cache: float
    # of the share, which has to be free at the start: where the cache's size is given
    unused: float
    token: float  # bytes of the cache for one token
    asleep: float  # what it keeps while it sleeps

    @property
    def tokens(self) -> int:
        """Tokens in the engine's whole cache: its GPUs hold different heads of the same tokens."""
        return int(max(self.cache, 0) / self.token)


def of_engine(
    model: Model,
    sampler: SamplerSection,
    quantization: QuantizationSection,
    held: EngineWeights,
    longest: int,
    capacity: float | None,
    host: bool,
) -> EngineMemory:
    """`longest`: tokens of a prompt with its response. `capacity`: bytes of a GPU; None: not known,
    and no cache.
    """
    shape = model.shape
    tp = sampler.tensor_parallel
    weights = held.of_rank(tp)
    runtime = RUNTIME + _step(model, sampler, longest)
    token = cache_token(shape, tp, quantization.kv_cache)
    cache = sampler.vllm.get("kv_cache_memory_bytes")
    if host:
        return EngineMemory(
            0.0, weights, HOST_RUNTIME, float(cache or HOST_CACHE_BYTES), 0.0, token, ASLEEP
        )
    rest = 0.0
    if capacity:
        rest = utilization(sampler) * capacity - weights - runtime
    cache = rest if cache is None else float(cache)
    context = CONTEXT + COMMUNICATOR * (tp > 1)
    return EngineMemory(context, weights, runtime, cache, max(rest - cache, 0.0), token, ASLEEP)


def utilization(sampler: SamplerSection) -> float:
    return float(sampler.vllm.get("gpu_memory_utilization") or UTILIZATION)


def cache_token(shape: ModelShape, tp: int, cache: KvCache) -> float:
    """Keys and values of all layers, on one GPU; ranks beyond the key-value heads hold copies."""
    heads = shape.kv_heads / min(tp, shape.kv_heads)
    return 2 * shape.layers * heads * shape.head_dim * (1 if cache == KvCache.fp8 else BF16)


def _step(model: Model, sampler: SamplerSection, longest: int) -> float:
    """Estimate the peak of vLLM's profiling run: a layer's widest outputs and two FP32 logits."""
    tokens = int(sampler.vllm.get("max_num_batched_tokens") or max(longest, BATCHED))
    shape = model.shape
    width = 3 * (chosen(model) * shape.expert_ffn if shape.experts else shape.ffn)
    results = tokens * BF16 * (width / sampler.tensor_parallel + 3 * shape.hidden)
    return results + 2 * max_sequences(sampler) * shape.vocab * FP32
