"""The metrics table: its page is current, its rows are sound, parts combine as they say."""

import math
import re
from pathlib import Path

import pytest
import reference_tables
from helpers import write_lines

from megatron_rl.tracking.metrics import METRICS, unknown
from megatron_rl.tracking.metrics_file import REDUCERS, combine, numbers_of_file

ROOT = Path(__file__).parents[2]


def test_every_row_is_sound_and_in_the_page_once():
    page = reference_tables.metrics()
    for name, metric in METRICS.items():
        assert name.partition("/")[0] in reference_tables.GROUPS, name
        assert metric.reducer in REDUCERS and metric.meaning, name
        assert page.count(f"| `{name}` |") == 1, name


def test_names_that_dashboards_for_verl_know():
    names = (
        "kl",
        "k3_kl",
        "chi2_token",
        "chi2_seq",
        "rollout_is_eff_sample_size",
        "rollout_rs_masked_fraction",
    )
    assert unknown(f"rollout_corr/{name}" for name in names) == []
    assert unknown(["loss/total", "loss/lss"]) == ["loss/lss"]


def test_parts_combine_by_their_reducer():
    names = (
        "optim/lr",
        "loss/total",
        "optim/updates",
        "rollout_corr/rho_max",
        "rollout_corr/rho_min",
    )
    parts = [
        dict(zip(names, values, strict=False))
        for values in ((1.0, 1.0, 10, 3.0, 0.5), (2.0, 3.0, 30, 2.0))
    ]
    assert combine(parts) == dict(zip(names, (2.0, 2.0, 40, 3.0, 0.5), strict=True))


@pytest.mark.parametrize("reducer", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_in_one_part_is_not_lost(reducer, values):
    assert math.isnan(REDUCERS[reducer](values))


def test_infinities_of_both_signs_are_nan_not_an_error():
    assert math.isnan(REDUCERS["mean"]([math.inf, -math.inf]))
    assert REDUCERS["mean"]([math.inf, 1.0]) == math.inf


def test_every_name_that_the_source_spells_out_is_in_the_table():
    spelled = re.compile(rf'"((?:{"|".join(reference_tables.GROUPS)})/[a-z0-9_]+)"')
    found = {
        name: path.relative_to(ROOT).as_posix()
        for path in (ROOT / "megatron_rl").rglob("*.py")
        for name in spelled.findall(path.read_text())
    }
    assert len(found) > 20
    assert {name: found[name] for name in unknown(found)} == {}


def test_what_a_run_comes_to(tmp_path: Path):
    names = (
        "progress/step",
        "time/step",
        *(f"rollout_corr/rollout_{name}" for name in ("is_eff_sample_size", "rs_masked_fraction")),
    )
    steps = [
        (0, 90.0, 0.1, 0.9),
        (1, 3.0, 0.8, 0.0),
        (2, 2.0, 0.9, 0.5),
        (3, 7.0, 1.0, 0.1),
    ]
    lines = write_lines(
        tmp_path / "metrics.jsonl", [dict(zip(names, step, strict=True)) for step in steps]
    )
    assert numbers_of_file(lines) == {
        "sample_size": 0.9,
        "rejected": pytest.approx(0.2),
        "step_s": 3.0,
    }
