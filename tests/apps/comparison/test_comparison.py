"""Findings of a comparison, its page and its curves: no more than the seeds support."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from comparison_pages import stored, with_blocks, write_docs
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.apps.comparison.comparison import Cell, Comparison, Result, beyond_noise
from megatron_rl.apps.comparison.findings import Finding, findings, recommendation, summary
from megatron_rl.apps.comparison.page import curves, write_comparison
from megatron_rl.apps.reports.run_data import load_run
from megatron_rl.config import ConfigError
from megatron_rl.tracking.metrics_file import ACCURACY, AREA, IN_BF16, Series, area

ROOT = Path(__file__).parents[3]
# two steps of real runs, each with both engines
RECORDED = Path(__file__).parent / "recorded" / "evidence"


def cell(*labels: str, areas: tuple[float, ...], state: str = "finished") -> Cell:
    return Cell(
        labels,
        tuple(
            Result(f"{'_'.join(labels)}_s{seed}", seed, state, {AREA: value, "step_s": 1.0})
            for seed, value in enumerate(areas, start=1)
        ),
    )


def in_bf16(one: Cell, *values: float) -> Cell:
    runs = zip(one.runs, values, strict=True)
    return replace(
        one,
        runs=tuple(replace(run, numbers={**run.numbers, IN_BF16: value}) for run, value in runs),
    )


def compared(*cells: Cell, reference: tuple[str, ...] | None = None) -> Comparison:
    return Comparison("grid", ("sampler", "correction"), cells, reference)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory):
    """Real runs, as a grid of one axis."""
    folder = tmp_path_factory.mktemp("runs")
    cells = {}
    runs = []
    for file in sorted(RECORDED.glob("*.jsonl")):
        label, _, seed = file.stem.rpartition("_s")
        (folder / file.stem).mkdir()
        (folder / file.stem / "metrics.jsonl").write_text(file.read_text())
        (folder / file.stem / "status.json").write_text('{"state": "finished"}')
        runs.append(load_run(folder / file.stem))
        cells.setdefault(label, []).append(Result.of(runs[-1], int(seed)))
    assert len(runs) == 4
    return Comparison(
        "tiny", ("correction",), tuple(Cell((k,), tuple(v)) for k, v in cells.items())
    ), runs


def test_the_area_is_the_mean_height():
    assert area(Series([0, 10], [0.2, 0.4])) == pytest.approx(0.3)
    assert area(Series([0, 2, 10], [0.0, 1.0, 1.0])) == pytest.approx(0.9)
    assert area(Series([0, 5, 10], [0.5, math.nan, 0.5])) == pytest.approx(0.5)
    assert area(Series([0], [0.5])) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(-1, 1))
def test_noise_is_that_of_differences(values, shift):
    """A shift shared by a seed's runs is no noise; a difference of zero is never beyond it."""
    here = cell("a", "x", areas=tuple(values))
    moved = cell("a", "y", areas=tuple(v + shift for v in values))
    assert not beyond_noise(here, here)
    if abs(shift) > 1e-3:
        assert beyond_noise(moved, here) is (shift > 0)
        assert beyond_noise(here, moved) is (shift < 0)


def test_noise_agrees_with_scipy():
    from scipy import stats

    for a, b in (
        ((0.5, 0.6, 0.7), (0.4, 0.5, 0.55)),
        ((0.5, 0.6, 0.7), (0.45, 0.65, 0.6)),
        ((0.9, 0.8), (0.1, 0.2)),
    ):
        test = stats.ttest_rel(a, b)
        above = test.pvalue < 0.05 and test.statistic > 0
        assert beyond_noise(cell("p", "a", areas=a), cell("p", "b", areas=b)) is bool(above)


def the_finding(*cells: Cell) -> Finding:
    (found,) = findings(compared(*cells))
    return found


def test_one_seed_says_nothing_about_noise():
    one = (cell("s", "a", areas=(0.9,)), cell("s", "b", areas=(0.1,)))
    found = the_finding(*one)
    assert (found.best, found.beaten, found.level) == (one[0], (), one[1:])
    assert not recommendation(compared(*one)).startswith("Take")


def test_the_best_beyond_noise_is_named_with_what_it_beats():
    good = cell("s", "good", areas=(0.70, 0.71, 0.72))
    near = cell("s", "near", areas=(0.72, 0.66, 0.74))
    bad = cell("s", "bad", areas=(0.40, 0.41, 0.43))
    failed = cell("s", "incomplete", areas=(0.99, 0.99, 0.99), state="failed")
    exact = cell("exact", "none", areas=(0.73, 0.74, 0.75))
    shown = compared(good, near, bad, failed, exact, reference=exact.labels)
    assert findings(shown) == [Finding(("s",), good, (bad,), (near,), (failed,))]
    words = summary(shown)
    assert "0.710 (0.700 to 0.720)" in words[1]
    assert "-0.030" in words[-1]
    assert words[0].startswith("Take one of good and near")
    alone = replace(good, labels=("t", "good"))
    more = compared(
        good,
        near,
        bad,
        alone,
        cell("t", "near", areas=(0.7,), state="failed"),
    )
    assert "shortest steps" in recommendation(more), "failed runs take no time"


def test_accuracy_in_bf16_judges_where_every_last_policy_has_it():
    """A sampler's own accuracy is that of a policy which may have learned for this sampler alone."""
    for_sampler = in_bf16(cell("s", "for_sampler", areas=(0.70, 0.71, 0.72)), 0.1, 0.2, 0.1)
    better = in_bf16(cell("s", "better", areas=(0.40, 0.41, 0.43)), 0.6, 0.7, 0.6)
    found = the_finding(for_sampler, better)
    assert (found.best, found.beaten) == (better, (for_sampler,))
    assert "accuracy in a BF16 engine, 0.633 (0.600 to 0.700)" in str(found)
    assert recommendation(compared(for_sampler, better)).startswith("Take better")
    one_without = replace(
        better, runs=(*better.runs[:-1], cell("s", "better", areas=(0.4,)).runs[0])
    )
    assert the_finding(for_sampler, one_without).best == for_sampler


def test_nothing_is_recommended_where_nothing_differs():
    level = (cell("s", "a", areas=(0.7, 0.5, 0.6)), cell("s", "b", areas=(0.5, 0.7, 0.59)))
    assert the_finding(*level).beaten == ()
    assert "cheapest" in recommendation(compared(*level))


def test_corrections_that_did_the_same_are_named():
    tis = cell("s", "tis", areas=(0.7, 0.6))
    icepop = cell("s", "icepop", areas=(0.7, 0.6))
    other = cell("s", "none", areas=(0.7, 0.5))
    first, last = tis.runs
    slower = replace(last, numbers=last.numbers | {"step_s": 9.0})
    tis = replace(tis, runs=(first, slower))
    assert the_finding(other, tis, icepop).alike == ((tis, icepop),)
    assert the_finding(other, tis).alike == ()


def test_equal_corrections_get_a_hint_where_they_would_differ():
    tis, icepop = (cell("s", name, areas=(0.7,)) for name in ("tis", "icepop"))
    reached = replace(tis, runs=(replace(tis.runs[0], ratios=(0.7, 1.3)),))
    text = str(the_finding(reached, icepop))
    assert "[0.7, 1.3]" in text
    assert "correction.weight.high=1.15" in text
    assert "recipes/first_comparison.yaml" in text
    assert "correction.weight" not in str(the_finding(tis, icepop))


def test_ratios_are_those_of_all_tokens_of_a_run(tmp_path):
    names = ("progress/step", "rollout_corr/rho_min", "rollout_corr/rho_max")
    lines = [
        json.dumps(dict(zip(names, values, strict=True)))
        for values in ((1, 0.8, 1.1), (2, 0.9, 1.4))
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert Result.of(load_run(tmp_path), 1).ratios == (0.8, 1.4)


def test_what_holds_in_one_place_alone_is_not_recommended_for_all():
    first = (cell("s", "a", areas=(0.7, 0.7, 0.71)), cell("s", "b", areas=(0.1, 0.1, 0.12)))
    second = (cell("t", "a", areas=(0.1, 0.1, 0.11)), cell("t", "b", areas=(0.7, 0.7, 0.72)))
    assert "s: a; t: b" in recommendation(compared(*first, *second))
    assert recommendation(compared(*first)).startswith("Take a: ")


def test_the_page_of_recorded_runs(recorded, tmp_path):
    comparison, runs = recorded
    write_comparison(comparison, runs, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert all(run.name in html for run in runs)
    page_itself = re.sub(r"<script\b[^>]*>.*?</script>", "", html, flags=re.S)
    assert not re.search(r"\bsrc\s*=|href\s*=\s*.https?:|@import|url\(", page_itself)


def test_the_curves_of_recorded_runs(recorded):
    comparison, _ = recorded
    lines = {one.name: one for one in curves(comparison, ACCURACY).data if one.name}
    bands = [one for one in curves(comparison, ACCURACY).data if one.fill]
    assert len(bands) == len(lines) == len(comparison.cells)
    for cell in comparison.cells:
        assert list(lines[cell.name].y) == cell.curve(ACCURACY)[1].values


def test_each_place_has_a_chart_beside_the_reference():
    seeds = tuple(
        Result(
            "run",
            seed,
            "finished",
            {},
            {ACCURACY: Series([0, 9], [0.1, 0.2])},
        )
        for seed in (1, 2)
    )
    places = [(place, label) for place in "stuv" for label in ("x", "y")]
    shown = compared(
        *(Cell(labels, seeds) for labels in [*places, ("exact", "z")]), reference=("exact", "z")
    )
    figure = curves(shown, ACCURACY)
    assert len({trace.xaxis for trace in figure.data}) == 4
    assert sum(trace.line.dash == "dash" for trace in figure.data) == 4
    assert [trace.name for trace in figure.data if trace.showlegend] == ["x", "y", "exact / z"]
    assert curves(shown, "rollout_corr/k3_kl") is None


def test_pages_are_written_between_their_markers(recorded, tmp_path):
    comparison, _ = recorded
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    kinds = ("table", "findings", "figure")
    page.write_text(
        "top\n"
        + "".join(f"<!-- tiny: {kind} -->\n{kind} of old\n<!-- /tiny -->\nkept\n" for kind in kinds)
    )
    write_docs(comparison, [page], page.parent, page.parent)
    text = page.read_text()
    assert "of old" not in text
    assert text.count("kept") == 3
    assert "](tiny.svg)" in text
    assert all(f"| {one.labels[-1]} | 2 of 2" in text for one in comparison.cells)
    again = stored(page.parent / "tiny.json")
    # what is stored writes the same words
    assert with_blocks(text, again, page, page.parent) == text
    assert again.cells[0].curve(ACCURACY)[1].steps == comparison.cells[0].curve(ACCURACY)[1].steps


@pytest.mark.parametrize(
    "text",
    ["no marker", "<!-- tiny: tabel -->\n<!-- /tiny -->", "<!-- other: table -->\n<!-- /other -->"],
)
def test_a_page_without_its_markers_is_refused_and_nothing_is_written(recorded, tmp_path, text):
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ConfigError, match=r"page.md: "):
        write_docs(recorded[0], [tmp_path / "page.md"], tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize("name", ["evidence", "evidence_hot", "evidence_full", "one_arithmetic"])
def test_the_numbers_in_the_docs_are_the_commands_own(name):
    """Every block is what recipes/results/NAME.json gives."""
    comparison = stored(ROOT / "recipes" / "results" / f"{name}.json")
    assert comparison.name == name
    texts = {page: page.read_text() for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*/*.md"))}
    shown = {page: text for page, text in texts.items() if f"<!-- {name}: " in text}
    assert shown
    for page, text in shown.items():
        assert with_blocks(text, comparison, page, ROOT / "docs" / "figures") == text
