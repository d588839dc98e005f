"""A sync's plan against tensors that it yields and bytes that cross, and above the lower bound."""

from __future__ import annotations

import pytest
from simulated import ThreadGroup, hf_config, random_hf, run_sources

from megatron_rl.apps.planner.traffic import (
    SamplerLayout,
    SyncPlan,
    links,
    lower_bound,
    plan_sync,
)
from megatron_rl.config.schema import Format, Transport
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape


@pytest.mark.parametrize("format", [Format.none, Format.int8])
def test_the_plan_is_what_is_yielded(format: Format) -> None:
    shape = ModelShape.from_hf(hf_config("qwen3_moe", tie_word_embeddings=True))
    layout = Layout(tp=2, pp=2, ep=2, etp=1)
    sources, yielded = run_sources(random_hf(shape), shape, layout, format)
    plan = plan_sync(Model(shape, layout, {}), format)
    real = {}
    for tensors in yielded:
        for name, tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            real[name] = (tuple(tensor.shape), dtype, tensor.nbytes)
    planned = {}
    for tensor in plan.tensors:
        planned[tensor.name] = (tensor.shape, tensor.dtype, tensor.nbytes)
    assert planned == real
    assert sorted(plan.writers.values()) == sorted(source.nbytes for source in sources)
    assert plan.nbytes == sum(source.nbytes for source in sources)


@pytest.mark.parametrize("format", [Format.none, Format.int8])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4, pp=2),
        Layout(tp=2, pp=2, ep=2, etp=2, dp=2),
        Layout(tp=2, ep=2, etp=1),
    ],
)
def test_gathers_are_what_crosses(layout: Layout, format: Format) -> None:
    """Counted where the ranks hand over; an odd vocabulary makes the last rank's share smaller."""
    family = "qwen3_moe" if layout.ep > 1 else "qwen3"
    shape = ModelShape.from_hf(hf_config(family))
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
) -> tuple[int, int, int]:
    found = next(each for each in links(plan, sampler, transport) if each.kind.startswith(start))
    return found.count, found.total, found.end


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
    model = Model(shape, Layout(tp=2, dp=3), {})
    plan = plan_sync(model, Format.int8)
    queries = 64 * 64
    keys_and_values = 2 * 32 * 64
    output = 64 * 64
    mlp = 3 * 64 * 128
    matrices = queries + keys_and_values + output + mlp
    # rows with a scale of 4 bytes
    column_rows = 64 + 2 * 32 + 2 * 128
    row_rows = 64 + 64
    embeddings = 2 * 64 * 64 * 2
    norms = 3 * 64 * 2
    scales = 4 * (column_rows + row_rows)
    assert plan.nbytes == matrices + scales + embeddings + norms
    # scales of row-parallel weights are on every rank
    crossing = (matrices + 4 * column_rows + embeddings) // 2
    engines = SamplerLayout(2, 5)
    whole = plan.nbytes
    assert one(plan, SamplerLayout(), "learner: gather") == (1, crossing, crossing)
    assert one(plan, engines, "learner -> sampler") == (10, 10 * whole, whole)
    of_four = plan_sync(Model(shape, Layout(tp=4), {}), Format.int8)
    end = 3 * crossing // 2
    assert one(of_four, SamplerLayout(), "learner: gather") == (3, end, end)
    bound = lower_bound(plan, model, engines)
    assert bound.out == whole // 6
    assert bound.into == crossing + 4 * row_rows + norms
    assert bound.total == 10 * bound.into
    files = Transport.file
    assert one(plan, engines, "learner -> files", files) == (1, whole, whole)
    # of a model this small nothing is cut
    assert one(plan, engines, "files -> sampler", files) == (10, 10 * whole, whole)


def test_the_bound_knows_who_holds_what() -> None:
    """A stage's weights leave its own ranks only; excess ranks hold copies of key-value heads."""
    shape = ModelShape.from_hf(hf_config("qwen3_moe"))
    model = Model(
        shape,
        Layout(tp=2, pp=2, ep=2, etp=1, dp=2, first_layers=1),
        {},
    )
    plan = plan_sync(model, Format.none)
    last = sum(nbytes for (stage, _), nbytes in plan.writers.items() if stage == 1)
    assert last > plan.nbytes / 2
    assert lower_bound(plan, model, SamplerLayout()).out == last // 4
    at_4 = lower_bound(plan, model, SamplerLayout(4)).into
    at_8 = lower_bound(plan, model, SamplerLayout(8)).into
    held = plan.weights
    assert at_4 == held.whole + (held.split + held.key_value) // 4
    assert at_8 == held.whole + held.split // 8 + held.key_value // 4


@pytest.mark.parametrize("format", [Format.none, Format.fp8])
@pytest.mark.parametrize("sampler", [SamplerLayout(), SamplerLayout(2, 3)])
def test_what_is_built_is_above_the_bound(sampler: SamplerLayout, format: Format) -> None:
    shape = ModelShape.from_hf(hf_config("mixtral"))
    model = Model(shape, Layout(tp=2, pp=2, ep=2, dp=2), {})
    plan = plan_sync(model, format)
    bound = lower_bound(plan, model, sampler)
    assert bound.total <= plan.nbytes * sampler.world
    _, _, built = one(plan, sampler, "learner -> sampler")
    assert bound.busiest <= built
    _, _, read = one(plan, sampler, "files -> sampler", Transport.file)
    assert bound.into <= read <= plan.nbytes
