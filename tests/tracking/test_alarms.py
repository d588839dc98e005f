"""Alarms: quiet on healthy runs, loud on broken ones, and no flicker in between."""

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import refusal
from hypothesis import given
from hypothesis import strategies as st
from run_factory import start

from megatron_rl.apps.reports.overview import describe
from megatron_rl.apps.reports.report import page, raised_alarms
from megatron_rl.apps.reports.run_data import load_run
from megatron_rl.config import from_mapping, load
from megatron_rl.config.choices import Alarm, AlarmSetting
from megatron_rl.config.schema import Config, Format, LogSection, Wandb
from megatron_rl.tracking.alarms import FULL, LENGTH, MISMATCH, RULES, Alarms, bound_of, clear_at
from megatron_rl.tracking.metrics import METRICS
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.status import read_status

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
ESS = "rollout_corr/rollout_is_eff_sample_size"
ACCURACY = "eval/accuracy"
HEALTHY = {
    MISMATCH: 0.002,
    ESS: 0.99,
    LENGTH: 200.0,
    "rollout_corr/non_finite_sampler": 0.0,
    "rollout_corr/non_finite_learner": 0.0,
    "rollout/tokens": 4000.0,
    "rollout/n": 512.0,
    "rollout/truncated_fraction": 0.1,
    "reward/errors": 0.0,
    "optim/skipped": 0.0,
    "optim/updates": 4.0,
    "loss/entropy": 0.4,
    "sync/probe_abs_diff": 0.03,
    "sync/probe_budget": 0.08,
    ACCURACY: 0.5,
    "eval/accuracy_stderr": 0.03,
    "eval/n": 256.0,
    "progress/failed_saves": 0.0,
}
BROKEN = {
    Alarm.mismatch: {MISMATCH: 0.03},
    Alarm.probe: {"sync/probe_abs_diff": 0.09},
    Alarm.ess: {ESS: 0.4},
    Alarm.non_finite: {"optim/skipped": 2.0, "optim/updates": 2.0},
    Alarm.entropy: {"loss/entropy": 0.005},
    Alarm.reward_errors: {"reward/errors": 60.0},
    Alarm.truncated: {"rollout/truncated_fraction": 0.6},
    Alarm.length: {LENGTH: 450.0},
    Alarm.accuracy: {ACCURACY: 0.2},
    Alarm.failed_saves: {"progress/failed_saves": 3.0},
}


def steps(changes: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {**HEALTHY, **change, "progress/step": number} for number, change in enumerate(changes, 1)
    ]


def heard(alarms: Alarms, lines: Iterable[dict[str, float]]) -> list[tuple[str, bool, int]]:
    """Alarms of these lines of metrics: name, raised or cleared, step."""
    return [(str(one.alarm), one.raised, one.step) for line in lines for one in alarms.after(line)]


def said(alarms: Alarms, changes: Sequence[dict[str, float]]) -> list[tuple[str, bool, int]]:
    return heard(alarms, steps(changes))


def test_every_alarm_has_a_rule_and_a_case() -> None:
    assert set(RULES) == set(BROKEN) == set(Alarm)
    for change in (HEALTHY, *BROKEN.values()):
        assert change.keys() <= METRICS.keys()


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("toy_sft", Format.int8),
        ("quickstart", Format.int8),
        ("tools", Format.int8),
        ("quickstart_bf16", Format.none),
    ],
)
def test_the_defaults_are_quiet_on_recorded_runs(name: str, format: Format) -> None:
    """Metrics of the shipped recipes, as they were run."""
    lines = read_metrics(RECORDED / f"{name}.jsonl")
    assert len(lines) > 20
    assert heard(Alarms({}, [format], sampled=name != "toy_sft"), lines) == []


def test_the_defaults_are_loud_on_a_broken_run() -> None:
    """quickstart_bf16 with weights that reach the sampler every 30 steps, and a learning rate that
    moves them far.
    """
    found = heard(Alarms(), read_metrics(RECORDED / "stale.jsonl"))
    assert found == [("mismatch", True, 6), ("ess", True, 6)]


def test_a_real_run_that_went_wrong() -> None:
    """The quickstart with 32 prompts and ten times the learning rate."""
    found = heard(Alarms({}, [Format.int8]), read_metrics(RECORDED / "collapsed.jsonl"))
    assert [(alarm, step) for alarm, raised, step in found if raised] == [
        ("accuracy", 4),
        ("truncated", 24),
    ]


@pytest.mark.parametrize("alarm", list(Alarm))
def test_each_alarm_is_raised_by_its_case_alone(alarm: Alarm) -> None:
    rule = RULES[alarm]
    bad = BROKEN[alarm]
    before = [{}] * FULL
    after = [{}] * (2 * rule.steps)
    found = said(Alarms({}, [Format.int8]), [*before, *[bad] * rule.steps, *after])
    raised_at = FULL + rule.steps
    assert found == [(alarm, True, raised_at), (alarm, False, raised_at + rule.steps)]
    assert said(Alarms({}, [Format.int8]), [*before, *[bad] * (rule.steps - 1), *after]) == []
    assert said(Alarms({alarm: "off"}, [Format.int8]), [*before, *[bad] * 30]) == []


def test_what_is_no_number_is_beyond_every_bound() -> None:
    assert said(Alarms(), [{ESS: math.nan}] * 5) == [("ess", True, 5)]
    assert said(Alarms(), [{MISMATCH: math.nan}] * 5) == [("mismatch", True, 5)]


def test_a_step_that_does_not_measure_counts_neither_way() -> None:
    lines = steps([{ESS: 0.1}] * 7)
    for step in (3, 5):
        del lines[step - 1][ESS]
    assert heard(Alarms(), lines) == [("ess", True, 7)]


def test_medians_wait_until_they_are_full() -> None:
    """So that the first steps of an attempt, also of one that goes on with a run, raise nothing."""
    jump = {LENGTH: 450.0}
    assert said(Alarms(), [*[{}] * (FULL - 4), *[jump] * 5]) == []
    assert said(Alarms(), [*[{}] * FULL, *[jump] * 5]) == [("length", True, FULL + 5)]


def test_the_gate_is_that_of_the_format_unless_the_recipe_has_one() -> None:
    for formats, bound in (
        ([Format.none], 0.005),
        ([Format.none, Format.fp8], 0.02),
        (["int8"], 0.02),
    ):
        (watch,) = (one for one in Alarms({}, formats)._watches if one.alarm == Alarm.mismatch)
        assert watch.bound == bound
    assert (
        bound_of(
            RULES[Alarm.mismatch],
            AlarmSetting(bound=0.5),
            [Format.none],
        )
        == 0.5
    )


def test_responses_of_the_data_set_have_three_alarms() -> None:
    alarms = Alarms(sampled=False)
    assert {watch.alarm for watch in alarms._watches} == {
        Alarm.non_finite,
        Alarm.accuracy,
        Alarm.failed_saves,
    }


def evaluated(
    alarms: Alarms, *rates: float, n: int = 256, name: str = ACCURACY
) -> list[tuple[str, bool, int]]:
    lines = [
        {"progress/step": step, name: rate, f"{name[:-8]}n": n} for step, rate in enumerate(rates)
    ]
    return heard(alarms, lines)


def test_an_accuracy_below_its_start_or_half_of_its_best() -> None:
    assert evaluated(Alarms(), 0.36, 0.07, 0.12, n=100) == [("accuracy", True, 1)]
    assert evaluated(Alarms(), 0.5, 0.3, 0.3, 0.5) == [
        ("accuracy", True, 1),
        ("accuracy", False, 3),
    ]
    assert evaluated(Alarms(), 0.1, 0.9, 0.25) == [("accuracy", True, 2)], "above its start"
    assert evaluated(Alarms(), 0.1, 0.9, 0.6) == []
    assert evaluated(Alarms(), 0.3, 0.1, name="eval/aime/accuracy", n=960) == [
        ("accuracy", True, 1)
    ]


@pytest.mark.parametrize(
    ("rates", "n"),
    [
        ((0.36, 0.07, 0.1), 8),
        ((0.0, 0.03, 0.0), 64),
    ],
)
def test_what_few_prompts_cannot_tell_raises_nothing(rates: tuple[float, ...], n: int) -> None:
    assert evaluated(Alarms(), *rates, n=n) == []


def test_where_a_run_goes_on_its_accuracies_are_those_of_all_attempts() -> None:
    earlier = [
        {"progress/step": step, ACCURACY: rate, "eval/n": 256}
        for step, rate in enumerate((0.5, 0.9, 0.99))
    ]
    alarms = Alarms()
    alarms.restore(earlier, step=1)
    assert (alarms.past.first[ACCURACY].value, alarms.past.best[ACCURACY].value) == (0.5, 0.9)
    assert evaluated(alarms, 0.2) == [("accuracy", True, 0)]


# hysteresis, as properties of one rule with any bound

RULE = RULES[Alarm.ess]
SERIES = st.lists(st.floats(0, 1) | st.just(math.nan), max_size=80)


def only(bound: float) -> dict[str, object]:
    return dict.fromkeys(Alarm, "off") | {"ess": bound}


@given(SERIES, st.floats(0.01, 1))
def test_raised_and_cleared_take_turns_and_need_their_steps(
    series: list[float], bound: float
) -> None:
    found = said(Alarms(only(bound)), [{ESS: value} for value in series])
    assert [raised for _, raised, _ in found] == [number % 2 == 0 for number in range(len(found))]
    places = [0, *(step for _, _, step in found)]
    assert all(later - earlier >= RULE.steps for earlier, later in pairwise(places))
    for _, raised, step in found:
        run = series[step - RULE.steps : step]
        clear = clear_at(bound, below=True)
        assert (
            all(not value >= bound for value in run)
            if raised
            else all(value >= clear for value in run)
        )


@given(st.lists(st.floats(0.5, 0.62), max_size=60), st.integers(0, 1))
def test_wavering_about_the_bound_raises_once(tail: list[float], offset: int) -> None:
    """Between the bound and where it clears, nothing changes: raised or not."""
    start = [{ESS: 0.4}] * (RULE.steps - offset)
    found = said(Alarms(only(0.5)), [*start, *({ESS: value} for value in tail)])
    assert [raised for _, raised, _ in found] == [True] * (1 - offset)


@given(st.floats(0, 1))
def test_to_clear_is_possible_and_stricter_than_the_bound(bound: float) -> None:
    assert bound <= clear_at(bound, below=True) <= 1
    assert 0 <= clear_at(bound, below=False) <= bound


# what a recipe says


@pytest.mark.parametrize(
    ("value", "raised", "stops"),
    [
        ("warn", True, False),
        ("stop", True, True),
        ("off", False, False),
        (False, False, False),
        (0.3, False, False),
        ({"stop": 0.45}, True, True),
        ({"warn": 0.3}, False, False),
    ],
)
def test_settings(value: object, raised: bool, stops: bool) -> None:
    from_mapping({"log": {"alarms": {"ess": value}}})
    alarms = Alarms({"ess": value})
    assert bool(said(alarms, [{ESS: 0.4}] * 5)) == raised
    assert (alarms.stop is not None) == stops
    assert not stops or alarms.stop.startswith("alarm ess: 0.4, below ")


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"es": "warn"}, ["log.alarms.es", "did you mean ess?", "mismatch, probe"]),
        ({"ess": "loud"}, ["log.alarms.ess is loud", "off, warn, stop"]),
        ({"ess": -1}, ["log.alarms.ess is -1", "0 or more"]),
        ({"ess": {"stop": 0.1, "warn": 0.2}}, ["log.alarms.ess"]),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, given_: dict[str, object], words: list[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"log": {"alarms": given_}}))
    said = refusal(load, tmp_path / "mine.yaml")
    assert all(word in said for word in words), said


# where they are heard


def recorded(
    folder: Path, changes: Sequence[dict[str, float]], alarms: Alarms, log: LogSection | None = None
) -> Path:
    with start(
        folder / "run",
        Config(log=log or LogSection()),
        99,
        alarms=alarms,
    ) as recorder:
        for line in steps(changes):
            recorder.log(int(line["progress/step"]), line)
            if alarms.stop:
                recorder.end_early(alarms.stop, asked=True)
                break
    return folder / "run"


def test_where_an_alarm_is_heard(tmp_path: Path) -> None:
    changes = [
        *[{ESS: 0.4}] * 6,
        *[{}] * 6,
        *[{"reward/errors": 60.0}] * 4,
    ]
    run = recorded(tmp_path, changes, Alarms(), LogSection(wandb=Wandb.offline))
    text = (run / "logs/attempt_1/driver.log").read_text()
    assert text.count("WARNING alarm: ess: 0.4") == 1
    assert text.count("WARNING alarm: ess: 0.99, cleared") == 1
    assert text.index("step  5/99") < text.index("alarm: ess: 0.4") < text.index("step  6/99")
    assert "reward_errors since step 15" in text
    assert "reward_errors, step 15" in describe(run)
    assert read_status(run)["alarms"] == {
        "reward_errors": {"step": 15, "value": "0.117", "bound": 0.05}
    }
    data = load_run(run)
    found = [(news.alarm, steps) for news, steps in raised_alarms(data)]
    assert found == [("ess", "5 to 11"), ("reward_errors", "from 15")]
    html = page([data])
    assert "<h2>Alarms</h2>" in html
    assert RULES[Alarm.ess].action in html
    assert "<h2>Alarms</h2>" in page([data, data])
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    assert b"run: ess" in file.read_bytes()


def test_an_alarm_may_end_the_run(tmp_path: Path) -> None:
    run = recorded(
        tmp_path,
        [{ESS: 0.4}] * 20,
        Alarms({"ess": "stop"}),
    )
    status = read_status(run)
    assert (status["state"], status["step"]) == ("stopped", 5)
    assert "alarm ess: 0.4" in status["reason"]


def test_a_report_lists_none_of_a_healthy_run_or_of_an_incomplete_configuration(
    tmp_path: Path,
) -> None:
    assert "<h2>Alarms</h2>" not in page(
        [load_run(recorded(tmp_path / "healthy", [{}] * 8, Alarms()))]
    )
    run = recorded(tmp_path, [{ESS: 0.4}] * 8, Alarms())
    incomplete = (
        "log: {alarms: {ess: [1]}}",
        "sampler: {formats: [[1]]}",
        "quantization: {format: {}}",
        "log: 3",
    )
    for text in incomplete:
        (run / "config.yaml").write_text(text)
        assert page([load_run(run)])
