"""What a configuration takes from the Hugging Face hub: the commit that a run uses, downloads before
it starts, and what a dry run would download.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl import hub
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.schema import Config, IfExists, ModelInit
from megatron_rl.data import hub_sets
from megatron_rl.data.hub_sets import Unreachable, naming
from megatron_rl.files import free_bytes
from megatron_rl.hub import HubId
from megatron_rl.logs import logger


@dataclass(frozen=True)
class Reference:
    """A model's repository that a key names."""

    key: str
    id: HubId
    weights: bool = True  # whether they are needed, too

    @property
    def patterns(self) -> tuple[str, ...]:
        if self.weights:
            return hub.SMALL_FILES + hub.WEIGHTS
        return hub.SMALL_FILES

    def __str__(self) -> str:
        what = "config, tokenizer and .safetensors" if self.weights else "config and tokenizer"
        return f"{self.id} ({self.key}): {what}"


@dataclass(frozen=True)
class Download:
    """Files of a reference that are not in the cache, with their sizes in bytes."""

    reference: Reference
    sizes: dict[str, int]

    def __str__(self) -> str:
        return f"{self.reference}, {hub.in_words(self.sizes.values())}"


def references(config: Config) -> list[Reference]:
    """Return what the keys of a configuration name on the hub."""
    model = config.model
    one = hub.parse(model.path)
    return [Reference("model.path", one, model.init is ModelInit.pretrained)] if one else []


def with_small_files(config: Config) -> Config:
    """Download all but the weights of the model; return the configuration with its commit."""
    config = _with_recorded_model(config)
    one = hub.parse(config.model.path)
    if one is None:
        return config
    folder = fetched(str(one), "model.path", weights=False)
    return _with_path(config, replace(one, revision=folder.name))


def with_data(config: Config, network: bool = True) -> Config:
    """Return the configuration with the data sets in the cache, by commit and split."""
    return hub_sets.pinned(config, _recorded(config), network)


def from_cache(config: Config) -> Config:
    """Return the configuration with the commit in the cache, which must be complete. No network."""
    config = _with_recorded_model(config)
    for one in references(config):
        folder = _complete(one)
        if folder is None:
            raise ConfigError(
                f"{one.key}: {one.id} is not complete in the cache {hub.cache()}; run `megatron-rl "
                "fetch RECIPE` with this cache before the ranks start"
            )
        config = _with_path(config, replace(one.id, revision=folder.name))
    return config


def outstanding(config: Config) -> list[Download]:
    """Return the downloads that a configuration needs; those in the cache need no network."""
    return list(filter(None, map(_outstanding, references(config))))


def fetch(downloads: Sequence[Download], say: Callable[[str], None]) -> None:
    """Report each size, then download."""
    for one in downloads:
        say(f"{one}, into {hub.cache()}; complete files are kept if it is interrupted")
        with naming(one.reference.key):
            hub.download(one.reference.id, one.reference.patterns)


def fetched(text: str, key: str, weights: bool = True) -> Path:
    """Return the folder that a text names, after the download if it is an id."""
    one = hub.parse(text)
    if one is None:
        return Path(text)
    with naming(key):
        folder = hub.download(one, hub.SMALL_FILES)
    if needed := _outstanding(Reference(key, replace(one, revision=folder.name), weights)):
        fetch([needed], logger("hub").info)
    return folder


def preview(config: Config) -> tuple[Config, list[str]]:
    """Return the configuration and what a start would download, as far as the hub answers."""
    data = hub_sets.missing_in(config)
    try:
        config = with_small_files(config)
        models = list(map(str, outstanding(config)))
    except Unreachable as error:
        config = _with_recorded_model(config)
        models = [
            f"{one}; sizes unknown: {str(error).partition(': ')[2]}" for one in references(config)
        ]
    return config, models + data


def _with_recorded_model(config: Config) -> Config:
    """Use the commit or the folder models/NAME of the run to be resumed, unless the recipe names a
    revision.
    """
    one = hub.parse(config.model.path)
    if one and not one.revision and (recorded := _recorded(config)):
        path = recorded.model.path
        if path.partition("@")[0] in (one.name, f"models/{Path(one.name).name}"):
            return _with_path(config, path)
    return config


def _recorded(config: Config) -> Config | None:
    """Return the configuration of the run to be resumed, if there is one."""
    path = config.run.folder / "config.yaml"
    if config.run.if_exists is IfExists.resume and path.is_file():
        return recorded_config(path)
    return None


def _with_path(config: Config, path: object) -> Config:
    return replace(config, model=replace(config.model, path=str(path)))


def _complete(one: Reference) -> Path | None:
    """Return the folder of a reference in the cache, if nothing is missing there."""
    folder = hub.cached(one.id, one.patterns)
    if folder and one.weights and not any(folder.glob("*.safetensors")):
        return None  # the repository has none
    return folder


def _outstanding(one: Reference) -> Download | None:
    if _complete(one):
        return None
    with naming(one.key):
        listing = hub.list_files(one.id)
    wanted = listing.matching(one.patterns)
    if one.weights and not listing.matching(hub.WEIGHTS):
        raise ConfigError(
            f"{one.key}: {one.id} has no .safetensors; weights in pickle files (.bin) are not "
            "read, name a revision or a model with safetensors"
        )
    folder = hub.cached(listing.id, ())
    sizes = {
        name: size
        for name, size in wanted.items()
        if folder is None or not (folder / name).is_file()
    }
    nbytes = sum(sizes.values())
    free = free_bytes(hub.cache())
    if nbytes > free:
        raise ConfigError(
            f"{one.key}: {nbytes} bytes to download of {one.id}, but {hub.cache()} has {free} "
            "left; free space, or set HF_HOME to another folder"
        )
    return Download(replace(one, id=listing.id), sizes)
