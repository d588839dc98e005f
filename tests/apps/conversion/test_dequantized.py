"""Folders quantized by other tools, dequantized: equal to those tools' own reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor as Naive
from compressed_tensors.compressors import NVFP4PackedCompressor as Nvfp4
from compressed_tensors.compressors import PackedQuantizationCompressor as Packed
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from models import config_of, done, fails, made, tensors_of
from safetensors.torch import save_file

from megatron_rl.apps.conversion.sources import find
from megatron_rl.quantization.formats import FP8_MAX

ROWS = 192
COLUMNS = 320
WEIGHT = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
INT8 = torch.ones(4, 4, dtype=torch.int8)


def scaled(args: QuantizationArgs, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    if args.type == "int":
        largest = 2 ** (args.num_bits - 1) - 1
    else:
        largest = FP8_MAX if args.num_bits == 8 else 6.0
    scale = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(2))
    return {"weight": WEIGHT, "weight_scale": scale * WEIGHT.abs().max() / largest}


def case(
    compressor: Any, bits: int, kind: str, strategy: str, shape: tuple[int, ...], **more: Any
) -> Any:
    return compressor, QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, **more), shape


CASES = {
    "int8 channel": case(Naive, 8, "int", "channel", (ROWS, 1)),
    "int8 tensor": case(Naive, 8, "int", "tensor", (1,)),
    "fp8 channel": case(Naive, 8, "float", "channel", (ROWS, 1)),
    "fp8 tensor": case(Naive, 8, "float", "tensor", (1,)),
    "fp8 block": case(
        Naive,
        8,
        "float",
        "block",
        (3, 5),
        block_structure=[64, 64],
    ),
    "int8 asymmetric": case(Naive, 8, "int", "channel", (ROWS, 1), symmetric=False),
    "int4 group": case(
        Packed,
        4,
        "int",
        "group",
        (ROWS, COLUMNS // 64),
        group_size=64,
    ),
    "int4 asymmetric": case(
        Packed, 4, "int", "group", (ROWS, COLUMNS // 64), group_size=64, symmetric=False
    ),
    "int8 packed": case(Packed, 8, "int", "channel", (ROWS, 1)),
    "nvfp4": case(
        Nvfp4,
        4,
        "float",
        "tensor_group",
        (ROWS, COLUMNS // 16),
        group_size=16,
    ),
}


def folder_of(path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Path:
    path.mkdir()
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": "other", "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", CASES)
def test_as_compressed_tensors_reads_it(tmp_path: Path, name: str) -> None:
    """compressed-tensors is the library that llm-compressor writes its folders with."""
    compressor, args, shape = CASES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    given = scaled(args, shape)
    if not args.symmetric:
        half = 2 ** (args.num_bits - 1)
        random = torch.Generator().manual_seed(3)
        points = torch.randint(
            -half,
            half - 1,
            shape,
            generator=random,
            dtype=torch.int8,
        )
        given["weight_zero_point"] = points
    if name == "nvfp4":
        given["weight_global_scale"] = torch.tensor([37.0])
        given["weight_scale"] = given["weight_scale"] * 37.0
    with torch.compiler.set_stance("force_eager"):  # else FP4 waits for a compiler
        stored = compressor.compress(given, scheme)
        expected = compressor.decompress(stored, scheme)["weight"]
    layer = "model.layers.0.self_attn"
    tensors = {
        f"{layer}.q_proj.{part}": tensor for part, tensor in stored.items() if tensor is not None
    }
    rest = {"model.norm.weight": torch.ones(4), f"{layer}.q_proj.bias": torch.ones(3)}
    more = {f"{layer}.k_scale": torch.ones(1), f"{layer}.q_proj.input_scale": torch.ones(1)}
    groups = {"group_0": {"weights": json.loads(args.model_dump_json())}}
    about = {"quant_method": "compressed-tensors", "config_groups": groups}
    folder = folder_of(tmp_path / "quantized", tensors | rest | more, about)
    done("dequantize", folder, tmp_path / "plain")
    got = tensors_of(tmp_path / "plain")
    assert got.keys() == {*rest, f"{layer}.q_proj.weight"}
    assert torch.equal(got[f"{layer}.q_proj.weight"], expected.bfloat16())
    assert all(torch.equal(got[key], tensor) for key, tensor in rest.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_blocks_as_deepseek_stores_them(tmp_path: Path) -> None:
    blocks = torch.rand(2, 3) + 0.5
    quantized = WEIGHT.to(torch.float8_e4m3fn)
    full = blocks.repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)[:, :COLUMNS]
    tensors = {
        "a.weight": quantized,
        "a.weight_scale_inv": blocks,
        "b.weight": torch.ones(2, 2).bfloat16(),
    }
    folder = folder_of(
        tmp_path / "fp8", tensors, {"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    done("dequantize", folder, tmp_path / "plain")
    got = tensors_of(tmp_path / "plain")
    assert torch.equal(got["a.weight"], (quantized.float() * full).bfloat16())
    assert got.keys() == {"a.weight", "b.weight"}


@pytest.mark.fault(
    "a quantized folder lacks a scale, or is of a form that is not read",
    "dequantize names the tensor",
)
@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a.weight": INT8}, "no a.weight_scale"),
        ({"a.weight_scale": torch.ones(2, 1)}, "a.weight_scale belongs"),
        ({"a.weight_packed": INT8.to(torch.uint8)}, "no a.weight_scale"),
        ({"a.weight_g_idx": INT8[0].int()}, "a.weight_g_idx: columns"),
        ({"a.weight": INT8[0], "a.weight_scale": torch.ones(1)}, "no matrix"),
        (
            {"a.weight": INT8.to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(3, 5)},
            "a.weight_scale is [3, 5]",
        ),
    ],
)
def test_what_cannot_be_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tensors: dict[str, torch.Tensor], said: str
) -> None:
    folder = folder_of(tmp_path / "hf", tensors, {"quant_method": "compressed-tensors"})
    assert said in fails(capsys, "dequantize", folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    plain = made(tmp_path / "plain", config_of("llama"))
    assert find(str(plain)).quantization is None
    assert "holds plain weights" in fails(capsys, "dequantize", plain, tmp_path / "out")
