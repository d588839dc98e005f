"""The private folder: unreadable to others, removed at the end, and leftovers of dead runs with
it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatron_rl.processes import folder_lock
from megatron_rl.processes.folder_lock import LOCK
from megatron_rl.weight_sync.file_transport import GRACE_S, PREFIX, SyncDir, remove_stale
from megatron_rl.weight_sync.manifest import WeightSyncError


def age(folder: Path) -> None:
    old = folder.stat().st_mtime - 2 * GRACE_S
    os.utime(folder, (old, old))


def test_private_and_removed(tmp_path: Path) -> None:
    first = SyncDir(str(tmp_path))
    second = SyncDir(str(tmp_path))
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.close()
    assert not first.path.exists()
    assert second.path.exists()
    second.close()


def leftover(parent: Path, name: str, owner: str = "") -> Path:
    folder = parent / name
    (folder / "v00000001").mkdir(parents=True)
    (folder / LOCK).write_text(owner)
    age(folder)
    return folder


def test_unusable_parent_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"sync.dir=.*/file"):
        SyncDir(str(tmp_path / "file"))


@pytest.mark.fault(
    "locks of the shared file system are local to a node",
    "another node's live folder is left alone",
)
def test_a_folder_is_judged_where_its_lock_was_given_alone(tmp_path: Path) -> None:
    own = SyncDir(str(tmp_path))
    boot, here, process = (own.path / LOCK).read_text().split()
    assert (here, process, len(boot)) == (socket.gethostname(), str(os.getpid()), 36)
    age(own.path)
    left = [
        own.path,
        leftover(tmp_path, f"{PREFIX}elsewhere", "another-boot another-host 1\n"),
        leftover(tmp_path, "something-else"),
        leftover(tmp_path, f"{PREFIX}young"),
    ]
    os.utime(left[-1])
    owners = (
        f"{boot} another-name-for-this-kernel 1\n",
        f"another-boot {here} 1\n",
        f"{boot} {here} 1\n",
        "",
    )
    dead = [leftover(tmp_path, f"{PREFIX}{number}", owner) for number, owner in enumerate(owners)]
    assert sorted(remove_stale(tmp_path)) == dead
    assert all(folder.exists() for folder in left)
    own.close()


ODD = {
    "a link to itself": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
    "a folder without permissions": lambda path: path.mkdir(0),
}


@pytest.mark.fault(
    "a stranger's odd file has the name of a run's folder", "no run is refused, nothing is removed"
)
@pytest.mark.parametrize("what", ODD)
def test_an_odd_file_refuses_no_run(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.weight_sync.file_transport.GRACE_S", 0.0)
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    odd = Path(PREFIX + "odd")
    ODD[what](odd)
    own = SyncDir(".")
    assert odd.is_symlink() or odd.exists()
    own.close()


@pytest.mark.fault("a stranger's folder looks like a dead run's", "it is left alone")
def test_a_stranger_s_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = folder_lock.BOOT_ID.read_text().strip()
    folder = leftover(tmp_path, f"{PREFIX}stranger", f"{boot} {socket.gethostname()} 1\n")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert remove_stale(tmp_path) == []
    assert folder.exists()


@pytest.mark.fault("a file system gives no locks", "a run starts there")
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(folder_lock.fcntl, "flock", no_locks)
    first = SyncDir(str(tmp_path))
    age(first.path)
    second = SyncDir(str(tmp_path))
    assert first.path.exists()
    first.close()
    second.close()
