"""`learner.forward=as_sampler`: the same codes on every layout, the engine's slices, gradients of the plain layers.

That the outputs are the engine's own: tests/engine/test_host_kernels.py.
"""

from __future__ import annotations

from typing import Any

import learner_cases as cases
import pytest
import torch

pytestmark = pytest.mark.ranks
MODELS = {"qwen3": cases.QWEN3, "qwen2": cases.QWEN2, "experts": cases.QWEN3_MOE}
EXPERTS = ["re:.*experts.*"]
SEQUENCE_PARALLEL = {"sequence_parallel": True}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {
        "tp2": {"tensor_parallel": 2},
        "tp2_sp": {"tensor_parallel": 2, "megatron": SEQUENCE_PARALLEL},
        "pp2": {"pipeline_parallel": 2},
        "dp2": {"data_parallel": 2},
    },
    "qwen2": {"tp2": {"tensor_parallel": 2}},
    "experts": {"ep2": {"data_parallel": 2, "expert_parallel": 2}},
}
SLICES = (1, 2)
PRECISIONS = ("fp32", "bf16")
PLACES = [(model, layout, slices) for model in MODELS for layout in LAYOUTS[model] for slices in SLICES]


def _job(model: str, layout: dict[str, Any], slices: int, name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "hf": MODELS[model], "layout": layout, "engine_tp": slices, "forward": "as_sampler", "steps": 2,
        "ignore": EXPERTS, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [_job(model, {}, slices, f"{model} {slices}") for model in MODELS for slices in SLICES]
    jobs.append(_job("qwen3", {}, 1, "plain", forward="bf16"))
    jobs.append(_job("qwen3", {}, 1, "ignored", ignore=["re:.*"]))
    jobs += [
        _job("qwen3", {}, 2, f"gradients {kind}", kind="straight_through", precision=kind) for kind in ("fp32", "bf16")
    ]
    jobs.append(_job("qwen3", {}, 1, "partly", kind="refused", ignore=["model.layers.1.self_attn.k_proj"]))
    return cases.run_ranks(1, jobs, tmp_path_factory.mktemp("one_rank"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [_job(model, LAYOUTS[model][at], slices, f"{model} {at} {slices}") for model, at, slices in PLACES]
    return cases.run_ranks(2, jobs, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize(("model", "at", "slices"), PLACES)
def test_every_layout_computes_the_same(
    model: str, at: str, slices: int, one: dict[str, Any], two: dict[str, Any]
) -> None:
    found, wanted = two[f"{model} {at} {slices}"], one[f"{model} {slices}"]
    here, there = (torch.tensor(case["logprobs"]) for case in (found, wanted))
    torch.testing.assert_close(here, there, rtol=0, atol=1e-4)
    # updated weights differ in their last bits, which move some codes by one
    here, there = (torch.tensor(case["after"]) for case in (found, wanted))
    assert (here - there).abs().median() < 1e-3
    for here, there in zip(found["steps"], wanted["steps"], strict=True):
        assert here["optim/grad_norm"] == pytest.approx(there["optim/grad_norm"], rel=1e-2)


def test_it_is_another_arithmetic_and_a_close_one(one: dict[str, Any]) -> None:
    plain = torch.tensor(one["plain"]["logprobs"])
    quantized, slices = (torch.tensor(one[f"qwen3 {slices}"]["logprobs"]) for slices in SLICES)
    assert 1e-4 < (quantized - plain).abs().mean() < 0.1
    assert (quantized - slices).abs().mean() > 1e-5, "two slices have scales of their own"


def test_ignored_layers_are_plain(one: dict[str, Any]) -> None:
    assert one["ignored"]["logprobs"] == one["plain"]["logprobs"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_are_those_of_plain_layers(precision: str, one: dict[str, Any]) -> None:
    found = one[f"gradients {precision}"]
    assert len(found) == 4 * cases.TINY["num_hidden_layers"]
    assert all(found.values()), found


def test_a_part_of_a_joined_matrix_is_refused(one: dict[str, Any]) -> None:
    assert "quantization.ignore holds some of model.layers.1.self_attn.q_proj.weight" in one["partly"]
