"""The kernel's count of out-of-memory kills: 0 where the kernel has no counter."""

import os
from pathlib import Path

import pytest
from helpers import program

from megatron_rl.processes.job import memory_kills

V1 = Path("/sys/fs/cgroup/memory")
GROUP = V1 / "megatron-rl-test"
GREEDY = """
import os, subprocess, sys
from pathlib import Path
from megatron_rl.processes.job import memory_kills
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
before = memory_kills()
code = subprocess.run([sys.executable, "-c", "x = b'x' * (1 << 30)"]).returncode
print(code, memory_kills() > before)
"""


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ("0::/a/b\n", "a/b/memory.events"),
        ("0::/\n", "memory.events"),
        ("4:cpu,memory:/job_1/step_0\n0::/\n", "memory/job_1/step_0/memory.oom_control"),
        ("4:memory:/docker/81\n", "memory/memory.oom_control"),  # seen from inside
    ],
)
def test_where_the_count_is(tmp_path: Path, lines: str, place: str) -> None:
    (tmp_path / "own").write_text(lines)
    assert memory_kills(tmp_path, tmp_path / "own") == 0
    counter = tmp_path / place
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text("low 0\noom 5\noom_kill 3\noom_group_kill 0\n")
    assert memory_kills(tmp_path, tmp_path / "own") == 3
    assert memory_kills(tmp_path, tmp_path / "none") == 0


@pytest.mark.skipif(
    not os.access(V1, os.W_OK), reason="needs the right to make a group of the first version"
)
@pytest.mark.fault(
    "the kernel ends a process because its group's memory is used up", "its count says so"
)
def test_a_group_that_is_too_small() -> None:
    GROUP.mkdir()
    try:
        (GROUP / "memory.limit_in_bytes").write_text(str(200 << 20))
        assert program(GREEDY, GROUP) == "-9 True\n"
    finally:
        GROUP.rmdir()
