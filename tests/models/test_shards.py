"""Every element of every parameter is in exactly one block of one rank, at the place where one rank
alone has it.
"""

from __future__ import annotations

from typing import Any

import learner_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import assemble, run_regions, shard_regions
from megatron_rl.models.table import Split

LAYOUTS = (
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(tp=2, etp=1, ep=2, dp=2),
    Layout(ep=2, dp=2),
)
MODELS = {"dense": cases.QWEN3, "biased": cases.QWEN2, "experts": cases.QWEN3_MOE}


def places(layout: Layout) -> list[Place]:
    """A rank per tensor-parallel and expert-parallel place; replicas hold the same."""
    return [place for place in layout.places() if place.pp == 0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_the_blocks_of_all_ranks_make_up_the_whole(model: str, layout: Layout) -> None:
    shape = ModelShape.from_hf(MODELS[model])
    for param in params(shape):
        full = [torch.randn(size) for size in param.shapes]
        whole = assemble(param, shape, Layout(), Place(), full)
        made = torch.zeros_like(whole)
        times = torch.zeros_like(whole)
        shared = 1 if param.row.split is not Split.replicated else 0
        seen = set()
        for place in places(layout):
            _, rank = param.tensor_parallel(layout, place)
            if rank in seen or (not shared and seen):
                continue
            seen.add(rank)
            local = assemble(param, shape, layout, place, full)
            for region in shard_regions(param, layout, place):
                _block(made, region.offset, region.size).copy_(
                    _block(local, region.start, region.size)
                )
                _block(times, region.offset, region.size).add_(1)
        assert torch.equal(made, whole), param.megatron
        assert (times == 1).all(), param.megatron


@given(data=st.data())
def test_a_run_of_a_flattened_shard_is_found_again(data: Any) -> None:
    model = data.draw(st.sampled_from(sorted(MODELS)))
    layout = data.draw(st.sampled_from(LAYOUTS))
    shape = ModelShape.from_hf(MODELS[model])
    param = data.draw(st.sampled_from(list(params(shape))))
    place = data.draw(st.sampled_from(places(layout)))
    local = torch.arange(float(torch.Size(param.local_shape(layout)).numel())).view(
        param.local_shape(layout)
    )
    start = data.draw(st.integers(0, local.numel()))
    stop = data.draw(st.integers(start, local.numel()))
    run = local.flatten()[start:stop]
    regions = shard_regions(param, layout, place)
    held = torch.zeros_like(local, dtype=torch.bool)
    for region in regions:
        _block(held, region.start, region.size).fill_(True)
    seen = torch.zeros_like(local, dtype=torch.int)
    for at, region in run_regions(regions, tuple(local.shape), start, stop):
        values = run[at : at + torch.Size(region.size).numel()].view(region.size)
        assert torch.equal(values, _block(local, region.start, region.size))
        _block(seen, region.start, region.size).add_(1)
    wanted = torch.zeros(local.numel(), dtype=torch.int)
    wanted[start:stop] = 1
    assert torch.equal(seen, wanted.view(local.shape) * held)


def _block(tensor: torch.Tensor, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    for axis, (at, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(axis, at, length)
    return tensor
