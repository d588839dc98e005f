"""The file that W&B writes of a run: which steps it holds. One that was cut short holds those before.

It is a log in LevelDB's format: blocks of 32 KiB, in them pieces of records, each with its length and its kind.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC, HEADER = b":W&B", 7
BLOCK = 32 << 10
_PIECE = struct.Struct("<4xHB")  # after a checksum
_WHOLE, _LAST = 1, 4  # of the kinds: whole, first, middle, last


def steps(path: Path) -> list[int]:
    """Of its lines of history, in their order."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    found = []
    for content in _records(path.read_bytes()):
        record = Record()
        try:
            record.ParseFromString(content)
        except DecodeError:
            break
        if record.WhichOneof("record_type") == "history":
            found.append(record.history.step.num)
    return found


def _records(content: bytes) -> Iterator[bytes]:
    at, begun = HEADER, b""
    while content.startswith(MAGIC) and at + _PIECE.size <= len(content):
        left = BLOCK - at % BLOCK
        if left < _PIECE.size:
            at += left
            continue
        length, kind = _PIECE.unpack_from(content, at)
        at += _PIECE.size + length
        if not _WHOLE <= kind <= _LAST or at > len(content):
            return
        begun += content[at - length : at]
        if kind in (_WHOLE, _LAST):
            yield begun
            begun = b""
