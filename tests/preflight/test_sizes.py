"""Every invalid pair of sizes is found, with a way out."""

from __future__ import annotations

import pytest
from simulated import hf_config

from megatron_rl.config.schema import Format, QuantizationSection, SamplerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.preflight.sizes import problems, size_problems


def test_every_problem_at_once_with_the_nearest_values() -> None:
    found = size_problems(
        Model.of(hf_config("qwen3_moe", moe_intermediate_size=64), Layout(tp=3, pp=3, ep=3, dp=3)),
        SamplerSection(tensor_parallel=5),
        QuantizationSection(format=Format.int8),
    )
    for key, size, nearest in (
        ("learner.tensor_parallel=3 ", "8 attention heads", "2 or 4"),
        ("learner.tensor_parallel=3 ", "4 key-value heads", "2 or 4"),
        ("learner.tensor_parallel=3 ", "experts' width 64", "2 or 4"),
        ("sampler.tensor_parallel=5 ", "8 attention heads", "4 or 8"),
        ("learner.expert_parallel=3 ", "4 experts", "2 or 4"),
        ("learner.pipeline_parallel=3 ", "4 layers", "2 or 4"),
    ):
        assert any(
            line.startswith(key) and size in line and line.endswith(f" {nearest})")
            for line in found
        ), found


def test_blocks_that_straddle_shards() -> None:
    def found(head_dim: int, tp: int, sampler: int, format: Format = Format.fp8_block) -> list[str]:
        hf = hf_config("llama", head_dim=head_dim, hidden_size=256, intermediate_size=512)
        return problems(Model.of(hf, Layout(tp=tp)), sampler, format)

    assert found(128, 4, 4) == found(64, 4, 4, Format.fp8) == []
    assert found(64, 4, 1) == [
        f"learner.tensor_parallel=4 cuts 128x128 blocks of {name}: 256 / 4 is not a multiple of "
        "128 (nearest valid: 2)"
        for name in ("k_proj", "v_proj")
    ]
    assert found(64, 2, 4)[0].startswith("sampler.tensor_parallel=4 cuts")


@pytest.mark.parametrize(
    ("family", "layout", "message"),
    [
        (
            "llama",
            Layout(pp=2, vp=4),
            "virtual_pipeline_model_parallel_size=4 does not divide the 2 layers of a pipel",
        ),
        ("llama", Layout(pp=2, first_layers=5), "num_layers_in_first/last_pipeline_stage"),
        (
            "llama",
            Layout(ep=2, dp=2),
            "learner.expert_parallel=2: a llama model has no experts; take 1",
        ),
        (
            "mixtral",
            Layout(ep=2),
            "learner.expert_parallel=2 x expert tensor parallel 1 does not divide the 1 ranks of "
            "a pipeline stage: raise learner.data_parallel, or set "
            "learner.megatron.expert_tensor_parallel_size",
        ),
    ],
)
def test_pipelines_and_experts(family: str, layout: Layout, message: str) -> None:
    (found,) = problems(
        Model.of(hf_config(family), layout),
        1,
        Format.none,
    )
    assert message in found
