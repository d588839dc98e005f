"""Nobody listens: a command whose output is cut off ends without a word, and a run goes on."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_factory import make_run

ROOT = Path(__file__).parent.parent
MEGATRON_RL = (sys.executable, "-m", "megatron_rl.cli")
SPEAKER = """
import sys
from megatron_rl.processes.process import best_effort_output
from megatron_rl.runs.console import choose_display
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


@pytest.mark.fault("the reader of a command's output is gone", "the command ends without a traceback")
@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["train", "--help"], ["plan", "conf/model/Qwen3-8B.json"], ["train", "RECIPE", "--print-config"],
        ["report", "RUN"], ["replay", "RUN", "--corrections", "none"], ["train", "RECIPE", "optim.lr=x"],
    ],
)  # fmt: skip
def test_a_closed_pipe_is_no_error(run: Path, words: list[str]) -> None:
    names = {"RECIPE": str(ROOT / "recipes" / "quickstart.yaml"), "RUN": str(run)}
    reader, writer = os.pipe()
    os.close(reader)
    command = [*MEGATRON_RL, *(names.get(word, word) for word in words)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120, check=False)
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
    assert done.returncode == (2 if "optim.lr=x" in words else 0)


@pytest.mark.fault("a terminal is closed while SIGHUP is ignored", "what runs there goes on to its end")
def test_a_closed_terminal_is_no_error(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SPEAKER, str(tmp_path / "end")],
        stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, cwd=ROOT,
        env=os.environ | {"TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    os.close(theirs)
    os.close(ours)
    process.communicate(b"\n", timeout=120)
    assert process.returncode == 0
    assert (tmp_path / "end").read_text() == "went on"
