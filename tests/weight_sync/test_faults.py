"""Faults of the sending side, with real processes and a real file system: named, bounded, nothing
left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spawned import TIMEOUT_S, run_ranks

from megatron_rl.weight_sync.file_transport import GRACE_S, SyncDir

VERSION_KIB = 900  # of the model that is sent


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1], ids=["the_writer", "another_rank"])
def test_a_rank_killed_in_mid_write_ends_the_others_soon(tmp_path: Path, victim: int) -> None:
    folder = tmp_path / "sync"
    codes, results = run_ranks("fault_rank", tmp_path, folder, victim)
    assert codes == ([-9, 0] if victim == 0 else [0, -9])
    survivor = results[1 - victim]
    assert "another rank" in survivor["message"]
    if victim == 1:
        assert survivor["calls"] == ["init", "start", "update", "finish 1"]
        assert list(folder.iterdir()) == []
        return
    (left,) = folder.iterdir()
    assert list(left.glob("v00000002/*.bin"))
    assert not list(left.glob("v00000002/manifest*"))
    old = left.stat().st_mtime - 2 * GRACE_S
    os.utime(left, (old, old))
    following = SyncDir(str(folder))
    assert not left.exists()
    following.close()


def test_a_disk_that_fills_up_is_named_and_the_next_version_arrives(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs a file system of its own: unshare is not here")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = Path(__file__).with_name("fault_rank.py")
    mount = f"mount -t tmpfs -o size={2 * VERSION_KIB}k tmpfs {disk} || exit 77"
    command = f"{mount}; exec {sys.executable} {script} {disk}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("this user may not mount a file system of its own")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    first, before, amid, after = result["errors"]
    assert first == after == ""
    assert "does not fit into" in before and "sync.dir" in before
    assert "No space" in amid and "sync.dir" in amid
    assert "v00000003" not in result["left"]
    assert result["calls"] == ["init", "start", "update", "finish 1", "start", "update", "finish 4"]
