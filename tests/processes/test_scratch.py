"""A run's own temporary folder: private, gone at its end, and after a kill with the next start,
never a live one.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.processes import folder_lock, scratch
from megatron_rl.processes.folder_lock import LOCK
from megatron_rl.processes.scratch import (
    ELSEWHERE,
    PREFIX,
    Scratch,
    entered,
    remove_stale,
    remove_with_it,
)

# an owner of this machine that lives no more
DEAD = f"{folder_lock._boot_id()} {os.uname().nodename} 1"
HOLDER = """
import json, sys, time
from pathlib import Path
from megatron_rl.processes.scratch import Scratch, remove_with_it
own = Scratch()
own.enter()
remove_with_it([Path(sys.argv[1])])
print(json.dumps(str(own.path)), flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def there(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    tmp_path_factory.getbasetemp()  # where the other tests' folders are: not below what goes again
    with tempfile.TemporaryDirectory(prefix="short-") as name:
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def folder_of(parent: Path, owner: str, uid: int | None = None) -> Path:
    folder = parent / f"{PREFIX}{len(list(parent.iterdir()))}"
    folder.mkdir(mode=0o700)
    (folder / LOCK).write_text(owner)
    if uid is not None:
        os.chown(folder, uid, uid)
    return folder


@pytest.mark.fault("a run ends", "its temporary folder goes, and what it has listed elsewhere")
def test_it_is_private_and_goes_at_the_end(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = there / "in_memory"
    file = there / "sem.mp-1"
    kept = there / "kept"
    for path in (folder, kept):
        path.mkdir()
    file.touch()
    (there / "link").symlink_to(kept)
    with Scratch() as own:
        monkeypatch.setattr(tempfile, "tempdir", str(own.path))
        assert own.path.parent == there
        assert own.path.stat().st_mode & 0o777 == 0o700
        remove_with_it([folder, file, there / "link", there / "never_made"])
    assert sorted(path.name for path in there.iterdir()) == ["kept"]


def test_torch_s_precompiled_headers_outlive_it(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(there / "cache"))
    for _ in range(2):
        with entered():
            header = Path(default_cache_dir()) / "precompiled_headers" / "one.h.gch"
            found = header.exists()
            header.parent.mkdir(parents=True, exist_ok=True)
            header.touch()
        assert not header.exists(), "the run's folder has gone"
    assert found


@pytest.mark.fault(
    "kill -9 of a run's owner", "the next start removes its folder; it removes none of a live run"
)
def test_the_next_start_removes_what_a_killed_one_left(there: Path) -> None:
    elsewhere = there / "megatron-rl-sync-x"
    elsewhere.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(elsewhere)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout
        left = Path(json.loads(holder.stdout.readline()))
        remove_stale(there)
        assert (left / ELSEWHERE).exists()
        holder.send_signal(signal.SIGKILL)
        holder.wait(120)
        with Scratch():
            assert not left.exists()
            assert not elsewhere.exists()
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.fault("a stranger's link, file or folder of that name", "a start ignores it")
def test_what_strangers_put_there_is_ignored(there: Path) -> None:
    precious = there / "precious"
    precious.mkdir()
    (precious / LOCK).write_text(DEAD)
    for name, target in (
        ("a", precious),
        ("b", there / f"{PREFIX}b"),
        ("c", there / "nowhere"),
    ):
        (there / f"{PREFIX}{name}").symlink_to(target)
    (there / f"{PREFIX}d").write_text("")
    (there / f"{PREFIX}e").mkdir()
    if os.geteuid() == 0:
        folder_of(there, DEAD, uid=12345)
    before = sorted(there.iterdir())
    with Scratch():
        pass
    assert sorted(there.iterdir()) == before


@pytest.mark.fault(
    "the temporary folder is full or missing", "the start is refused with a sentence"
)
def test_a_folder_that_cannot_be_used_is_named(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(there))
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match=rf"{there}.*No space left.*TMPDIR"):
        Scratch()
    assert not list(there.iterdir())


def test_a_name_too_long_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "LONGEST", 40)
    with Scratch() as own:
        assert own.path.parent == Path("/tmp")


def test_a_rank_uses_what_it_was_given(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = folder_of(there, DEAD)
    with Scratch() as given:
        assert not dead.exists()
        dead = folder_of(there, DEAD)
        monkeypatch.setattr(tempfile, "tempdir", str(given.path))
        with entered():
            assert scratch.current() == given.path
            assert not dead.exists()
        assert given.path.exists()
        monkeypatch.setattr(tempfile, "tempdir", str(there))
        with entered():
            assert scratch.current() not in (None, given.path)
            assert os.environ["TMPDIR"] == str(scratch.current())
    assert not list(there.iterdir())
