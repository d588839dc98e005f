"""The bytes of every link are those that really cross it; no sync can undercut the lower bound."""

from __future__ import annotations

import pytest
from simulated import ThreadGroup, hf_config, random_hf, run_sources

from megatron_rl.config.schema import Format, Transport
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.sync_plan import SyncPlan, plan_sync
from megatron_rl.workshop.planner.traffic import SamplerLayout, links, lower_bound


@pytest.mark.parametrize("format", [Format.none, Format.int8])
@pytest.mark.parametrize(
    "layout", [Layout(tp=4, pp=2), Layout(tp=2, pp=2, ep=2, etp=2, dp=2), Layout(tp=2, ep=2, etp=1)]
)
def test_gathers_are_what_crosses(layout: Layout, format: Format) -> None:
    """Counted where the ranks hand over; an odd vocabulary makes the last rank's share smaller."""
    shape = ModelShape.from_hf(hf_config("qwen3_moe" if layout.ep > 1 else "qwen3"))
    groups: dict[tuple, ThreadGroup] = {}
    run_sources(random_hf(shape), shape, layout, format, groups=groups)
    plan = plan_sync(Model(shape, layout, {}), format)
    for pp in range(layout.pp):
        crossed = groups["tp", pp, 0].sent
        assert plan.gathers[pp, None] == tuple(crossed[rank] for rank in range(1, layout.tp))
        for ep in range(layout.ep if shape.experts and layout.expert_tp > 1 else 0):
            crossed = groups["etp", pp, ep, 0].sent
            assert plan.gathers[pp, ep] == tuple(
                crossed[rank] for rank in range(1, layout.expert_tp)
            )


def one(
    plan: SyncPlan, sampler: SamplerLayout, start: str, transport: Transport = Transport.nccl
) -> tuple[int, int, int, int]:
    found = next(each for each in links(plan, sampler, transport) if each.kind.startswith(start))
    return found.count, found.busiest, found.total, found.end


def test_links_by_hand() -> None:
    """A model of one layer, counted by hand."""
    config = hf_config(
        "llama",
        num_hidden_layers=1,
        hidden_size=64,
        head_dim=8,
        intermediate_size=128,
        vocab_size=64,
    )
    shape = ModelShape.from_hf(config)
    layout = Layout(tp=2, dp=3)
    plan = plan_sync(Model(shape, layout, {}), Format.int8)
    matrices = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128  # q, k and v, o, gate and up and down
    # rows with a scale of 4 bytes
    column_rows = 64 + 2 * 32 + 2 * 128
    row_rows = 64 + 64
    embeddings = 2 * 64 * 64 * 2
    assert plan.nbytes == matrices + 4 * (column_rows + row_rows) + embeddings + 3 * 64 * 2
    # scales of row-parallel weights are on every rank
    crossing = (matrices + 4 * column_rows + embeddings) // 2
    assert one(plan, SamplerLayout(), "learner: gather of dense") == (
        1,
        crossing,
        crossing,
        crossing,
    )
    maxima = 4 * row_rows
    assert one(plan, SamplerLayout(), "learner: row maxima") == (2, maxima, 2 * maxima, maxima)
    assert one(plan, SamplerLayout(2, 5), "learner -> sampler") == (
        10,
        plan.nbytes,
        10 * plan.nbytes,
        plan.nbytes,
    )
    of_four = plan_sync(Model(shape, Layout(tp=4), {}), Format.int8)
    each = 2 * maxima * 3 // 4  # three quarters on the way to the sum, three on the way back
    assert one(of_four, SamplerLayout(), "learner: row maxima") == (4, each, 4 * each, each)
    assert one(of_four, SamplerLayout(), "learner: gather")[::2] == (3, 3 * crossing // 2)
    bound = lower_bound(plan, Model(shape, layout, {}), SamplerLayout(2, 5))
    assert bound.out == plan.nbytes // 6
    assert bound.into == crossing + 4 * row_rows + 3 * 64 * 2
    assert bound.total == 10 * bound.into
    assert one(plan, SamplerLayout(2, 5), "learner -> files", Transport.file) == (
        1,
        *[plan.nbytes] * 3,
    )
    read = plan.nbytes  # of a model this small nothing is cut
    assert one(plan, SamplerLayout(2, 5), "files -> sampler", Transport.file) == (
        10,
        read,
        10 * read,
        read,
    )


def test_the_bound_knows_who_holds_what() -> None:
    """A stage's weights leave its own ranks only; excess ranks hold copies of key-value heads."""
    shape = ModelShape.from_hf(hf_config("qwen3_moe"))
    layout = Layout(tp=2, pp=2, ep=2, etp=1, dp=2, first_layers=1)
    plan = plan_sync(Model(shape, layout, {}), Format.none)
    last = sum(one.tensor.nbytes for one in plan.transfers if one.stage == 1)
    assert last > plan.nbytes / 2
    assert lower_bound(plan, Model(shape, layout, {}), SamplerLayout()).out == last // 4
    at_4 = lower_bound(plan, Model(shape, layout, {}), SamplerLayout(4)).into
    at_8 = lower_bound(plan, Model(shape, layout, {}), SamplerLayout(8)).into
    assert at_4 == plan.whole_bytes + (plan.split_bytes + plan.key_value_bytes) // 4
    assert at_8 == plan.whole_bytes + plan.split_bytes // 8 + plan.key_value_bytes // 4
    separate, joined = (
        plan_sync(Model(ModelShape.from_hf(hf_config(family)), Layout(tp=2), {}), Format.int8)
        for family in ("llama", "phi3")
    )
    assert 0 < separate.key_value_bytes == joined.key_value_bytes
    assert separate.split_bytes == joined.split_bytes


@pytest.mark.parametrize("format", [Format.none, Format.fp8])
@pytest.mark.parametrize("sampler", [SamplerLayout(), SamplerLayout(2, 3)])
def test_what_is_built_is_above_the_bound(sampler: SamplerLayout, format: Format) -> None:
    shape = ModelShape.from_hf(hf_config("mixtral"))
    layout = Layout(tp=2, pp=2, ep=2, dp=2)
    plan = plan_sync(Model(shape, layout, {}), format)
    bound = lower_bound(plan, Model(shape, layout, {}), sampler)
    assert bound.total <= plan.nbytes * sampler.world
    assert bound.busiest <= one(plan, sampler, "learner -> sampler")[3]
    assert bound.into <= one(plan, sampler, "files -> sampler", Transport.file)[3] <= plan.nbytes
