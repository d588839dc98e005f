"""Folders as llm-compressor publishes them: made by the library that it saves with, and by its
presets.

llm-compressor itself chooses scales; here they are those of the largest values. What it then does
is this: the presets applied to a model of transformers, `ModelCompressor.compress_model`,
`save_pretrained`, `update_config`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from models import config_of, done, made, tensors_of, verdicts
from transformers import AutoModelForCausalLM

PUBLISHED = {  # preset -> the format that config.json then names
    "W8A16": "pack-quantized",
    "W4A16_ASYM": "pack-quantized",
    "W8A8": "int-quantized",
    "FP8_DYNAMIC": "float-quantized",
    "FP8_BLOCK": "float-quantized",
}
KEYS = {
    "config_groups",
    "format",
    "global_compression_ratio",
    "ignore",
    "kv_cache_scheme",
    "quant_method",
    "quantization_status",
    "sparsity_config",
    "transform_config",
    "version",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and columns that are whole groups of 128, and blocks that are not."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    about = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "max_position_embeddings": 64,
    }
    return made(
        tmp_path_factory.mktemp("plain") / "hf", config_of("qwen3", **sizes, **about), scale=0.03
    )


def scaled(weight_OI: torch.Tensor, scale: torch.Tensor, args: QuantizationArgs) -> Any:
    """Scales and zero points of the form that the library has laid out."""
    rows, columns = (
        -(-whole // parts) for whole, parts in zip(weight_OI.shape, scale.shape, strict=True)
    )
    pad = (0, -weight_OI.shape[1] % columns, 0, -weight_OI.shape[0] % rows)
    padded_OI = torch.nn.functional.pad(weight_OI, pad)
    parts = padded_OI.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return calculate_qparams(parts.amin((1, 3)), parts.amax((1, 3)), args)


def published(source: Path, target: Path, preset: str) -> dict[str, torch.Tensor]:
    """The plain tensors that the library itself reads out of the folder."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    group = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale, zero = scaled(
                module.weight.data, module.weight_scale, module.quantization_scheme.weights
            )
            module.weight_scale.data.copy_(scale)
            if not module.quantization_scheme.weights.symmetric:
                module.weight_zero_point.data.copy_(zero.round())
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(str(target))
    compressor.decompress_model(model)
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if name.endswith(".weight")
    }


@pytest.mark.parametrize("preset", PUBLISHED)
def test_what_its_own_library_reads(tmp_path: Path, plain: Path, preset: str) -> None:
    folder = tmp_path / "published"
    expected = published(plain, folder, preset)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert said.keys() == KEYS
    assert (said["format"], said["ignore"]) == (PUBLISHED[preset], ["lm_head"])
    done("inspect", folder)
    done("dequantize", folder, tmp_path / "plain")
    got = tensors_of(tmp_path / "plain")
    assert got.keys() == tensors_of(plain).keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor.bfloat16()), name
    done("import", tmp_path / "plain", tmp_path / "checkpoint")
    # zero points are rounded, which moves the largest values by more than half a step
    bound, verdict = (0.2, "within_the_bound") if preset.endswith("ASYM") else (0, "within_a_step")
    assert verdicts(tmp_path, plain, folder, "--bound", bound) == {
        "equal": len(got) - 14,
        verdict: 14,
    }
