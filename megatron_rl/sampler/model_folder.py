"""The engine's view of the model: a folder with a quantized layout.

The engine never reads weights from disk: it starts from dummy weights in the layout that
`quantization_config` (compressed-tensors) describes, and the first sync fills them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Format, KvCache, QuantizationSection
from megatron_rl.quantization.quantize import BLOCK

# never quantized, whatever the recipe ignores: routers decide too much, and vLLM keeps a head in BF16
ALWAYS_IGNORED = ("lm_head", r"re:.*\.mlp\.gate$", r"re:.*\.block_sparse_moe\.gate$")

_CACHE = {
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
}
_CACHE_ONLY = {
    "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed",
    "ignore": [], "config_groups": {},
}  # fmt: skip


def quantization_config(format: Format, ignore: list[str], kv_cache: KvCache = KvCache.none) -> dict[str, Any] | None:
    """The `quantization_config` of config.json: W8A8, weights per output channel, activations per token."""
    if format == Format.none:
        return None if kv_cache == KvCache.none else {**_CACHE_ONLY, **_CACHE}
    kind = "int" if format == Format.int8 else "float"
    weights: dict[str, Any] = {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False
    }  # fmt: skip
    activations: dict[str, Any] = {
        "num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True
    }  # fmt: skip
    if format == Format.fp8_block:
        weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
        activations |= {"strategy": "group", "group_size": BLOCK}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": sorted({*ignore, *ALWAYS_IGNORED}),
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


def write_engine_folder(hf_folder: Path, target: Path, quantization: QuantizationSection) -> Path:
    """Write config.json with the quantized layout; token ids go in and out, so the tokenizer stays behind."""
    source = hf_folder / "config.json"
    if not source.is_file():
        raise FileNotFoundError(f"model.path={hf_folder} has no config.json: give a Hugging Face model folder")
    model: dict[str, Any] = json.loads(source.read_text())
    if "quantization_config" in model:
        raise ValueError(
            f"model.path={hf_folder} is already quantized; give the BF16 model and set quantization.format"
        )
    layout = quantization_config(quantization.format, quantization.ignore, quantization.kv_cache)
    if layout is not None:
        model["quantization_config"] = layout
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(model, indent=1))
    return target
