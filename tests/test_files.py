"""A file or a folder is there as a whole, or as it was before; what is no regular file is neither
replaced nor read.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.files import last_lines, read_json, replacing, write_atomic


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == tmp_path, "a rename needs the same file system"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_an_error_leaves_what_was_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    write_atomic(path, "old")

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


@pytest.mark.fault("an output is a pipe or a link, as /dev/stdout", "it stays, a sentence says so")
@pytest.mark.parametrize("made", ["before", "meanwhile"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("file")])
def test_special_files_are_kept(tmp_path: Path, make: Callable[[Path], None], made: str) -> None:
    path = tmp_path / "output"
    (tmp_path / "file").write_text("old")
    if made == "before":
        make(path)

    def write() -> None:
        with replacing(path) as partial:
            make(path)  # which fails where it is there
            partial.write_text("new")

    with pytest.raises(FileExistsError, match="name a regular file"):
        write()
    assert path.is_symlink() or path.is_fifo()
    assert (tmp_path / "file").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.fault("a file to read is a pipe or a device", "it is named, nothing waits")
@pytest.mark.parametrize("path", ["pipe", "/dev/zero", ".", "large"])
def test_only_regular_files_are_read(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("9 letters")
    with pytest.raises(ValueError, match=r"regular|9 bytes"):
        read_json(tmp_path / path, 8)
    assert last_lines(tmp_path / path, 1) == ["9 letters"] * (path == "large")
