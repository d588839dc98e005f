"""Which shared memory belongs to a session's processes, and nothing else."""

import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory

import pytest

from megatron_rl.sampler.shared_memory import FOLDER, PROCESSES, remove_segments, segments_of_session

OWNER = """
import mmap, os, sys
names = sys.argv[1:]
maps = [mmap.mmap(os.open("/dev/shm/" + name, os.O_RDWR), 64) for name in names]
print("mapped", flush=True)
sys.stdin.read()
"""


def test_only_what_the_session_has_mapped_is_its_own():
    if not FOLDER.is_dir() or not (PROCESSES / "self").exists():
        pytest.skip("reads /dev/shm and /proc")
    foreign = SharedMemory(create=True, size=64)
    names = ["psm_of_a_test", "vllm_dist_0a-tp:0-[0-1]-cpushm_1", "another_name_of_a_test"]
    for name in names:
        (FOLDER / name).write_bytes(bytes(64))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout.readline() == "mapped\n"
        found = segments_of_session(owner.pid)
        assert found == set(names[:2])
        owner.kill()
        owner.wait(120)
        assert segments_of_session(owner.pid) == set()
        remove_segments(found)
        remove_segments(found)
        assert not any((FOLDER / name).exists() for name in names[:2])
        assert (FOLDER / foreign.name.lstrip("/")).exists()
    finally:
        owner.kill()
        remove_segments(names)
        foreign.close()
        foreign.unlink()
