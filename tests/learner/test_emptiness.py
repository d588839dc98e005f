"""Packs, rows, micro-batches, replicas and batches with nothing in them: alike on every layout, at every budget."""

from __future__ import annotations

import math
from typing import Any

import learner_cases as cases
import pytest
import torch

pytestmark = pytest.mark.ranks
SEQUENCE_PARALLEL = {"sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2},
    "tp2_sp": {"tensor_parallel": 2, "megatron": SEQUENCE_PARALLEL},
    "pp2": {"pipeline_parallel": 2},
    "vp2": {"pipeline_parallel": 2, "megatron": {"virtual_pipeline_model_parallel_size": 2}},
    "dp2": {"data_parallel": 2},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "tp2_sp": LAYOUTS["tp2_sp"],
    "tp2_ep2": {
        "tensor_parallel": 2,
        "expert_parallel": 2,
        "megatron": {**SEQUENCE_PARALLEL, "expert_tensor_parallel_size": 1},
    },
    "pp2": LAYOUTS["pp2"],
}
BUDGETS = {"each_row": 1, "all_rows": 8192}
PLACES = [("dense", at, "each_row") for at in LAYOUTS] + [("dense", at, "all_rows") for at in ("tp2_sp", "dp2")]
PLACES += [("experts", at, "each_row") for at in EXPERT_LAYOUTS]
NO_UPDATE = ("answers", "tokens to train on", "rows", "all rows but one without an answer")
MODELS = {"dense": cases.QWEN3, "experts": cases.QWEN3_MOE}


def _job(model: str, at: str, layout: dict[str, Any], budget: str) -> dict[str, Any]:
    return {
        "name": f"{model}_{at}_{budget}",
        "kind": "emptiness",
        "hf": MODELS[model],
        "layout": {**layout, "tokens_per_microbatch": BUDGETS[budget]},
        "smoothing": 0.5,
        "kv_cache": "fp8",
        "entropy_coef": 0.1,
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [_job(model, "one", {}, budget) for model in MODELS for budget in BUDGETS]
    return cases.run_ranks(1, jobs, tmp_path_factory.mktemp("one_rank"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [_job(model, at, (LAYOUTS | EXPERT_LAYOUTS)[at], budget) for model, at, budget in PLACES]
    return cases.run_ranks(2, jobs, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.fault("a step lacks answers, rows or tokens to train on, on any layout", "it is scored as on one rank")
@pytest.mark.parametrize(("model", "at", "budget"), PLACES)
def test_little_is_the_same_on_every_layout(
    model: str, at: str, budget: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    for case, wanted in one[f"{model}_one_all_rows"].items():
        _same(two[f"{model}_{at}_{budget}"][case], wanted, f"without {case}")


@pytest.mark.parametrize("model", MODELS)
def test_little_is_the_same_in_packs_of_one_row(model: str, one: dict[str, Any]) -> None:
    for case, wanted in one[f"{model}_one_all_rows"].items():
        _same(one[f"{model}_one_each_row"][case], wanted, f"without {case}")


@pytest.mark.fault("a step has no token to train on", "weights, momentum and schedule stay as they are")
@pytest.mark.parametrize("case", cases.EMPTINESS)
def test_nothing_to_train_on_updates_nothing(case: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    for place, found in {**one, **two}.items():
        updates = case not in NO_UPDATE
        assert found[case]["moved"] is updates, place
        assert found[case]["update"]["optim/updates"] == found[case]["steps"] == updates, place
        assert (found[case]["update"]["optim/grad_norm"] > 0) is updates, place
        assert math.isfinite(found[case]["update"]["loss/total"]), place


def _same(found: dict[str, Any], wanted: dict[str, Any], case: str) -> None:
    close = {"rtol": 1e-4, "atol": 1e-4, "msg": case}
    assert len(found["logprobs"]) == len(wanted["logprobs"]), case
    torch.testing.assert_close(torch.tensor(found["logprobs"]), torch.tensor(wanted["logprobs"]), **close)
    for what, amax in wanted["seen"].items():
        torch.testing.assert_close(torch.tensor(found["seen"][what]), torch.tensor(amax), **close)
    for key in ("loss/total", "optim/grad_norm"):
        assert found["update"][key] == pytest.approx(wanted["update"][key], rel=1e-4, abs=1e-7), (case, key)
