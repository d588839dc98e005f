"""Empty packs, rows, micro-batches, replicas and batches: alike on all layouts and budgets."""

import math

import learner_cases as cases
import pytest
from learner_cases import Fields

pytestmark = pytest.mark.ranks
BUDGETS = {"each_row": 1, "all_rows": 8192}
PLACES = [("dense", at, "each_row") for at in cases.LAYOUTS] + [
    ("dense", at, "all_rows") for at in ("tp2_sp", "dp2")
]
PLACES += [("experts", at, "each_row") for at in cases.EXPERT_LAYOUTS if at != "dp2"]
NO_UPDATE = ("answers", "tokens to train on", "rows", "all rows but one without an answer")


def _job(model: str, at: str, budget: str) -> Fields:
    return {
        "name": f"{model}_{at}_{budget}",
        "kind": "emptiness",
        "hf": cases.MODELS[model],
        "layout": cases.ALL_LAYOUTS.get(at, {}) | {"tokens_per_microbatch": BUDGETS[budget]},
        "smoothing": 0.5,
        "kv_cache": "fp8",
        "entropy_coef": 0.1,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    one = [_job(model, "one", budget) for model in cases.MODELS for budget in BUDGETS]
    return cases.run(tmp_path_factory, one, [_job(*place) for place in PLACES])


@pytest.mark.fault(
    "a step lacks answers, rows or tokens to train on, on any layout", "it is scored as on one rank"
)
@pytest.mark.parametrize(
    ("model", "at", "budget"), [*PLACES, *((model, "one", "each_row") for model in cases.MODELS)]
)
def test_little_is_the_same_on_every_layout_and_in_packs_of_one_row(
    model: str, at: str, budget: str, found: Fields
) -> None:
    for case, wanted in found[f"{model}_one_all_rows"].items():
        _same(found[f"{model}_{at}_{budget}"][case], wanted, f"without {case}")


@pytest.mark.fault(
    "a step has no token to train on", "weights, momentum and schedule stay as they are"
)
@pytest.mark.parametrize("case", cases.EMPTINESS)
def test_nothing_to_train_on_updates_nothing(case: str, found: Fields) -> None:
    for place, by_case in found.items():
        here = by_case[case]
        updates = case not in NO_UPDATE
        assert here["moved"] is updates, place
        assert here["update"]["optim/updates"] == here["steps"] == updates, place
        assert (here["update"]["optim/grad_norm"] > 0) is updates, place
        assert math.isfinite(here["update"]["loss/total"]), place


def _same(found: Fields, wanted: Fields, case: str) -> None:
    assert len(found["logprobs"]) == len(wanted["logprobs"]), case
    cases.close(found, wanted, 1e-4, rtol=1e-4)
    for what in wanted["seen"]:
        cases.close(found["seen"], wanted["seen"], 1e-4, what, rtol=1e-4)
    for key in ("loss/total", "optim/grad_norm"):
        assert found["update"][key] == pytest.approx(
            wanted["update"][key],
            rel=1e-4,
            abs=1e-7,
        ), (
            case,
            key,
        )
