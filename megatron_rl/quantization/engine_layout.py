"""A weight format as vLLM is told of it: the `quantization_config` (compressed-tensors) of the engine's config.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_rl.config.schema import Format, KvCache
from megatron_rl.quantization.formats import BLOCK, QUANTIZED, all_ignored

_CACHE = {
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
}
_CACHE_ONLY = {
    "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed",
    "ignore": [], "config_groups": {},
}  # fmt: skip


def quantization_config(
    format: Format, ignore: Sequence[str], kv_cache: KvCache = KvCache.none
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json: W8A8, weights per output channel, activations per token."""
    if format == Format.none:
        return None if kv_cache == KvCache.none else {**_CACHE_ONLY, **_CACHE}
    kind = "int" if QUANTIZED[format].integer else "float"
    weights: dict[str, Any] = {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False
    }  # fmt: skip
    activations: dict[str, Any] = {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True
    }  # fmt: skip
    if QUANTIZED[format].blocks:
        weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
        activations |= {"strategy": "group", "group_size": BLOCK}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": all_ignored(ignore),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        **({} if kv_cache == KvCache.none else _CACHE),
    }
