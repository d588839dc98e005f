"""Whatever the learner's layout, the sampler receives what quantizing the original tensors would give, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from simulated import assert_same_bits, hf_config, quantized_whole, random_hf, run_sources

from megatron_rl.schema import Format
from megatron_rl.weight_sync.layout import Layout
from megatron_rl.weight_sync.model_shape import ModelShape

PIPELINES = {
    "pp1": {},
    "pp2": {"pp": 2},
    "pp2_uneven": {"pp": 2, "first_layers": 1},
    "pp2_interleaved": {"pp": 2, "vp": 2},
}
IGNORE = ("lm_head",)


def check(config: dict, layout: Layout, format: Format, dtype: torch.dtype = torch.bfloat16) -> None:
    shape = ModelShape.from_hf(config)
    hf = random_hf(shape, dtype)
    sources, yielded = run_sources(hf, shape, layout, format, ignore=IGNORE, bucket_bytes=40_000)
    assert [source.failure for source in sources] == [None] * layout.world
    assert_same_bits([pair for of_rank in yielded for pair in of_rank], quantized_whole(hf, format, IGNORE))
    for source, tensors in zip(sources, yielded, strict=True):
        assert source.writes or not tensors
        assert source.nbytes == sum(tensor.nbytes for _, tensor in tensors)


@pytest.mark.parametrize("format", [Format.none, Format.int8, Format.fp8])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_dense(family: str, tp: int, pipeline: str, format: Format) -> None:
    check(hf_config(family, tie_word_embeddings=tp != 2), Layout(tp=tp, **PIPELINES[pipeline]), format)


FORMATS = [Format.none, Format.int8, Format.fp8]
EXPERT_LAYOUTS = [(1, 2, None), (2, 1, None), (2, 2, 1), (2, 2, 2), (4, 2, 1), (4, 1, None), (4, 2, 2)]
# every format without a pipeline, then the formats in turn: a stage does not know how its neighbours are cut
EXPERT_CASES = [
    (*layout, pipeline, format)
    for i, layout in enumerate(EXPERT_LAYOUTS)
    for j, pipeline in enumerate(PIPELINES)
    for format in (FORMATS if pipeline == "pp1" else [FORMATS[(i + j) % 3]])
]


@pytest.mark.parametrize(("tp", "ep", "etp", "pipeline", "format"), EXPERT_CASES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_mixture(family: str, tp: int, ep: int, etp: int | None, pipeline: str, format: Format) -> None:
    # a stage must have room for every expert-parallel rank
    dp = max(1, ep * (tp if etp is None else etp) // tp)
    changes = {"mlp_only_layers": [1]} if family == "qwen3_moe" else {}
    check(hf_config(family, **changes), Layout(tp=tp, ep=ep, etp=etp, dp=dp, **PIPELINES[pipeline]), format)


@pytest.mark.parametrize(("tp", "ep"), list(itertools.product([1, 2, 4], [1, 2])))
def test_blocks(tp: int, ep: int) -> None:
    config = hf_config(
        "qwen3_moe",
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
        hidden_size=192,  # the last block of a row is cut short
        intermediate_size=512,
        moe_intermediate_size=512,
        num_experts=2,
    )
    check(config, Layout(tp=tp, ep=ep, etp=tp, dp=ep), Format.fp8_block)


def test_blocks_that_straddle_a_shard_are_refused() -> None:
    shape = ModelShape.from_hf(hf_config("llama", head_dim=128, hidden_size=256, intermediate_size=128))
    with pytest.raises(ValueError, match=r"gate_proj.*covers 64 of 128.*cuts a 128x128 block"):
        run_sources(random_hf(shape), shape, Layout(tp=2), Format.fp8_block)


@pytest.mark.parametrize("format", [Format.none, Format.int8])
def test_more_ranks_than_query_groups(format: Format) -> None:
    check(hf_config("qwen2", num_key_value_heads=2), Layout(tp=4), format)


@pytest.mark.parametrize("format", [Format.none, Format.int8, Format.fp8])
def test_replicas_and_fp32_learners(format: Format) -> None:
    check(hf_config("qwen3"), Layout(tp=2, dp=2), format, torch.float32)


def test_biases_everywhere() -> None:
    check(hf_config("llama", attention_bias=True, mlp_bias=True), Layout(tp=2, pp=2), Format.int8)


def test_a_diverged_shard_is_named_and_does_not_hang() -> None:
    shape = ModelShape.from_hf(hf_config("llama"))
    hf = random_hf(shape)
    name = "model.layers.1.mlp.down_proj.weight"
    hf[name][3, -1] = float("nan")  # on the last rank alone
    sources, _ = run_sources(hf, shape, Layout(tp=2), Format.int8)
    assert sources[0].failure is None
    assert sources[1].failure is not None
    assert name in sources[1].failure
