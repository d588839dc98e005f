"""The plan on the report's page: what a run's directory keeps of it, drawn beside what was
measured.
"""

import json
from pathlib import Path

import pytest
from run_factory import make_run

from megatron_rl.config import load
from megatron_rl.preflight.machine import named
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.planner.table import keep
from megatron_rl.workshop.reports.figures import planned
from megatron_rl.workshop.reports.report import page
from megatron_rl.workshop.reports.run_data import load_run

RECIPE = Path(__file__).parents[3] / "recipes" / "dapo_int8.yaml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path, "planned", steps=4)


def test_memory_and_time_are_drawn(run: Path) -> None:
    keep(load(RECIPE), named("2x8xH100-80"), RunDir(run))
    kept = json.loads((run / "plan.json").read_text())
    memory, time = planned(load_run(run))
    for kind in kept["memory"]:
        for phase, parts in kind["phases"].items():
            drawn = sum(
                height
                for bar in memory.data
                for of, at, height in zip(bar.x[0], bar.x[1], bar.y, strict=True)
                if (of, at) == (kind["of"], phase)
            )
            assert drawn == pytest.approx(sum(parts.values()) / 2**30)
    fills = [(bar.marker.color, bar.marker.pattern.shape) for bar in memory.data]
    assert len({*fills}) == len(fills) > 8
    assert [line.y0 for line in memory.layout.shapes] == [
        pytest.approx(kept["memory"][0]["limit"] / 2**30)
    ]
    asked, measured = time.data
    assert asked.y[0] == kept["seconds"]["rollout"]
    assert measured.y[0] == load_run(run).median("time/rollout")
    html = page([load_run(run)])
    assert "Planned memory" in html
    assert "Planned and measured time" in html


def test_a_run_without_a_plan(run: Path) -> None:
    assert planned(load_run(run)) == (None, None)
    assert "Planned" not in page([load_run(run)])


def test_what_cannot_be_planned_is_left_out(run: Path) -> None:
    keep(load(RECIPE, ["model.path=/nowhere"]), named("2x8xH100-80"), RunDir(run))
    assert not (run / "plan.json").exists()


@pytest.mark.parametrize("text", ["x", "[]", "{}", "null", '{"memory": 1, "seconds": null}'])
def test_a_torn_plan_is_named(run: Path, text: str) -> None:
    (run / "plan.json").write_text(text)
    html = page([load_run(run)])
    assert "planned/plan.json" in html
    assert "Gradient norm" in html
