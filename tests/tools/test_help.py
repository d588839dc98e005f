"""Every tool says how it is used, and does nothing else then."""

import os
import sys
from pathlib import Path

import pytest
from preloaded import run

ROOT = Path(__file__).parent.parent.parent
TOOLS = [path.relative_to(ROOT) for path in sorted((ROOT / "tools").rglob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("tool", TOOLS, ids=str)
def test_a_tool_says_how_it_is_used(tool: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / tool), "--help"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    done = run("megatron", command, cwd=tmp_path, env=env, timeout=240)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.startswith(f"usage: {tool.name} "), done.stdout[:200]
    assert not list(tmp_path.iterdir())
