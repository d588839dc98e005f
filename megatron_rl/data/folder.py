"""The files of a Hugging Face data set's folder: what `save_to_disk` leaves, or a clone from a hub.

The last component of a path may name a split: `data/gsm8k/test`.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.files import read_json

SUFFIXES = (".parquet", ".jsonl", ".arrow")
_SHARD = re.compile(r"(.+?)(?:-\d{5}-of-\d{5}(?:-\w+)?)?$")


def data_files(key: str, path: Path) -> list[Path]:
    """The files that `path` stands for; the file itself where it is one."""
    if path.is_dir():
        found = _splits(key, path)
        if len(found) == 1:
            return next(iter(found.values()))
        if not found:
            raise ConfigError(f"{key}: no {', '.join(SUFFIXES)} in the folder {str(path)!r}")
        raise ConfigError(
            f"{key}: {str(path)!r} has the splits {', '.join(sorted(found))}; name one, such as {path / min(found)}"
        )
    if path.parent.is_dir() and not path.exists() and path.name in (found := _splits(key, path.parent)):
        return found[path.name]
    return [path]


def _splits(key: str, folder: Path) -> dict[str, list[Path]]:
    if (folder / "state.json").is_file():  # one split, as save_to_disk writes it
        try:
            names = [each["filename"] for each in read_json(folder / "state.json")["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{key}: {folder / 'state.json'} is not readable ({error})") from None
        return {folder.name: [folder / Path(name).name for name in names]}
    if (folder / "dataset_dict.json").is_file():
        inner = sorted(each for each in folder.iterdir() if (each / "state.json").is_file())
        return {name: files for each in inner for name, files in _splits(key, each).items()}
    found: dict[str, list[Path]] = {}
    for file in sorted([*folder.iterdir(), *(folder / "data").glob("*")]):
        if file.suffix in SUFFIXES and file.is_file():
            shard = _SHARD.match(file.stem)
            assert shard is not None
            found.setdefault(shard[1], []).append(file)
    return found
