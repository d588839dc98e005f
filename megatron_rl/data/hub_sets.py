"""Data sets of the Hugging Face hub by id, ORG/NAME[:CONFIG][@REVISION][[SPLIT]]: downloaded,
pinned to a commit and a split, and read from the cache without network.

The library datasets decides which files a configuration and a split consist of, and makes Arrow
files of formats that rows.py does not read. It never sees the hub: hub.py downloads.
"""

import glob
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl import hub
from megatron_rl.config import ConfigError
from megatron_rl.config.evaluation import held_out
from megatron_rl.config.schema import Config
from megatron_rl.data.layouts import SUFFIXES
from megatron_rl.logs import logger

REFERENCE = re.compile(
    r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?:@([\w./-]+))?(?:\[([\w.-]+)\])?", re.ASCII
)
CARD = "README.md"  # names configurations and their files
CONVERTED = (".json", ".jsonl", ".csv", ".tsv")  # also compressed


class Unreachable(ConfigError):
    """The hub gave no answer; it may give one later, or elsewhere."""


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Name the key in errors of the hub."""
    try:
        yield
    except hub.HubUnreachable as error:
        raise Unreachable(f"{key}: {error}") from None
    except hub.HubError as error:
        raise ConfigError(f"{key}: {error}") from None


@dataclass(frozen=True)
class HubDataset:
    id: hub.HubId
    config: str | None
    split: str | None

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        revision = f"@{self.id.revision}" if self.id.revision else ""
        split = f"[{self.split}]" if self.split else ""
        return f"{self.id.name}{config}{revision}{split}"

    def fetch(self, key: str, network: bool) -> "HubDataset":
        """Download the files of the split; return the reference with its commit and split."""

        def get(one: hub.HubId, patterns: list[str]) -> Path:
            folder = hub.download(one, patterns) if network else hub.cached(one, patterns)
            if folder is None:
                raise ConfigError(
                    f"{key}: {self} is not complete in the cache {hub.cache()}; run `megatron-rl "
                    "fetch RECIPE` with this cache where there is a network"
                )
            return folder

        with naming(key):
            card = get(self.id, [CARD])  # a download leaves the list of files, too
            one = replace(self, id=replace(self.id, revision=card.name))
            splits = one._splits(key)
            one = replace(one, split=self._choose(key, list(splits)))
            patterns = _patterns(splits[str(one.split)])
            if network and hub.cached(one.id, patterns) is None:
                sizes = one._sizes()
                needed = hub.in_words([sizes[name] for name in splits[str(one.split)]])
                logger("hub").info(f"{one} ({key}): {needed}, into {hub.cache()}")
            get(one.id, patterns)
            return one

    def files(self, key: str) -> list[Path]:
        """Return the files of the split in the cache, in formats that rows.py reads; [] if they are
        not there.
        """
        names = self._splits(key).get(self.split or "", [])
        folder = hub.cached(self.id, _patterns(names)) if names else None
        if folder is None:
            return []
        files = [folder / name for name in names]
        if all(file.suffix in SUFFIXES for file in files):
            return files
        with naming(key):
            return _converted(self, folder, tuple(files))

    def _sizes(self) -> dict[str, int]:
        """Names and bytes of the repository's files, which a download has left in the cache."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            found = get_cached_repo_tree(
                self.id.name, repo_type=self.id.kind, revision=self.id.revision
            )
        except CachedRepoTreeNotFoundError:
            return {}
        return {
            file.path: file.size for file in found if not {"..", "/"} & set(Path(file.path).parts)
        }

    def _splits(self, key: str) -> dict[str, list[str]]:
        """Names of each split's files."""
        names = list(self._sizes())
        card = None
        if CARD in names:
            card = hub.cached(self.id, [CARD])
        if not names or (CARD in names and card is None):
            return {}
        with naming(key):
            return _split_files(replace(self, split=None), tuple(names), card)

    def _choose(self, key: str, splits: list[str]) -> str:
        if self.split in splits:
            return str(self.split)
        if self.split is None and key == "data.train" and "train" in splits:
            return "train"
        if self.split is None and len(splits) == 1:
            return splits[0]
        raise ConfigError(
            f"{key}: {self} has the splits {', '.join(splits)}; name one, such as "
            f"{replace(self, split=splits[0])}"
        )


@cache
def _split_files(
    one: HubDataset, names: tuple[str, ...], card: Path | None
) -> dict[str, list[str]]:
    """Names of each split's files. They are found among empty files of the same names."""
    from datasets import get_dataset_config_names, load_dataset_builder

    with tempfile.TemporaryDirectory(prefix="megatron-rl-splits-") as scratch:
        folder = Path(scratch).resolve()
        for path in names:
            file = folder / path
            if file.suffix not in (".py", ".yaml") and file.name != "dataset_infos.json":
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
        if card is not None:
            shutil.copyfile(card / CARD, folder / CARD)
        try:
            found = load_dataset_builder(str(folder), one.config, cache_dir=scratch)
            return {
                str(split): [str(Path(file).relative_to(folder)) for file in files]
                for split, files in (found.config.data_files or {}).items()
            }
        except (ValueError, OSError) as error:
            reason = str(error).replace(scratch, one.id.name)
            if isinstance(error, ValueError):
                configs = get_dataset_config_names(str(folder))
                if one.config not in configs:
                    reason = f"name one of its configurations ({', '.join(configs)})"
                    reason += f", such as {one.id.name}:{configs[0]}"
            raise hub.HubError(f"{one}: {reason}") from None


@cache
def _converted(one: HubDataset, folder: Path, files: tuple[Path, ...]) -> list[Path]:
    """Return Arrow files of the rows, from the cache of datasets if they are there."""
    from datasets import disable_progress_bars, load_dataset_builder
    from datasets.exceptions import DatasetGenerationError

    for file in files:
        if not set(file.suffixes) & set(CONVERTED):
            raise hub.HubError(
                f"{one} consists of {file.name} and the like; data sets of "
                f"{', '.join((*SUFFIXES, *CONVERTED))} files are read"
            )
    disable_progress_bars()
    given: Any = {one.split: list(map(str, files))}
    try:
        builder = load_dataset_builder(str(folder), one.config, data_files=given)
        builder.download_and_prepare()
    except (DatasetGenerationError, ValueError, OSError) as error:
        raise hub.HubError(f"{one} is not readable ({error.__cause__ or error})") from None
    rows: Any = builder.as_dataset(split=one.split)
    return [Path(file["filename"]) for file in rows.cache_files]


def parse(text: str) -> HubDataset | None:
    """Return the data set of the hub that a text names; None for a file or folder."""
    found = REFERENCE.fullmatch(text)
    if found is None or Path(text).exists() or Path(text).suffix in SUFFIXES:
        return None
    name, config, revision, split = found.groups()
    one = hub.parse(name, "dataset")
    if one is None:
        return None
    return HubDataset(replace(one, revision=revision), config, split)


def named_in(config: Config) -> dict[str, str]:
    """Return the data sets of the hub that a configuration names, each with its key."""
    found = dict.fromkeys(config.data.sources("train"), "data.train")
    found |= {one.path: one.key for one in held_out(config)}
    return {path: key for path, key in found.items() if parse(path)}


def missing_in(config: Config) -> list[str]:
    """Describe the data sets of the hub that a configuration names and the cache lacks."""
    found = []
    for path, key in named_in(config).items():
        one = parse(path)
        try:
            if one is not None:
                one.fetch(key, network=False)
        except ConfigError:
            found.append(f"{path} ({key})")
    return found


def pinned(config: Config, recorded: Config | None = None, network: bool = True) -> Config:
    """Download the data sets of the hub; return the configuration that names commits and splits.

    `recorded`: configuration of the run that is resumed, whose commits are used again. Without
    `network` the data sets have to be in the cache.
    """
    used = map(parse, named_in(recorded) if recorded else ())
    commits = {one.id.name: one.id for one in used if one is not None}

    def pin(key: str, path: str) -> str:
        one = parse(path)
        if one is None:
            return path
        if one.id.revision is None:
            one = replace(one, id=commits.get(one.id.name, one.id))
        return str(one.fetch(key, network))

    data = config.data
    train = data.train
    if isinstance(train, Mapping):
        train = {pin("data.train", path): weight for path, weight in train.items()}
    elif train:
        train = pin("data.train", train)
    main = data.eval
    sets = dict(config.eval.sets or {})
    for one in held_out(config):
        path = pin(one.key, one.path)
        if not one.name:
            main = path
        elif path != one.path and sets[one.name].path:
            sets[one.name] = replace(sets[one.name], path=path)
    section = replace(config.eval, sets=sets or config.eval.sets)
    return replace(config, data=replace(data, train=train, eval=main), eval=section)


def _patterns(names: list[str]) -> list[str]:
    return [glob.escape(name) for name in names]
