"""A probe whose budget is measured lets an engine pass that is right, and none of which one layer is wrong.

All of it happens in one process (`budget_cases.py`), in which the learner may change torch.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from preloaded import run

from megatron_rl.config.schema import Precision

pytestmark = pytest.mark.engine

CASES = ("int8 bf16", "int8 as_sampler", "fp8 bf16")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("budget")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("budget_cases.py")
    done = run("megatron", [sys.executable, script, folder], timeout=240.0, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_is_right_passes_with_room(case: str, found: dict) -> None:
    right = found[case]["none"]
    assert right["said"] == ""
    assert 0 < right["d"] < right["budget"] / 1.5


@pytest.mark.parametrize("precision", list(Precision))
def test_an_engine_that_is_right_is_not_ended_over_outliers(precision: Precision, found: dict) -> None:
    right = found[f"outliers {precision}"]["none"]
    assert right["d"] > right["budget"], "else this says nothing"
    assert right["said"] == ""


@pytest.mark.fault("one layer of an engine with outliers holds other weights", "what outliers explain is not enough")
def test_one_wrong_layer_is_found_beside_outliers(found: dict) -> None:
    ((_, wrong),) = (one for one in found["outliers bf16"].items() if one[0] != "none")
    assert "With the sampler's own arithmetic the learner is off by" in wrong["said"]


@pytest.mark.fault("one layer of the engine holds other weights", "the probe stops the run, whatever its noise")
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
