"""Console output: one plain line per step, or a live table on a terminal."""

import math
import os
from io import StringIO
from itertools import repeat
from pathlib import Path

import torch
from rich.console import Console
from rollouts import rollout
from run_factory import make_run

from megatron_rl.apps.reports.report import page
from megatron_rl.apps.reports.run_data import load_runs
from megatron_rl.logs import configure
from megatron_rl.tracking import console
from megatron_rl.tracking.rollout_file import read_rollouts, recorded_steps
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.types import Prompt, Scored, Verdict

METRICS = {
    "reward/mean": 0.25,
    "reward/sampler_mean": 0.5,
    "optim/grad_norm": math.nan,
    "time/step": 1.5,
}


def live(steps: int, stream: StringIO) -> console.LiveDisplay:
    return console.LiveDisplay("quick", steps, Console(file=stream, force_terminal=True, width=100))


def test_a_pipe_gets_log_lines():
    stream = StringIO()
    display = console.choose_display("run", 20, stream)
    assert isinstance(display, console.PlainDisplay)
    display.phase("rollout")
    display.step(3, METRICS, 75.0)
    display.note("a line")
    display.close()
    assert stream.getvalue() == "a line\n"
    line = console.step_line(3, 20, METRICS, 75.0)
    assert line == "step  3/20  reward 0.500  grad nan  1.50 s  left 1m15s"


def test_a_terminal_gets_a_table_and_keeps_the_notes():
    stream = StringIO()
    display = live(20, stream)
    display.phase("rollout")
    display.note("a [bold] note")
    for step in (1, 2):
        display.step(step, {**METRICS, "reward/sampler_mean": step / 2}, 60.0)
    display.close()
    shown = stream.getvalue()
    assert "a [bold] note" in shown
    assert "step 2/20" in shown
    assert "reward" in shown
    assert "▁█" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_mismatch_of_older_answers_is_said_to_be_staleness() -> None:
    measured = {"rollout_corr/k3_kl": 0.035, "rollout/staleness_mean": 1.5}
    assert "3.50e-02 (staleness: 1.5 steps)" in console.step_line(1, 5, measured, None)
    assert (
        console.step_line(1, 5, {"reward/sampler_mean": -1.5e29}, None)
        == "step 1/5  reward -1.500e+29"
    )
    assert "staleness" not in console.step_line(
        1, 5, {**measured, "rollout/staleness_mean": 0.0}, None
    )
    stream = StringIO()
    display = live(5, stream)
    display.step(1, measured, None)
    display.close()
    assert "3.50e-02 (staleness: 1.5 steps)" in stream.getvalue()


def test_sparkline():
    assert console.sparkline([0.0, 1.0]) == "▁█"
    assert console.sparkline([2.0, 2.0]) == "▅▅"
    assert console.sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert console.sparkline([math.nan]) == " "


def test_duration():
    assert [console.duration(s) for s in (0.4, 59.6, 61, 3600 * 2 + 61)] == [
        "0s",
        "1m00s",
        "1m01s",
        "2h01m",
    ]


def test_a_table_puts_numbers_to_the_right() -> None:
    rows = [["a", "text", "10.5%", "+1e-3"], ["longer", "t", "9%", ""]]
    lines = console.table(["name", "shape", "share", "change"], rows)
    assert lines == [
        "name    shape  share  change",
        "a       text   10.5%   +1e-3",
        "longer  t         9%",
    ]
    assert console.table(["name", "shape"], []) == ["name  shape"]


# the few answers that people are shown


def answer(text: str, verdict: Verdict, prompt: str = "1+1=") -> Scored:
    one = rollout(tuple(map(ord, text)), prompt=Prompt(0, (1,), prompt, {}))
    return Scored(one, float(verdict == Verdict.right), None, text, verdict)


def test_a_right_one_another_and_the_one_that_differs_most() -> None:
    scored = [
        answer(text, Verdict.wrong if text != "2" else Verdict.right)
        for text in ("3", "4", "2", "5")
    ]
    prox_N = torch.tensor([-1.0, -1.0, -1.0, -3.0])
    assert console.choose(scored, prox_N) == [2, 0, 3]
    assert console.choose(scored, None) == [2, 0]
    assert console.choose(scored[:1], torch.tensor([float("nan")])) == [0]
    assert console.choose([], None) == []


def test_a_line_has_the_ends_of_long_texts() -> None:
    said = console.sample_line(answer("so\n2", Verdict.no_answer, prompt="x" * 500 + "1+1="))
    assert "x1+1=' -> 'so 2'" in said
    assert len(said) < 120


def test_recorded_pieces_are_those_of_the_answer_and_on_the_page(tmp_path) -> None:
    run = make_run(tmp_path, "one", steps=20)
    rows = read_rollouts(recorded_steps(RunDir(run).rollouts)[0][1]).to_pylist()
    shown = [row for row in rows if row["pieces"]]
    assert 2 <= len(shown) <= 3
    assert {row["verdict"] for row in shown} >= {"right", "wrong"}
    assert all(row["pieces"] == [f"<{token}>" for token in row["token_ids"]] for row in shown)
    html = page(load_runs([run]))
    assert html.count("<section class='answer") >= 4
    first = shown[0]
    d = first["prox_logprobs"][0] - first["sampler_logprobs"][0]
    colour = "232,113,10" if d < 0 else "37,99,235"
    strength = f"{min(1.0, abs(d) / 0.5):.2f}"
    token = first["token_ids"][0]
    assert (
        f"<span style='background:rgba({colour},{strength})' title='d "
        f"{d:+.4f}'>&lt;{token}&gt;</span>" in html
    )


def test_a_silent_run_says_what_it_is_at(tmp_path: Path) -> None:
    now = 1000.0
    stream = StringIO()
    phases = repeat("rollout")
    (tmp_path / "sampler.log").write_text(
        "(Main pid=1) INFO 11-25 17:36:48 [runner.py:68] Starting\n"
        "WARNING 11-25 17:36:48 [a.py:1] odd\n"
    )
    silence = console.Silence(tmp_path, stream, lambda: now)
    configure(stream)

    def said(at: float) -> str:
        nonlocal now
        now = at
        before = len(stream.getvalue())
        silence.look(lambda: next(phases))
        return stream.getvalue()[before:].rpartition(" INFO launcher: ")[2]

    assert said(1009) == ""
    assert said(1010) == "engines start, 10s; vLLM: Starting\n"
    assert said(1019) == ""
    assert said(1020) == "engines start, 20s; vLLM: Starting\n"
    (tmp_path / "driver.log").write_text("... INFO run: runs/x\n... INFO train: step 0/3\n")
    os.utime(tmp_path / "driver.log", (1025, 1025))
    assert said(1030) == ""  # the driver has just said something
    assert said(1035) == "rollout, 10s\n"
    assert said(1040) == ""  # a long step is logged less and less often
    assert said(1045) == "rollout, 20s\n"
    assert said(1060) == ""
    assert said(1065) == "rollout, 40s\n"
