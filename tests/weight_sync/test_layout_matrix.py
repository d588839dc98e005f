"""For every learner layout, the sampler receives the quantized original tensors bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from simulated import (
    assert_same_bits,
    hf_config,
    quantized_whole,
    random_hf,
    run_sources,
)

from megatron_rl.config.schema import Format
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups
from megatron_rl.weight_sync.source import ShardSource

PIPELINES = {
    "pp1": {},
    "pp2": {"pp": 2},
    "pp2_uneven": {"pp": 2, "first_layers": 1},
    "pp2_interleaved": {"pp": 2, "vp": 2},
}
FORMATS = [format for format in Format if format is not Format.int4]  # which is laid out as int8
VOCABULARIES = [101, 5, 103]  # odd; of 5 rows the last of four ranks holds none
IGNORE = ("lm_head",)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A team of threads costs more than tensors of this size, many times more where cores are
    busy.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# shares of up to four ranks that begin and end with a 128-block
BLOCKS = {"num_attention_heads": 4, "head_dim": 128, "hidden_size": 16, "intermediate_size": 512}


def config_of(family: str, format: Format, **changes: Any) -> dict[str, Any]:
    config = hf_config(family, **(BLOCKS if format is Format.fp8_block else {}))
    if "num_experts" in config and format is Format.fp8_block:
        config["moe_intermediate_size"] = 512
    return config | changes


def check(
    config: dict[str, Any], layout: Layout, format: Format, dtype: torch.dtype = torch.bfloat16
) -> None:
    shape = ModelShape.from_hf(config)
    hf = random_hf(shape, dtype)
    sources, yielded = run_sources(hf, shape, layout, format, ignore=IGNORE, bucket_bytes=40_000)
    assert [source.failure for source in sources] == [None] * layout.world
    assert_same_bits(
        [pair for of_rank in yielded for pair in of_rank], quantized_whole(hf, format, IGNORE)
    )
    for source, tensors in zip(sources, yielded, strict=True):
        assert source.writes or not tensors
        assert source.nbytes == sum(tensor.nbytes for _, tensor in tensors)


DENSE = ["llama", "qwen2", "qwen3", "ernie4_5", "phi3"]
DEGREES = [(1,), (2,), (4,)]  # tp, ep and etp
EXPERT_DEGREES = [
    (1, 1),
    (1, 2),
    (2, 1),
    (2, 2, 1),
    (2, 2, 2),
    (4, 2, 1),
    (4, 1),
    (4, 2, 2),
]


def matrix(families: list[str], layouts: list[tuple[int, ...]]) -> Iterator[tuple[Any, ...]]:
    """Every format without a pipeline, and of dense families with each; else the formats in turn:
    a stage does not know how its neighbours are cut.

    Ties and vocabularies go round with the others, so that every pair of values occurs.
    """
    for i, degrees in enumerate(layouts):
        for j, pipeline in enumerate(PIPELINES):
            for k, family in enumerate(families):
                for n, format in enumerate(FORMATS):
                    if families is DENSE or pipeline == "pp1" or n == (i + j) % 4:
                        tied = (i + j + k + n) % 2 == 0
                        vocabulary = VOCABULARIES[(i + k + 2 * n) % 3]
                        yield family, degrees, pipeline, format, tied, vocabulary


@pytest.mark.parametrize(
    ("family", "degrees", "pipeline", "format", "tied", "vocabulary"),
    [*matrix(DENSE, DEGREES), *matrix(["qwen3_moe", "mixtral"], EXPERT_DEGREES)],
    ids=str,
)
def test_every_layout(
    family: str,
    degrees: tuple[int, ...],
    pipeline: str,
    format: Format,
    tied: bool,
    vocabulary: int,
) -> None:
    layout = Layout(**dict(zip(("tp", "ep", "etp"), degrees, strict=False)), **PIPELINES[pipeline])
    # a stage must have room for every expert-parallel rank
    layout = replace(layout, dp=max(1, layout.ep * layout.expert_tp // layout.tp))
    changes = {"mlp_only_layers": [1]} if family == "qwen3_moe" else {}
    changes |= {"tie_word_embeddings": tied, "vocab_size": vocabulary}
    check(config_of(family, format, **changes), layout, format)


# the matrix keeps rows short, because rounding to FP8 is slow on hosts: here the last block is cut
LONG_ROWS = config_of(
    "qwen3_moe", Format.fp8_block, num_hidden_layers=1, hidden_size=192, num_experts=2
)
FEW_GROUPS = hf_config("qwen2", num_key_value_heads=2)
BIASES = hf_config("llama", attention_bias=True, mlp_bias=True)
MORE = {
    "rows of several blocks": (
        LONG_ROWS,
        Layout(tp=4, ep=2, etp=4, dp=2),
        Format.fp8_block,
    ),
    "more ranks than query groups": (FEW_GROUPS, Layout(tp=4), Format.none),
    "more ranks than query groups, INT8": (FEW_GROUPS, Layout(tp=4), Format.int8),
    "biases everywhere": (BIASES, Layout(tp=2, pp=2), Format.int8),
}


@pytest.mark.parametrize("case", MORE)
def test_odd_models(case: str) -> None:
    check(*MORE[case])


def test_blocks_that_straddle_a_shard_are_refused() -> None:
    shape = ModelShape.from_hf(
        hf_config("llama", head_dim=128, hidden_size=256, intermediate_size=128)
    )
    with pytest.raises(ValueError, match=r"gate_proj.* 64 of 128"):
        run_sources(random_hf(shape), shape, Layout(tp=2), Format.fp8_block)


@pytest.mark.parametrize("format", [Format.none, Format.int8, Format.fp8])
def test_replicas_and_fp32_learners(format: Format) -> None:
    check(hf_config("qwen3"), Layout(tp=2, dp=2), format, torch.float32)


def test_a_diverged_shard_is_named_and_does_not_hang() -> None:
    shape = ModelShape.from_hf(hf_config("llama"))
    hf = random_hf(shape)
    name = "model.layers.1.mlp.down_proj.weight"
    hf[name][3, -1] = float("nan")  # on the last rank alone
    sources, _ = run_sources(hf, shape, Layout(tp=2), Format.int8)
    assert sources[0].failure is None
    assert name in sources[1].failure


def test_a_bucket_is_closed_when_it_is_full() -> None:
    source = ShardSource(
        Model.of(hf_config("llama"), Layout()), ShardGroups(), Format.int8, bucket_bytes=40_000
    )
    *full, last = [sum(spec.nbytes for spec in specs or ()) for specs in source.bucket_tensors]
    assert len(full) > 2
    assert all(40_000 <= nbytes < 80_000 for nbytes in full)
    assert 0 < last < 80_000
