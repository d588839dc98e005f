"""Every tool prints its usage for --help, and writes nothing."""

import os
from pathlib import Path

import pytest
from preloaded import said

ROOT = Path(__file__).parent.parent.parent
TOOLS = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "tools").rglob("*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("tool", TOOLS, ids=str)
def test_a_tool_says_how_it_is_used(tool: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    usage = said("megatron", [ROOT / tool, "--help"], cwd=tmp_path, env=env)
    assert usage.startswith(f"usage: {tool.name} "), usage[:200]
    assert not list(tmp_path.iterdir())
