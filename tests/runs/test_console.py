"""What a person sees: one plain line per step, or a live table on a terminal."""

import math
from io import StringIO

from rich.console import Console

from megatron_rl.runs.console import LiveDisplay, PlainDisplay, choose_display, duration, sparkline, step_line, table

METRICS = {"reward/mean": 0.25, "reward/sampler_mean": 0.5, "optim/grad_norm": math.nan, "time/step": 1.5}


def test_a_pipe_gets_one_plain_line_per_step():
    stream = StringIO()
    display = choose_display("run", 20, stream)
    assert isinstance(display, PlainDisplay)
    display.phase("rollout")
    display.step(3, METRICS, 75.0)
    display.close()
    assert stream.getvalue() == "step  3/20  reward 0.500  grad nan  1.50 s  left 1m15s\n"


def test_a_terminal_gets_a_table_and_keeps_the_notes():
    stream = StringIO()
    display = LiveDisplay("quick", 20, Console(file=stream, force_terminal=True, width=100))
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


def test_the_line_leaves_out_what_a_step_does_not_have():
    assert step_line(5, 5, {}, None) == "step 5/5"


def test_sparkline():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([2.0, 2.0]) == "▅▅"
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert sparkline([math.nan]) == " "


def test_duration():
    assert [duration(s) for s in (0.4, 59.6, 61, 3600 * 2 + 61)] == ["0s", "1m00s", "1m01s", "2h01m"]


def test_a_table_puts_numbers_to_the_right() -> None:
    lines = table(["name", "shape", "share", "change"], [["a", "text", "10.5%", "+1e-3"], ["longer", "t", "9%", ""]])
    assert lines == [
        "name    shape  share  change",
        "a       text   10.5%   +1e-3",
        "longer  t         9%",
    ]
