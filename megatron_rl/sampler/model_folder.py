"""The engine's view of the model: a folder with a quantized layout.

The engine never reads weights from disk: it starts from dummy weights in the layout that
`quantization_config` (compressed-tensors) describes, and the first sync fills them.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.config.schema import QuantizationSection
from megatron_rl.models.model import read_hf_config
from megatron_rl.quantization.formats import quantization_config
from megatron_rl.sampler.protocol import SamplerError


def write_engine_folder(hf_folder: Path, target: Path, quantization: QuantizationSection) -> Path:
    """Write config.json with the quantized layout; token ids go in and out, so the tokenizer stays behind."""
    model = read_hf_config(hf_folder)
    if "quantization_config" in model:
        raise ValueError(
            f"model.path={hf_folder} is already quantized; give the BF16 model and set quantization.format"
        )
    layout = quantization_config(quantization.format, quantization.ignore, quantization.kv_cache)
    if layout is not None:
        model["quantization_config"] = layout
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(model, indent=1))
    except OSError as error:
        raise SamplerError(
            f"the engine's folder {target} cannot be written: {error}. Free space in the temporary folder, or set "
            "TMPDIR to another one"
        ) from error
    return target
