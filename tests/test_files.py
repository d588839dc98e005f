"""A file or a folder is there as a whole, or as it was before; what is no regular file is neither replaced nor read."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.files import last_lines, read_json, read_whole, replacing, write_whole


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_whole(path, "old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == tmp_path, "a rename needs the same file system"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_an_error_leaves_what_was_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    write_whole(path, "old")

    def fail() -> None:
        with replacing(path) as partial:
            if kind == "folder":
                partial.mkdir()
                (partial / "half").write_text("new")
            elif kind == "file":
                partial.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_its_place(tmp_path: Path) -> None:
    with replacing(tmp_path / "model") as partial:
        partial.mkdir()
        (partial / "weights").write_text("all")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "all"


@pytest.mark.fault("an output is a pipe or a link, such as /dev/stdout", "it stays, and a sentence says so")
@pytest.mark.parametrize("kind", ["pipe", "link to a file", "link to nothing", "made meanwhile"])
def test_special_files_are_kept(tmp_path: Path, kind: str) -> None:
    path, file = tmp_path / "output", tmp_path / "file"
    if "file" in kind:
        file.write_text("old")
    if "link" in kind:
        path.symlink_to(file)
    elif kind == "pipe":
        os.mkfifo(path)

    def write() -> None:
        with replacing(path) as partial:
            assert kind == "made meanwhile", "nothing is written for nothing"
            partial.write_text("new")
            os.mkfifo(path)

    with pytest.raises(FileExistsError, match=r"is there, which is not replaced; name a regular"):
        write()
    assert not stat.S_ISREG(path.lstat().st_mode)
    assert "file" not in kind or file.read_text() == "old"
    assert {each.name for each in tmp_path.iterdir()} <= {"output", "file"}


@pytest.mark.fault("a file to read is a pipe or a device", "it is named, nothing waits")
@pytest.mark.parametrize("path", ["pipe", "/dev/zero", "/dev/tty", "."])
def test_only_regular_files_are_read(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    readers: list[Callable[[Path], object]] = [read_whole, read_json]
    for read in readers:
        with pytest.raises((OSError, ValueError), match=r"pipe|directory|such device"):
            read(tmp_path / path)
    assert last_lines(tmp_path / path, 1) == []


def test_a_read_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 9)
    assert read_whole(tmp_path / "large", 9) == b"x" * 9
    with pytest.raises(ValueError, match="has 9 bytes, expected at most 8"):
        read_whole(tmp_path / "large", 8)
