"""Batches that only the driver holds: trained as if on every rank; each replica gets its rows."""

import learner_cases as cases
import pytest
from learner_cases import Fields

DENSE = ("alone", "tp2", "pp2", "vp2", "dp2")
TWO = {at: cases.LAYOUTS[at] for at in DENSE[1:]}
TWO |= {f"experts_{at}": cases.ALL_LAYOUTS[at] for at in ("ep2", "tp2_ep2", "pp2", "vp2")}
FOUR = {  # ranks
    "stages of two": {**cases.LAYOUTS["pp2"], **cases.LAYOUTS["tp2_sp"]},
    "stages of replicas": {**cases.LAYOUTS["pp2"], **cases.LAYOUTS["dp2"]},
}
SHARED = [*TWO, *FOUR]
REPLICAS = {"dp2", "experts_ep2", "stages of replicas"}
STAGES = {"experts_pp2", "experts_vp2", *FOUR}
ROWS = 14


def _job(name: str, layout: Fields) -> Fields:
    layout = {"tokens_per_microbatch": 60, **layout}
    if name in DENSE:
        about = {"hf": cases.QWEN3, "layout": layout}
    else:
        about = {"hf": cases.QWEN3_MOE, "layout": layout | {"router": "replay"}, "experts": True}
    return {"kind": "shared", "name": name, **about}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    jobs = ([_job(*case) for case in some.items()] for some in ({"alone": {}}, TWO, FOUR))
    return cases.run(tmp_path_factory, *jobs)


@pytest.mark.parametrize("name", ["alone", *SHARED])
def test_passes_and_updates_are_those_of_a_batch_on_every_rank(found: Fields, name: str) -> None:
    """To the last bit where the same rows are on each replica."""
    case = found[name]
    everywhere = case["everywhere"]
    assert case["alike"] == everywhere and everywhere["after"] != everywhere["logprobs"]
    assert len(case["updates"]) == 2 and sum(case["updates"]) == ROWS
    if name in REPLICAS:
        cases.close(case["apart"], everywhere, 1e-5)
        cases.close(case["apart"], everywhere, 1e-3, "after")
        cases.same_steps(case["apart"], everywhere, rtol=1e-4, atol=1e-6)
    else:
        assert case["apart"] == everywhere
    driver, *others = case["collected"]
    assert len(driver) > 5 and all(driver)
    assert not any(others), "only the driver receives them"


@pytest.mark.parametrize("name", SHARED)
def test_each_rank_gets_its_rows_once_and_no_others(found: Fields, name: str) -> None:
    ranks = found[name]["ranks"]
    driver, *others = ranks
    assert driver["sent"] and driver["received"] == 0
    assert all(rank["received"] == rank["bytes"] > 0 for rank in others)
    if name in REPLICAS:
        halves = driver, others[-1]
        assert sorted(row for half in halves for row in half["rows"]) == [*range(ROWS)]
        tokens = [half["tokens"] for half in halves]
        assert max(tokens) < 0.7 * sum(tokens)
    else:
        assert all(rank["rows"] == [*range(ROWS)] for rank in ranks)


@pytest.mark.parametrize("name", [name for name in SHARED if name not in DENSE])
def test_a_stage_s_ranks_hold_the_choices_of_its_layers(found: Fields, name: str) -> None:
    """The driver has those of all."""
    driver, *others = (rank["layers"] for rank in found[name]["ranks"])
    assert driver == 4 and {*others} == {2 if name in STAGES else 4}


def test_a_lone_rank_moves_nothing(found: Fields) -> None:
    (only,) = found["alone"]["ranks"]
    assert only["sent"] == only["received"] == 0
