"""Ctrl-C while a program imports: exit status 130 and no traceback, at any import."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
INSIDE = f"exec({INTERRUPT!r})"  # as of a dataclass
HIDDEN = f"try: {INTERRUPT}\nexcept BaseException: raise ImportError"
STATUS = "-m megatron_rl.cli status RUN"


@pytest.mark.fault("Ctrl-C in the first second of a command", "exit status 130, no traceback")
@pytest.mark.parametrize(
    ("module", "text", "words"),
    [
        ("yaml", HIDDEN, STATUS),
        ("rich", INSIDE, STATUS),
        ("psutil", INTERRUPT, "tools/convert.py"),
    ],
)
def test_an_interrupted_import(tmp_path: Path, module: str, text: str, words: str) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    # a shell that runs the tests in the background has SIGINT ignored
    environment = ["env", "--default-signal=INT", f"PYTHONPATH={tmp_path}:{ROOT}"]
    command = [*environment, sys.executable, *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "")
