"""The plan lists what a sync really yields, and finds every invalid pair of sizes with a way out."""

from __future__ import annotations

import subprocess
import sys

import pytest
from simulated import hf_config, random_hf, run_sources

from megatron_rl.config.schema import Format, QuantizationSection, SamplerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.sync_plan import plan_sync, problems, size_problems


@pytest.mark.parametrize("format", [Format.none, Format.int8])
def test_the_plan_is_what_is_yielded(format: Format) -> None:
    shape = ModelShape.from_hf(hf_config("qwen3_moe", tie_word_embeddings=True))
    layout = Layout(tp=2, pp=2, ep=2, etp=1)
    sources, yielded = run_sources(random_hf(shape), shape, layout, format)
    plan = plan_sync(Model(shape, layout, {}), format)
    real = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes) for y in yielded for name, t in y}
    assert {t.name: (t.shape, t.dtype, t.nbytes) for t in (one.tensor for one in plan.transfers)} == real
    assert sorted(plan.writers.values()) == sorted(source.nbytes for source in sources)
    assert plan.nbytes == sum(source.nbytes for source in sources)


def test_every_problem_at_once_with_the_nearest_values() -> None:
    found = size_problems(
        Model.of(hf_config("qwen3_moe", moe_intermediate_size=64), Layout(tp=3, pp=3, ep=3, dp=3)),
        SamplerSection(tensor_parallel=5),
        QuantizationSection(format=Format.int8),
    )
    assert "learner.tensor_parallel=3 does not divide 8 attention heads (nearest valid: 2 or 4)" in found
    assert (
        "learner.tensor_parallel=3 neither divides 4 key-value heads nor is a multiple of them (nearest valid: 2 or 4)"
        in found
    )
    assert "learner.tensor_parallel=3 does not divide the experts' width 64 (nearest valid: 2 or 4)" in found
    assert "sampler.tensor_parallel=5 does not divide 8 attention heads (nearest valid: 4 or 8)" in found
    assert "learner.expert_parallel=3 does not divide 4 experts (nearest valid: 2 or 4)" in found
    assert "learner.pipeline_parallel=3 does not divide 4 layers (nearest valid: 2 or 4)" in found


def test_blocks_that_straddle_shards() -> None:
    shape = ModelShape.from_hf(hf_config("llama", head_dim=128, hidden_size=256, intermediate_size=512))
    assert problems(Model(shape, Layout(tp=4), {}), 4, Format.fp8_block) == []
    shape = ModelShape.from_hf(hf_config("llama", head_dim=64, hidden_size=256, intermediate_size=512))
    found = problems(Model(shape, Layout(tp=4), {}), 1, Format.fp8_block)
    assert found == [
        "learner.tensor_parallel=4 cuts 128x128 blocks of k_proj: 256 / 4 is not a multiple of 128 (nearest valid: 2)",
        "learner.tensor_parallel=4 cuts 128x128 blocks of v_proj: 256 / 4 is not a multiple of 128 (nearest valid: 2)",
    ]
    assert problems(Model(shape, Layout(tp=2), {}), 4, Format.fp8_block)[0].startswith("sampler.tensor_parallel=4 cuts")
    assert problems(Model(shape, Layout(tp=4), {}), 4, Format.fp8) == []


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=2, vp=4), "virtual_pipeline_model_parallel_size=4 does not divide the 2 layers of a pipeline stage"),
        (Layout(pp=2, first_layers=5), "num_layers_in_first/last_pipeline_stage"),
        (Layout(ep=2, dp=2), "learner.expert_parallel=2: a llama model has no experts; take 1"),
    ],
)
def test_pipelines_and_experts(layout: Layout, message: str) -> None:
    found = problems(Model.of(hf_config("llama"), layout), 1, Format.none)
    assert len(found) == 1
    assert message in found[0]


def test_expert_groups_must_fit_a_stage() -> None:
    found = problems(Model.of(hf_config("mixtral"), Layout(ep=2)), 1, Format.none)
    assert found == [
        "learner.expert_parallel=2 x expert tensor parallel 1 does not divide the 1 ranks of a pipeline stage: raise "
        "learner.data_parallel, or set learner.megatron.expert_tensor_parallel_size"
    ]


def test_planning_loads_no_torch() -> None:
    code = "import sys, megatron_rl.preflight.sync_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
