"""Quantizers: the grid, determinism across shards, and which parameters they apply to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import assert_same_bits, hf_config

from megatron_rl.config.schema import Format
from megatron_rl.models.mapping import params
from megatron_rl.models.shape import FAMILIES, ModelShape
from megatron_rl.quantization.formats import BLOCK, is_ignored, is_quantized, quantization_config
from megatron_rl.quantization.quantize import (
    dequantize,
    quantize,
    row_amax,
)

CHANNEL_FORMATS = [Format.int8, Format.fp8]


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-4, 1, rows).unsqueeze(1)
    return (torch.randn(rows, columns, generator=generator) * spread).bfloat16()


@pytest.mark.parametrize("format", CHANNEL_FORMATS)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(2, 40),
    shards=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_shards_hold_the_bytes_of_the_whole(format, rows, columns, shards, seed):
    weight_OI = random_weight(rows, columns, seed)
    whole = quantize(weight_OI, format)
    parts = weight_OI.tensor_split(min(shards, columns), dim=1)
    amax_O = torch.stack([row_amax(part) for part in parts]).amax(0)
    row_parallel = [quantize(part, format, amax_O) for part in parts]
    for part in row_parallel:
        assert torch.equal(part["weight_scale"], whole["weight_scale"])
    joined = torch.cat([part["weight"] for part in row_parallel], dim=1)
    assert_same_bits([("weight", joined)], {"weight": whole["weight"]})
    column_parallel = [
        quantize(part, format) for part in weight_OI.tensor_split(min(shards, rows), dim=0)
    ]
    joined = [(suffix, torch.cat([part[suffix] for part in column_parallel])) for suffix in whole]
    assert_same_bits(joined, whole)


def test_blocks_of_a_shard_are_blocks_of_the_whole_and_scaled_by_what_they_hold():
    weight_OI = random_weight(3 * BLOCK, 4 * BLOCK)
    whole, half = (
        quantize(weight, Format.fp8_block) for weight in (weight_OI, weight_OI[:, 2 * BLOCK :])
    )
    assert whole["weight_scale"].shape == (3, 4)
    right = {
        "weight": whole["weight"][:, 2 * BLOCK :],
        "weight_scale": whole["weight_scale"][:, 2:],
    }
    assert_same_bits(list(half.items()), right)
    ragged = quantize(weight_OI[: BLOCK + 3, : BLOCK + 5], Format.fp8_block)
    assert ragged["weight"].shape == (BLOCK + 3, BLOCK + 5)
    assert ragged["weight_scale"].shape == (2, 2)
    corner = weight_OI[BLOCK : BLOCK + 3, BLOCK : BLOCK + 5].float().abs().max() / 448
    assert torch.equal(ragged["weight_scale"][1, 1], corner)


@pytest.mark.parametrize(
    ("format", "largest", "half_steps"),
    [(Format.int8, 127, 0.5), (Format.fp8, 448, 16.0)],
    ids=["int8", "fp8"],
)
def test_error_is_within_half_a_step_and_the_amax_is_exact(format, largest, half_steps):
    weight_OI = random_weight(16, 256)
    quantized = quantize(weight_OI, format)
    scale_O1 = quantized["weight_scale"]
    torch.testing.assert_close(scale_O1[:, 0] * largest, row_amax(weight_OI))
    assert quantized["weight"].float().abs().amax(1).eq(largest).all()
    error_OI = (dequantize(quantized["weight"], scale_O1) - weight_OI.float()).abs()
    assert (error_OI <= scale_O1 * (half_steps + 1e-3)).all()


@pytest.mark.parametrize("format", [*CHANNEL_FORMATS, Format.fp8_block])
def test_zero_rows_stay_zero_and_non_finite_weights_are_refused(format):
    weight_OI = random_weight(4, 8)
    weight_OI[1] = 0
    quantized = quantize(weight_OI, format)
    assert not dequantize(quantized["weight"], quantized["weight_scale"])[1].any()
    weight_OI[2, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight_OI, format)


def test_int4_values_lie_in_the_place_of_int8():
    weight_OI = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    made = quantize(weight_OI, Format.int4)
    assert made["weight"].dtype == torch.int8
    assert made["weight"].unique().tolist() == list(range(-7, 8))
    # torch's own quantizer, with the same scales
    theirs = torch.fake_quantize_per_channel_affine(
        weight_OI, made["weight_scale"].flatten(), torch.zeros(64, dtype=torch.int32), 0, -7, 7
    )
    assert torch.equal(dequantize(made["weight"], made["weight_scale"]), theirs)
    assert quantization_config(Format.int4, []) == quantization_config(Format.int8, [])


def test_which_parameters_are_quantized():
    layer = "model.layers.3."
    held = (
        "self_attn.q_proj",
        "mlp.down_proj",
        "mlp.experts.7.gate_proj",
        "block_sparse_moe.experts.7.w2",
    )
    whole = (
        "mlp.gate.weight",
        "self_attn.q_proj.bias",
        "self_attn.q_norm.weight",
        "input_layernorm.weight",
    )
    for name in (f"{layer}{module}.weight" for module in held):
        assert is_quantized(name, Format.int8, ["lm_head"]), name
        assert not is_quantized(name, Format.int8, [r"re:.*layers\.3\."]), name
    for name in (*(layer + name for name in whole), "model.embed_tokens.weight", "lm_head.weight"):
        assert not is_quantized(name, Format.int8, ["lm_head"]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_config_lists_the_layers_that_the_sender_quantizes(family):
    """vLLM quantizes every linear layer that is not ignored: a matrix is one or the other."""
    ignored = quantization_config(Format.int8, ["re:.*o_proj"])["ignore"]
    for param in params(ModelShape.from_hf(hf_config(family))):
        for name, shape in param.sizes.items():
            if len(shape) == 2 and "embed_tokens" not in name:
                module = name.removesuffix(".weight")
                assert is_quantized(name, Format.int8, ["re:.*o_proj"]) is not is_ignored(
                    module, ignored
                ), name
