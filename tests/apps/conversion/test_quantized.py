"""A quantized folder equals the tensors of a sync, bit for bit, for any form of its source."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ALL, config_of, done, fails, made, tensors_of, verdicts
from simulated import assert_same_bits

from megatron_rl.apps.evaluation import stored_model
from megatron_rl.apps.evaluation.stored_model import StoredWeights
from megatron_rl.config.schema import Format
from megatron_rl.quantization.formats import quantization_config
from megatron_rl.weight_sync.source import ShardSource

IGNORE = ("lm_head", "re:.*layers.1.mlp.down_proj")


def sent(folder: Path, format: Format, ignore: tuple[str, ...]) -> dict[str, Any]:
    """Tensors of a sync to an engine of this format."""
    weights = StoredWeights(stored_model.find(folder, None, None))
    source = ShardSource(weights.model, weights.groups, format, ignore)
    tensors = dict(source.tensors(dict(weights.named_parameters())))
    assert source.failure is None
    return tensors


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *((family, "int8") for family in ALL),
        *zip(ALL, itertools.cycle(["fp8", "fp8_block"]), strict=False),
    ],
)
def test_the_bytes_of_a_sync(tmp_path: Path, family: str, format: str) -> None:
    """And the way back: a quantized folder becomes one that can be trained again."""
    tied = (ALL.index(family) + len(format)) % 2 == 0
    source = made(tmp_path / "hf", config_of(family, tie_word_embeddings=tied), file_bytes=40_000)
    words = [word for pattern in IGNORE for word in ("--ignore", pattern)]
    done("quantize", source, tmp_path / "out", "--format", format, *words)
    assert_same_bits(
        list(tensors_of(tmp_path / "out").items()), sent(source, Format(format), IGNORE)
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == quantization_config(Format(format), IGNORE)
    done("import", source, tmp_path / "checkpoint")
    done(
        "quantize", tmp_path / "checkpoint", tmp_path / "of_checkpoint", "--format", format, *words
    )
    one, other = (
        json.loads((tmp_path / n / "parity.json").read_text()) for n in ("out", "of_checkpoint")
    )
    assert one["output"] == other["output"]
    verdicts(tmp_path, source, tmp_path / "out")
    done("dequantize", tmp_path / "out", tmp_path / "plain")
    done("import", tmp_path / "plain", tmp_path / "of_plain")
    shapes = [
        {name: tensor.shape for name, tensor in tensors_of(tmp_path / n).items()}
        for n in ("hf", "plain")
    ]
    assert shapes[0] == shapes[1]
    verdicts(tmp_path, tmp_path / "plain", tmp_path / "out")


def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made(tmp_path / "hf", config_of("llama"))
    for words, key in (
        (["--format", "modelopt_fp8"], "--calibrate"),
        (["--format", "int8", "--calibrate", "x"], "--calibrate"),
        (["--format", "as_sampler"], "as_sampler"),
        (["--format", "as_sampler", "--ignore", "x"], "--ignore"),
        (["--format", "int8", "--ignore", "re:("], "--ignore"),
    ):
        assert key in fails(capsys, "quantize", source, tmp_path / "x", *words)


@pytest.mark.fault(
    "weights that are quantized already, or hold NaN", "quantize names the folder or the tensor"
)
def test_what_is_not_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = made(tmp_path / "hf", config_of("llama"))
    done("quantize", source, tmp_path / "int8", "--format", "int8")
    for command, *options in (["import"], ["export"], ["quantize", "--format", "fp8"]):
        assert f"dequantize {tmp_path / 'int8'}" in fails(
            capsys, command, tmp_path / "int8", tmp_path / "x", *options
        )
    weights = source / "model.safetensors"
    stored = tensors_of(source)["model.layers.1.mlp.up_proj.weight"]
    numbers = stored.view(torch.uint8).numpy().tobytes()[:64]
    weights.write_bytes(weights.read_bytes().replace(numbers, b"\xff" * 64))
    said = fails(capsys, "quantize", source, tmp_path / "x", "--format", "int8")
    assert "model.layers.1.mlp.up_proj.weight: " in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "int8"]
