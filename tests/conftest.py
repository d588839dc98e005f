"""Before anything loads torch: threads that wait let others run, so that the tests bear a busy machine."""

import os
from pathlib import Path

import pytest

from megatron_rl.data.toy import write_toy
from megatron_rl.process import SHORT_SPIN, collect_rarely

for name, value in SHORT_SPIN.items():
    os.environ.setdefault(name, value)
collect_rarely()

ROOT = Path(__file__).parent.parent


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the toy, and a recipe that could run there."""
    monkeypatch.chdir(tmp_path)
    write_toy(tmp_path / "data" / "toy")
    (tmp_path / "mine.yaml").write_text(f"base: {ROOT}/recipes/toy_sft.yaml\n")
    return tmp_path
