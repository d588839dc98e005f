"""Measured budget of a probe: a right engine passes, one with a single wrong layer does not.

All of it happens in one process (`budget_cases.py`), in which the learner may change torch.
"""

from pathlib import Path

import pytest
from preloaded import found_by

from megatron_rl.config.schema import Precision

pytestmark = pytest.mark.engine

CASES = ("int8 bf16", "int8 as_sampler", "fp8 bf16")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    script = Path(__file__).with_name("budget_cases.py")
    return found_by("megatron", script, tmp_path_factory.mktemp("budget"), timeout=240.0)


@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_is_right_passes_with_room(case: str, found: dict) -> None:
    right = found[case]["none"]
    assert right["said"] == ""
    assert 0 < right["d"] < right["budget"] / 1.5


@pytest.mark.parametrize("precision", list(Precision))
def test_an_engine_that_is_right_is_not_ended_over_outliers(
    precision: Precision, found: dict
) -> None:
    right = {
        case: one["none"]
        for case, one in found.items()
        if case.startswith("outliers") and precision in case
    }
    assert len(right) == 10
    assert sum(one["d"] > one["budget"] for one in right.values()) >= 2
    for one in right.values():
        assert one["said"] == ""
        assert one["expected"] / 1.2 < one["d"] < one["expected"] * 1.2
        if precision is Precision.bf16:
            # token by token: nothing where both sum in one order, 0.4 of it seen where a
            # processor's kernels do not
            assert one["unexplained"] < one["noise"]


@pytest.mark.fault(
    "one layer of an engine with outliers holds other weights",
    "what outliers explain is not enough",
)
def test_one_wrong_layer_is_found_beside_outliers(found: dict) -> None:
    """A learner in FP32 misses differences that are smaller than INT8's own there."""
    wrong = {
        case: [one[fault] for fault in one if fault != "none"]
        for case, one in found.items()
        if "outliers" in case
    }
    assert all(one["said"] for case, faults in wrong.items() for one in faults if "bf16" in case)
    fp32 = [(case, one) for case, faults in wrong.items() for one in faults if "fp32" in case]
    missed = [case for case, one in fp32 if not one["said"]]
    assert len(fp32) == 30
    assert len(missed) <= 2
    assert set(missed) <= {"outliers int8 256 64 fp32"}


@pytest.mark.fault(
    "one layer of the engine holds other weights", "the probe stops the run at any noise"
)
@pytest.mark.parametrize("case", CASES)
def test_one_wrong_layer_is_found_in_every_place(case: str, found: dict) -> None:
    wrong = {fault: one for fault, one in found[case].items() if fault != "none"}
    assert len(wrong) == 2 * 7 + case.startswith("int8")
    passed = {fault: (one["d"], one["budget"]) for fault, one in wrong.items() if not one["said"]}
    assert not passed
    for one in wrong.values():
        assert "sync.probe_budget=auto: " in one["said"]


def test_a_sampler_that_is_wrong_hardly_moves_its_own_budget(found: dict) -> None:
    for case in CASES:
        right = found[case]["none"]["noise"]
        assert all(one["noise"] < 3 * right for one in found[case].values())
