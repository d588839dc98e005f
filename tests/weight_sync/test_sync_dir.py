"""The private folder: unreadable to others, removed at the end, and leftovers of dead runs with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.sync_dir import GRACE_S, LOCK, PREFIX, SyncDir, remove_stale


def age(folder: Path) -> None:
    old = folder.stat().st_mtime - 2 * GRACE_S
    os.utime(folder, (old, old))


def test_private_and_removed(tmp_path: Path) -> None:
    first, second = SyncDir(str(tmp_path)), SyncDir(str(tmp_path))
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.close()
    assert not first.path.exists()
    assert second.path.exists()
    second.close()


def test_only_dead_runs_are_cleaned(tmp_path: Path) -> None:
    alive = SyncDir(str(tmp_path))
    dead = tmp_path / f"{PREFIX}dead"
    dead.mkdir()
    (dead / LOCK).touch()
    (dead / "v00000001").mkdir()
    young = tmp_path / f"{PREFIX}young"
    young.mkdir()
    (young / LOCK).touch()
    foreign = tmp_path / "something-else"
    foreign.mkdir()
    for folder in (alive.path, dead, foreign):
        age(folder)
    assert remove_stale(tmp_path) == [dead]
    assert alive.path.exists()
    assert young.exists()
    assert foreign.exists()
    alive.close()


def test_unusable_parent_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightSyncError, match=r"sync.dir=.*/file"):
        SyncDir(str(tmp_path / "file"))
