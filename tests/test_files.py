"""A file or a folder is there as a whole, or as it was before."""

from pathlib import Path

import pytest

from megatron_rl.files import replacing, write_whole


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
