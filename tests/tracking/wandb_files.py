"""Reader of the files that W&B writes of offline runs: LevelDB's log format of protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = 7
BLOCK = 32 << 10
PIECE = struct.Struct("<4xHB")  # after a checksum: length and kind of a piece
WHOLE, LAST = 1, 4  # kinds that end a record


def records(path: Path, kind: str) -> Iterator[Any]:
    """Records of one kind, such as history, run or summary."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _pieced(path.read_bytes()):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == kind:
            yield record


def logged_steps(path: Path) -> list[int]:
    return [record.history.step.num for record in records(path, "history")]


def logged_rows(path: Path) -> dict[int, dict[str, float]]:
    """Numbers of each step, without W&B's own."""
    rows: dict[int, dict[str, float]] = {}
    for record in records(path, "history"):
        values = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        rows[record.history.step.num] = {
            name: float(value) for name, value in values.items() if not name.startswith("_")
        }
    return rows


def _pieced(content: bytes) -> Iterator[bytes]:
    at = HEADER
    begun = b""
    while at + PIECE.size <= len(content):
        left = BLOCK - at % BLOCK
        if left < PIECE.size:
            at += left
            continue
        length, kind = PIECE.unpack_from(content, at)
        at += PIECE.size + length
        begun += content[at - length : at]
        if kind in (WHOLE, LAST):
            yield begun
            begun = b""
