"""Lines of a run on a disk that fills up."""

import errno
import os
from pathlib import Path

import pytest

from megatron_rl.tracking.disk import LineFile


@pytest.mark.fault(
    "a disk takes a part of a line, or none",
    "the file ends in a whole line, and the rest comes later",
)
def test_lines_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    room = [100]
    path.write_bytes(b"half")
    lines = LineFile(path)

    class Small:
        """A file on a disk with so many bytes left."""

        def __init__(self, file) -> None:
            self._file = file

        def write(self, data) -> int:
            taken = min(room[0], len(data))
            if not taken:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            room[0] -= taken
            return self._file.write(data[:taken])

        def __getattr__(self, name: str):
            return getattr(self._file, name)

    monkeypatch.setattr(lines, "_file", Small(lines._file))
    for _ in range(5):
        lines.write("a" * 29)
    assert (lines.waiting, path.read_bytes()) == (2, b"half\n" + (b"a" * 29 + b"\n") * 3)
    room[0] = 1000
    lines.write("b")
    assert path.read_bytes() == b"half\n" + (b"a" * 29 + b"\n") * 5 + b"b\n"
    lines.close()
    assert lines.waiting == 0
