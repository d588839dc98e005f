"""The report: every section is there, nothing is fetched, several runs stand side by side."""

import json
import re
import shutil
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from rollouts import rollout
from run_factory import make_config, make_run, make_yaml, quiet

from megatron_rl.apps.reports import charts, figures
from megatron_rl.apps.reports.after_run import finish
from megatron_rl.apps.reports.report import headline_numbers, page, write_report
from megatron_rl.apps.reports.run_data import NotARun, config_differences, load_run, load_runs
from megatron_rl.apps.reports.sample_section import spans
from megatron_rl.config.schema import Config, Format, Level, RolloutSection, RolloutSource
from megatron_rl.tracking.record import Recorder
from megatron_rl.tracking.rollout_file import write_rollouts
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.types import Scored

SINGLE = {
    "Reward",
    "Held-out accuracy",
    "Mismatch KL",
    "Effective sample size",
    "Importance ratio",
    "Logprob probe after sync",
    "Where a step's time goes",
    "Weight sync",
    "Weight sync size",
    "Response length",
    "Entropy",
    "Gradient norm",
    "Clipping and rejection",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = [
        make_run(folder, "tis_int8", steps=20),
        make_run(
            folder,
            "none_bf16",
            steps=20,
            level=Level.none,
            fmt=Format.none,
            seed=1,
        ),
    ]
    assert [finish(RunDir(path)) for path in made] == [
        f"report: {path}/report.html" for path in made
    ]
    return made


def panels(html):
    return [unescape(title) for title in re.findall(r"<figcaption><b>(.*?)</b>", html)]


def test_one_run_has_every_section(runs):
    html = (runs[0] / "report.html").read_text()
    assert set(panels(html)) >= SINGLE
    assert "0.310 → " in html
    assert "20 of 20" in html
    assert "sampler INT8" in html
    assert "finished" in html


def test_nothing_is_fetched(runs, tmp_path):
    alone = tmp_path / "r.html"
    write_report(runs, alone)
    assert not from_elsewhere(alone)
    assert alone.stat().st_size > 3_000_000  # plotly.js is inside


def from_elsewhere(path: Path) -> list[str]:
    """Addresses that a page loads."""
    html = re.sub(r"(<script\b[^>]*>).*?</script>", r"\1", path.read_text(), flags=re.S)
    assert not re.search(r"@import|url\(", html)
    return re.findall(r"\b(?:src|href)\s*=\s*'?([^' >]+)", html)


def test_several_runs_stand_side_by_side(runs):
    loaded = load_runs(runs)
    assert config_differences(loaded) == {
        "correction.preset": ["tis", "none"],
        "correction.weight.level": ["token", "none"],
        "quantization.format": ["int8", "none"],
        "quantization.preset": ["int8", "none"],
    }
    html = page(loaded)
    assert "Configuration differences" in html
    assert "quantization.format" in html
    assert "optim.lr</code>" not in html
    reward = charts.curves(loaded, {"reward/sampler_mean": "reward"})
    assert [trace.name for trace in reward.data] == ["tis_int8", "none_bf16"]
    assert len({trace.line.color for trace in reward.data}) == 2
    mean = sum(loaded[0].series("time/update", 1).values) / 20
    split = figures.split(loaded, "time", figures.TIME_PHASES)
    assert all(list(trace.y) == ["tis_int8", "none_bf16"] for trace in split.data)
    (update,) = [trace.x[0] for trace in split.data if trace.name == "update"]
    assert update == pytest.approx(mean)


def test_a_gap_is_drawn_where_a_value_is_not_finite(runs):
    (trace,) = charts.curves([load_run(runs[0])], {"optim/grad_norm": "norm"}).data
    assert trace.y[list(trace.x).index(7)] is None
    assert sum(value is None for value in trace.y) == 1


def test_the_histogram_shows_the_ratios_and_the_clamped_weights(runs):
    run = load_run(runs[0])
    figure = figures.ratio_histogram([run])
    by_name = {trace.name: np.array(trace.y) for trace in figure.data}
    centres = np.array(figure.data[0].x)
    applied = by_name["applied weight"]
    empty = by_name["rho"].min()
    assert by_name["rho"][centres > 2.2].max() > empty
    assert (applied[centres > 2.2] == empty).all()
    assert figure.layout.shapes[0].x0 == 2.0
    assert figures.weight_bounds(load_run(runs[1])) == []


def test_steps_without_a_token_of_both_engines_cost_no_page(runs, tmp_path):
    shutil.copytree(runs[0], tmp_path / "run")
    none = Scored(
        rollout([5], logprobs=[float("nan")]),
        reward=0.0,
    )
    for each in list((tmp_path / "run" / "rollouts").glob("step_*.parquet")):
        write_rollouts(each, [none], prox_logprobs_N=torch.zeros(1))
    run = load_run(tmp_path / "run")
    assert (run.tokens, run.unreadable) == (None, [])


def test_the_cuts_are_shown_where_they_cut(runs):
    """The recorded answers are of several lengths and ages; all ended alike, and in one format."""
    shown = [
        title
        for title in panels((runs[0] / "report.html").read_text())
        if title.startswith("Mismatch by")
    ]
    assert shown == [
        f"Mismatch by {name}" for name in ("probability", "position", "length", "staleness")
    ]
    (trace,) = figures.mismatch_by(
        [load_run(runs[0])],
        "staleness",
        "",
    ).data
    assert list(trace.x) == ["6", "16"]  # steps 10 and 20, all written by version 3
    both = figures.mismatch_by(load_runs(runs), "length", "").data
    assert [list(trace.x) for trace in both] == [["1 to 1", "2 to 3", "4 to 7", "8 to 15"]] * 2
    assert all(noisy > clean for noisy, clean in zip(both[0].y, both[1].y, strict=True))


def test_a_run_that_stopped_at_once_still_has_a_report(tmp_path):
    config = make_config()
    recorder = Recorder(
        config.log,
        make_yaml(config, "short"),
        tmp_path / "short",
        5,
        quiet(5),
    )
    recorder.log(0, {})
    recorder.close("failed", "ValueError: <no> & more")
    assert finish(recorder.run)
    html = (tmp_path / "short/report.html").read_text()
    assert "ValueError: &lt;no&gt; &amp; more" in html
    assert panels(html) == []
    assert headline_numbers(load_run(tmp_path / "short"))["Steps"] == "0 of 5"


def test_a_failing_report_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.apps.reports.report.page", lambda runs: 1 / 0)
    assert finish(RunDir(tmp_path)) == ""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert finish(RunDir(tmp_path)).startswith("report.html was not written")


def test_a_supervised_run_shows_no_mismatch(tmp_path):
    config = Config(rollout=RolloutSection(source=RolloutSource.dataset))
    with Recorder(
        config.log, make_yaml(config, "warm"), tmp_path / "warm", 2, quiet(2)
    ) as recorder:
        for step in (1, 2):
            recorder.log(
                step,
                {
                    "loss/total": 1.0,
                    "rollout_corr/kl": 0.0,
                    "reward/mean": 1.0,
                    "eval/accuracy": 0.1,
                },
            )
    assert finish(recorder.run)
    shown = panels((tmp_path / "warm/report.html").read_text())
    assert shown[:2] == ["Loss", "Held-out accuracy"]
    assert not {"Reward", "Mismatch KL"} & set(shown)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(NotARun, match=str(tmp_path)):
        write_report([tmp_path], tmp_path / "r.html")


def test_runs_of_the_same_name_are_distinguished(runs, tmp_path):
    twin = tmp_path / runs[0].name
    twin.mkdir()
    (twin / "metrics.jsonl").write_text(json.dumps({"progress/step": 0}) + "\n")
    assert [run.name for run in load_runs([runs[0], twin])] == [str(runs[0]), str(twin)]


def test_an_answer_of_many_tokens_is_shown_by_its_ends():
    shown = list(spans([f"t{n}," for n in range(20_000)], [0.0] * 20_000))
    text = "".join(one.text for one in shown)
    assert "t119," in text
    assert "t120," not in text
    assert "19,600 tokens" in text
    assert len(shown) == 400 + 1
