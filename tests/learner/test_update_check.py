"""What an update gains the sampler: a plain step survives INT8, one that turns around there is
found and taken back.
"""

from typing import Any

import learner_cases as cases
import pytest
from gain_worker import LIMIT

pytestmark = pytest.mark.ranks
LAYOUTS = {"one": {}, **cases.LAYOUTS}


def _job(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "hf": cases.QWEN3, "kind": kind, "lr": 4e-5, **more}


JOBS = [
    _job("plain", "gains", update="plain", refuse=LIMIT),
    _job("older", "gains", update="plain", older=0.5),
    _job("fp8", "gains", update="plain", format="fp8", refuse=LIMIT),
    _job("opposed", "gains", update="opposed"),
    _job("refused", "gains", update="opposed", refuse=LIMIT),
    _job("unseen", "gains", update="unseen", refuse=LIMIT),
]
AGAIN = [
    _job(
        f"again {steps} {precision} {name}",
        "again",
        steps=steps,
        precision=precision,
        layout=layout,
    )
    for name, layout in LAYOUTS.items()
    for precision in ("fp32", "bf16")
    for steps in (0, 2)
    if precision == "bf16" or name == "one"
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one = [job for job in AGAIN if not job["layout"]]
    two = [job for job in AGAIN if job["layout"]]
    two += [
        _job(f"plain {name}", "gains", update="plain", layout=layout)
        for name, layout in cases.LAYOUTS.items()
    ]
    return cases.run(tmp_path_factory, [*JOBS, *one], two)


@pytest.mark.parametrize("name", ["plain", "fp8", "older"])
def test_a_plain_step_gains_both_and_stays(name: str, found: dict[str, Any]) -> None:
    one = found[name]
    assert one["update/learner_gain"] > 2 * one["update/learner_gain_stderr"] > 0
    assert one["update/sampler_gain"] > 2 * one["update/sampler_gain_stderr"] > 0
    if name != "fp8":  # whose codes are coarser
        assert one["update/sampler_gain"] == pytest.approx(one["update/learner_gain"], rel=0.4)
    assert one.get("update/refused", 0.0) == 0.0
    assert not one["same"]
    assert one["steps"] == 1


def test_a_step_that_the_sampler_turns_around_is_found(found: dict[str, Any]) -> None:
    one = found["opposed"]
    assert one["update/learner_gain"] > one["update/learner_gain_stderr"]
    assert one["update/sampler_gain"] < -LIMIT * one["update/sampler_gain_stderr"] < 0
    assert "update/refused" not in one
    assert not one["same"]


def test_and_is_taken_back_where_that_is_asked_for(found: dict[str, Any]) -> None:
    one = found["refused"]
    assert one["update/refused"] == 1.0
    assert one["same"]
    assert one["steps"] == 0


def test_a_step_that_moves_no_code_is_nothing_to_the_sampler(found: dict[str, Any]) -> None:
    one = found["unseen"]
    assert one["update/learner_gain"] > one["update/learner_gain_stderr"]
    assert abs(one["update/sampler_gain"]) < 1e-6, "sums in another order, of other packs"
    assert one["update/refused"] == 0


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_every_layout_finds_the_same(layout: str, found: dict[str, Any]) -> None:
    for name in ("update/learner_gain", "update/sampler_gain"):
        assert found[f"plain {layout}"][name] == pytest.approx(found["plain"][name], rel=0.2)


@pytest.mark.parametrize("job", AGAIN, ids=lambda job: job["name"])
def test_a_step_that_is_taken_back_leaves_nothing(
    job: dict[str, Any], found: dict[str, Any]
) -> None:
    first, second = found[job["name"]]["found"]
    assert first == second
