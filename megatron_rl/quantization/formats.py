"""Weight formats (int8, int4 in INT8 tensors, fp8, fp8_block): the quantized layers, their tensors,
the supported machines, and vLLM's quantization_config. Torch-free.

Runs are (start, length) along the split dimension of a full tensor. O output features, I input
features of a weight.
"""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.schema import Device, Format, KvCache
from megatron_rl.models.mapping import HfSlice
from megatron_rl.models.tensors import Runs, TensorSpec

BLOCK = 128
# key of an update whose content differs between engines, by their formats
BY_FORMAT = "by_format"
INT8_MAX = 127.0
INT4_MAX = 7.0
FP8_MAX = 448.0  # the largest finite float8_e4m3fn
SCALE_DTYPE = "float32"
BLACKWELL = 10.0  # compute capability from which vLLM has no INT8 W8A8 kernel
FP8_CAPABILITY = 8.9


@dataclass(frozen=True)
class Quantized:
    """Representation of a quantized layer's weights in a format."""

    dtype: str
    largest: float  # largest magnitude of the dtype
    blocks: bool = False  # a scale for each 128x128 block; otherwise one for each output row

    @property
    def integer(self) -> bool:
        return self.dtype.startswith("int")


QUANTIZED = {
    Format.int8: Quantized("int8", INT8_MAX),
    Format.int4: Quantized("int8", INT4_MAX),
    Format.fp8: Quantized("float8_e4m3fn", FP8_MAX),
    Format.fp8_block: Quantized("float8_e4m3fn", FP8_MAX, blocks=True),
}

# the last module name of every linear layer that quantized engines hold quantized;
# w1, w2, w3 are Mixtral's experts. Routers ("gate"), norms and embeddings are in no format.
LINEAR_NAMES = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
    }
)
EXPERT_NAMES = frozenset({"w1", "w2", "w3"})
# the other linear layers, which vLLM needs as an ignore list: routers are too sensitive, and vLLM
# keeps a head in BF16
NEVER_QUANTIZED = ("lm_head", r"re:.*\.mlp\.gate$", r"re:.*\.block_sparse_moe\.gate$")


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """True if an entry of `ignore` matches this module, in full or as a `re:` pattern."""
    return any(
        re.match(entry[3:], module) if entry.startswith("re:") else entry == module
        for entry in ignore
    )


def is_quantized(hf_name: str, format: Format, ignore: Sequence[str] = ()) -> bool:
    """True if an engine of this format holds the parameter `hf_name` quantized."""
    if format == Format.none or not hf_name.endswith(".weight"):
        return False
    module = hf_name.removesuffix(".weight")
    last = module.rpartition(".")[2]
    linear = last in LINEAR_NAMES or (last in EXPERT_NAMES and ".experts." in module)
    return linear and not is_ignored(module, ignore)


def format_problem(format: Format, kind: Device, name: str, capability: float | None) -> str | None:
    """Reason that a machine cannot run a weight format, or None. `capability`: CUDA's."""
    integer = format in QUANTIZED and QUANTIZED[format].integer
    if integer and capability is not None and capability >= BLACKWELL:
        return f"INT8 W8A8 has no kernel on {name} (compute capability {capability}); use fp8"
    if integer and kind == Device.cpu and platform.machine() not in ("x86_64", "AMD64"):
        return f"INT8 W8A8 is only known to run on x86-64 CPUs, this is {name}; use none or fp8"
    if format == Format.fp8_block and kind == Device.cpu:
        return "128x128 FP8 blocks have no CPU kernel; use fp8 (per output channel)"
    if (
        format in (Format.fp8, Format.fp8_block)
        and capability is not None
        and capability < FP8_CAPABILITY
    ):
        return f"FP8 W8A8 needs compute capability {FP8_CAPABILITY}, {name} has {capability}"
    return None


def quantization_config(
    format: Format, ignore: Sequence[str], kv_cache: KvCache = KvCache.none
) -> dict[str, Any] | None:
    """Entry of config.json: W8A8, weights per output channel, activations per token.

    fp8_block: per 128x128 block, and per 128 inputs of a token. Without a weight format: that of an
    FP8 cache alone, or None.
    """
    cache = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    cached = {} if kv_cache == KvCache.none else {"kv_cache_scheme": cache}
    about = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
    }
    if format == Format.none:
        if cached:
            return {**about, "ignore": [], "config_groups": {}, **cached}
        return None
    kind = "int" if QUANTIZED[format].integer else "float"
    weights: dict[str, Any] = {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    activations: dict[str, Any] = {**weights, "strategy": "token", "dynamic": True}
    if QUANTIZED[format].blocks:
        weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
        activations |= {"strategy": "group", "group_size": BLOCK}
    linear = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    about["format"] = f"{kind}-quantized"
    return {
        **about,
        "ignore": sorted({*ignore, *NEVER_QUANTIZED}),
        "config_groups": {"group_0": linear},
        **cached,
    }


@dataclass(frozen=True)
class Output:
    """Tensor that the sampler receives, and this rank's part of it."""

    tensor: TensorSpec
    dim: int | None  # None: every rank of the group holds all of it
    runs: Runs

    @property
    def part(self) -> TensorSpec:
        if self.dim is None:
            return self.tensor
        length = sum(length for _, length in self.runs)
        shape = self.tensor.shape
        return TensorSpec(
            self.tensor.name,
            self.tensor.dtype,
            (*shape[: self.dim], length, *shape[self.dim + 1 :]),
        )


def outputs(
    piece: HfSlice, format: Format, ignore: Sequence[str], dtype: str, split: bool
) -> list[Output]:
    """Return the tensors that a rank's part of a Hugging Face tensor becomes; `split`: it is
    sharded over the group.
    """
    runs = _runs(piece)
    dim = piece.dim if split else None
    if not is_quantized(piece.name, format, ignore):
        return [Output(TensorSpec(piece.name, dtype, piece.shape), dim, runs)]
    kind = QUANTIZED[format]
    weight = Output(TensorSpec(piece.name, kind.dtype, piece.shape), dim, runs)
    rows, columns = piece.shape
    scale = TensorSpec(scale_name(piece.name), SCALE_DTYPE, scale_shape(rows, columns, kind.blocks))
    if kind.blocks:
        return [weight, Output(scale, dim, _block_runs(piece, runs))]
    # one scale per output row: shards of the input dimension share it
    return [weight, Output(scale, None if dim == 1 else dim, runs)]


def scale_shape(rows: int, columns: int, blocks: bool) -> tuple[int, int]:
    if blocks:
        return (-(-rows // BLOCK), -(-columns // BLOCK))
    return (rows, 1)


def scale_name(weight: str) -> str:
    return weight.removesuffix("weight") + "weight_scale"


def _runs(piece: HfSlice) -> Runs:
    merged: list[tuple[int, int]] = []
    for span in piece.spans:
        if merged and sum(merged[-1]) == span.full:
            merged[-1] = (merged[-1][0], merged[-1][1] + span.length)
        else:
            merged.append((span.full, span.length))
    return tuple(merged)


def _block_runs(piece: HfSlice, runs: Runs) -> Runs:
    total = piece.shape[piece.dim]
    for start, length in runs:
        if start % BLOCK or (length % BLOCK and start + length != total):
            raise ValueError(
                f"{piece.name}: a tensor-parallel share covers {length} of {total} from {start} "
                f"on, which cuts a {BLOCK}x{BLOCK} block"
            )
    return tuple((start // BLOCK, -(-length // BLOCK)) for start, length in runs)
