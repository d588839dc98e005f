"""The file that W&B writes of a run: its records, and which steps they hold. One that was cut short holds those before.

It is a log in LevelDB's format: blocks of 32 KiB, in them pieces of records, each with its length and its kind.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAGIC, HEADER = b":W&B", 7
BLOCK = 32 << 10
_PIECE = struct.Struct("<4xHB")  # after a checksum
_WHOLE, _LAST = 1, 4  # of the kinds: whole, first, middle, last


def steps(path: Path) -> list[int]:
    """Of its lines of history, in their order."""
    return [record.history.step.num for record in records(path, "history")]


def records(path: Path, kind: str) -> Iterator[Any]:
    """Those of one kind, such as history, run or summary, as W&B defines them."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for content in _pieced(path.read_bytes()):
        record = Record()
        try:
            record.ParseFromString(content)
        except DecodeError:
            return
        if record.WhichOneof("record_type") == kind:
            yield record


def _pieced(content: bytes) -> Iterator[bytes]:
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
