"""The metrics table: its page is current, its rows are sound, parts combine as they say."""

import math
import re
from pathlib import Path

import pytest

from megatron_rl.runs.metrics import GROUPS, METRICS, REDUCERS, combine, markdown, unknown

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_current():
    assert (ROOT / "docs/metrics.md").read_text() == markdown(), "python -m megatron_rl.runs.metrics > docs/metrics.md"


def test_every_row_has_a_known_group_a_reducer_and_a_meaning():
    for metric in METRICS.values():
        assert metric.group in GROUPS, metric.name
        assert metric.reducer in REDUCERS, metric.name
        assert metric.meaning, metric.name


def test_every_name_is_in_the_page_once():
    for name in METRICS:
        assert markdown().count(f"| `{name}` |") == 1


def test_names_that_dashboards_for_verl_know():
    names = ("kl", "k3_kl", "chi2_token", "chi2_seq", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction")
    assert unknown(f"rollout_corr/{name}" for name in names) == []


def test_parts_combine_by_their_reducer():
    parts = [
        {
            "optim/lr": 1.0,
            "loss/total": 1.0,
            "optim/updates": 10,
            "rollout_corr/rho_max": 3.0,
            "rollout_corr/rho_min": 0.5,
        },
        {"optim/lr": 2.0, "loss/total": 3.0, "optim/updates": 30, "rollout_corr/rho_max": 2.0},
    ]
    assert combine(parts) == {
        "optim/lr": 2.0,
        "loss/total": 2.0,
        "optim/updates": 40,
        "rollout_corr/rho_max": 3.0,
        "rollout_corr/rho_min": 0.5,
    }


@pytest.mark.parametrize("reducer", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_in_one_part_is_not_lost(reducer, values):
    assert math.isnan(REDUCERS[reducer](values))


def test_infinities_of_both_signs_are_nan_not_an_error():
    assert math.isnan(REDUCERS["mean"]([math.inf, -math.inf]))
    assert REDUCERS["mean"]([math.inf, 1.0]) == math.inf


def test_every_name_that_the_source_spells_out_is_in_the_table():
    spelled = re.compile(rf'"((?:{"|".join(GROUPS)})/[a-z0-9_]+)"')
    found = {
        name: path.relative_to(ROOT).as_posix()
        for path in (ROOT / "megatron_rl").rglob("*.py")
        for name in spelled.findall(path.read_text())
    }
    assert len(found) > 20
    assert {name: found[name] for name in unknown(found)} == {}


def test_unknown_names_are_found():
    assert unknown(["loss/total", "loss/lss"]) == ["loss/lss"]
