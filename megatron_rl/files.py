"""Files and folders that are whole or not there: written under another name, and renamed when they are complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST_JSON = 32 << 20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` when the block ends well, and is removed when it does not."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        if partial.is_file():
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path, largest: int = LARGEST_JSON, expected: str = "keys and values") -> dict[str, Any]:
    """The keys of a JSON file that somebody else wrote; ValueError says what is wrong with it."""
    try:
        if (size := path.stat().st_size) > largest:
            raise ValueError(f"{path} has {size} bytes, expected at most {largest}")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected {expected}")
    return found
