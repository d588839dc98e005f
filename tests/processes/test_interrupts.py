"""Ctrl-C while a program imports: exit status 130 and no traceback, whatever was being imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
COMMAND = ["-m", "megatron_rl.cli", "status", "RUN"]


@pytest.mark.fault("Ctrl-C in the first second of a command", "exit status 130, no traceback")
@pytest.mark.parametrize(
    ("module", "text", "words"),
    [
        ("psutil", INTERRUPT, COMMAND),
        ("yaml", f"exec({INTERRUPT!r})", COMMAND),
        ("yaml", f"try: {INTERRUPT}\nexcept BaseException: raise ImportError", COMMAND),
        ("rich", INTERRUPT, COMMAND),  # by the command itself
        ("rich", f"exec({INTERRUPT!r})", COMMAND),  # as of a dataclass
        ("pyarrow", INTERRUPT, ["tools/prepare_data.py", "gsm8k", "ROWS", "-o", "made.parquet"]),
        ("psutil", INTERRUPT, ["tools/convert.py", "inspect", "RUN"]),
        ("omegaconf", INTERRUPT, ["tools/compare_corrections.py", "--help"]),
    ],
)
def test_an_interrupted_import(tmp_path: Path, module: str, text: str, words: list[str]) -> None:
    (tmp_path / f"{module}.py").write_text(text)
    around = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=around, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr
