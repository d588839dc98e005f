"""Closed pipes and terminals; escape sequences in a run's files are printed as text."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_factory import make_run

from megatron_rl import cli
from megatron_rl.processes.process import printable

ROOT = Path(__file__).parent.parent
MEGATRON_RL = (sys.executable, "-m", "megatron_rl.cli")
SPEAKER = """
import sys
from megatron_rl.processes.process import best_effort_output
from megatron_rl.tracking.console import choose_display
with best_effort_output():
    display = choose_display("run", 3)
    sys.stdin.readline()
    for step in range(3):
        display.step(step, {"time/step": 1.0}, None)
        display.note("a note")
        print("said", file=sys.stderr, flush=True)
    display.close()
    open(sys.argv[1], "w").write("went on")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), "run", steps=10)


@pytest.mark.fault(
    "the reader of a command's output is gone", "the command ends without a traceback"
)
@pytest.mark.parametrize(
    "words",
    [
        ["train", "--help"],
        ["train", "RECIPE", "--print-config"],
        ["replay", "RUN", "--corrections", "none"],
        ["train", "RECIPE", "optim.lr=x"],
    ],
)
def test_a_closed_pipe_is_no_error(run: Path, words: list[str]) -> None:
    names = {"RECIPE": str(ROOT / "recipes" / "quickstart.yaml"), "RUN": str(run)}
    reader, writer = os.pipe()
    os.close(reader)
    command = [*MEGATRON_RL, *(names.get(word, word) for word in words)]
    done = subprocess.run(
        command,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
    assert done.returncode == (2 if "optim.lr=x" in words else 0)


@pytest.mark.fault(
    "a terminal is closed while SIGHUP is ignored", "what runs there goes on to its end"
)
def test_a_closed_terminal_is_no_error(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SPEAKER, str(tmp_path / "end")],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(theirs)
    os.close(ours)
    process.communicate(b"\n", timeout=120)
    assert process.returncode == 0
    assert (tmp_path / "end").read_text() == "went on"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


EVIL = "\x1b[2J\x1b]0;owned\x07\x9b2J\u202e"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\x9b2J\u202e"


@pytest.mark.parametrize(
    ("text", "shown"),
    [(EVIL, SHOWN), ("\x1b[1;31mred\x1b[0m\r\ud800", r"red\r\ud800"), ("a\tb\n▁é日", "a\tb\n▁é日")],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.fault("a run of another's holds escape sequences", "none of them reaches the terminal")
@pytest.mark.parametrize("command", ["status", "replay", "watch"])
def test_escape_sequences_of_a_run(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / f"run{EVIL}"
    terminal = Terminal()
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    for name in ("checkpoints/step_1/checkpoint.json", "config.yaml"):
        (run / name).write_text(EVIL)
    (run / "status.json").write_text(
        json.dumps({"state": "failed", "reason": EVIL, "alarms": {EVIL: EVIL}})
    )
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    cli.main([command, str(run)])
    said = terminal.getvalue()
    assert SHOWN in said
    assert not {*"\x07\x9b\u202e"} & {*said}
    assert ("\x1b[?25l" in said) == (command == "watch"), "what is drawn is drawn"
