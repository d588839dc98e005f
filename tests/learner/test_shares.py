"""Batches that only the driver holds: trained as if on every rank; each replica gets its rows."""

import learner_cases as cases
import pytest
from learner_cases import Fields

# (name, model, layout, more of the job)
CASES = [
    *(
        (
            at,
            cases.QWEN3,
            cases.LAYOUTS[at],
            {"kept": True},
        )
        for at in ("tp2", "pp2", "vp2", "dp2")
    ),
    *(
        (f"experts_{at}", cases.QWEN3_MOE, layout, {"experts": True})
        for at, layout in (cases.EXPERT_LAYOUTS | cases.LAYOUTS).items()
        if at in ("ep2", "tp2_ep2", "pp2", "vp2")
    ),
]
# of four ranks
STAGES = {
    "stages of two": {**cases.LAYOUTS["pp2"], **cases.LAYOUTS["tp2_sp"]},
    "stages of replicas": {**cases.LAYOUTS["pp2"], **cases.LAYOUTS["dp2"]},
}
REPLICAS = {"dp2", "experts_ep2"}


def _job(name: str, hf: Fields, layout: Fields, more: Fields) -> Fields:
    router = {"router": "replay"} if more.get("experts") else {}
    layout = {"tokens_per_microbatch": 60, **layout, **router}
    return {"kind": "shared", "name": name, "hf": hf, "layout": layout, **more}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    alone = [_job("alone", cases.QWEN3, {}, {"kept": True})]
    four = [
        _job(
            name,
            cases.QWEN3_MOE,
            layout,
            {"experts": True},
        )
        for name, layout in STAGES.items()
    ]
    return cases.run(tmp_path_factory, alone, [_job(*case) for case in CASES], four)


@pytest.mark.parametrize("name", ["alone", *(case[0] for case in CASES), *STAGES])
def test_passes_and_updates_are_the_same_to_the_last_bit(found: Fields, name: str) -> None:
    assert found[name]["same"] == [True, True]
    assert all(found[name]["empty"]), "only the driver is told"


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_each_replica_gets_the_rows_that_it_passes_and_no_others(found: Fields, name: str) -> None:
    driver, other = found[name]["ranks"]
    assert driver["rows"] == 14 and other["again"] == 0, "rows that are there are not sent again"
    if name in REPLICAS:
        assert 0 < other["rows"] < driver["rows"] and 0 < other["tokens"] < 0.7 * driver["tokens"]
    else:
        assert other["rows"] == driver["rows"]
    assert other["received"] and driver["sent"]
    if name.startswith("experts"):
        assert other["layers"] == (2 if name in ("experts_pp2", "experts_vp2") else 4), (
            "of its stage alone"
        )


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_s_ranks_hold_the_choices_of_its_layers(found: Fields, name: str) -> None:
    """The driver has the whole batch."""
    assert [rank["layers"] for rank in found[name]["ranks"]] == [0, 2, 2, 2]


def test_a_lone_rank_moves_nothing(found: Fields) -> None:
    (only,) = found["alone"]["ranks"]
    assert only["sent"] == only["received"] == 0
