"""Layers of a recipe: base files, presets, cluster, command line; their merge, and the origin of
each key.

A recipe is a small YAML delta over its `base:` files. A section may be the name of a preset
(`correction: tis` is conf/correction/tis.yaml) or a mapping whose `preset:` is one, with the other
keys on top. `cluster: 1n8g` puts conf/cluster/1n8g.yaml below the keys of the file that names it;
the last name counts. Recipes and bases that the working folder lacks are those of the package.
"""

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.bounds import as_written, did_you_mean
from megatron_rl.config.plain_yaml import PACKAGE, Settings, presets, read_preset, read_yaml
from megatron_rl.config.unknown import with_new_names

PRESET_SECTIONS = ("correction", "quantization", "model", "data")
# null in a cluster removes a key
PASSED_THROUGH = (
    ("learner", "megatron"),
    ("optim", "megatron"),
    ("sampler", "vllm"),
    ("loss", "params"),
)
CLUSTER = "cluster"
OTHERWISE = {
    CLUSTER: "",
    "model": "; or name a folder: model.path",
    "data": "; or name a file: data.train",
}
MACHINE = "machine"  # of a cluster, as --on has it
COMMAND_LINE = "the command line"


class ConfigError(Exception):
    """An invalid configuration. The message names the key, the value and a hint."""

    hint = "`megatron-rl train RECIPE --dry-run` checks the other keys as well."


Sources = dict[str, list[tuple[str, Any]]]  # key -> layers that set it, with their values


@dataclass(frozen=True)
class Layer:
    """Keys, and the file that sets them."""

    where: str
    content: Mapping[str, Any]
    is_cluster: bool = False


def of_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> list[Layer]:
    """A recipe's layers, each above those before it: its bases, its own file, each override."""
    return [*_files(find_recipe(recipe)), *of_overrides(overrides)]


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe that is given as a path, recipes/NAME.yaml or NAME: in the
    working folder, else in the package.
    """
    path = Path(recipe)
    named = Path("recipes", path.name.removesuffix(".yaml") + ".yaml")
    if path.parent not in (Path(), named.parent) or path.is_file():
        return path
    return next((one for one in (named, PACKAGE / named) if one.is_file()), path)


def _find_base(base: str, folder: Path) -> Path:
    """Return a base file; if it is missing, the one of the package, such as conf/toy.yaml."""
    path = folder / base
    packaged = PACKAGE.joinpath(*path.parts[-2:])
    if path.is_file() or Path(base).is_absolute() or not packaged.is_file():
        return path
    return packaged


def of_overrides(overrides: Sequence[str]) -> list[Layer]:
    return [
        Layer(COMMAND_LINE, with_new_names(_override(word), COMMAND_LINE)) for word in overrides
    ]


def _files(path: Path, seen: tuple[Path, ...] = ()) -> list[Layer]:
    """Return the layers of a file and its bases. `seen`: the chain of files so far."""
    loaded = read_file(path, seen)
    if path.resolve() in [one.resolve() for one in seen]:
        raise ConfigError(
            f"{path}: `base` leads back to the file itself; remove one of the two lines"
        )
    bases = loaded.pop("base", [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base is {as_written(bases)}: name a file or a list of files")
    below = [
        layer for base in bases for layer in _files(_find_base(base, path.parent), (*seen, path))
    ]
    where = os.path.relpath(path)
    return [*below, Layer(where, with_new_names(loaded, where))]


def naming(layers: Sequence[Layer]) -> Layer:
    """Return the last layer that names a cluster, or an empty layer."""
    return next(
        (layer for layer in reversed(layers) if CLUSTER in layer.content),
        Layer("", {CLUSTER: None}),
    )


def _with_cluster(layers: Sequence[Layer]) -> Iterator[Layer]:
    """The layers less their clusters' names; the last named lies below the file, or the command
    line, that names it.
    """
    last = naming(layers)
    name = last.content[CLUSTER]
    for layer in layers:
        if name is not None and (layer is last or layer.where == last.where == COMMAND_LINE):
            keys = {key: value for key, value in cluster(name).items() if key != MACHINE}
            yield Layer(
                f"conf/{CLUSTER}/{name}.yaml, named in {layer.where}", keys, is_cluster=True
            )
            name = None
        yield Layer(
            layer.where, {key: value for key, value in layer.content.items() if key != CLUSTER}
        )


def merged(layers: Sequence[Layer]) -> Settings:
    """Merge the layers, each over those before it."""
    merged: Settings = {}
    for layer in _with_cluster(layers):
        merged = _merge(merged, layer.content)
        for section, inner in PASSED_THROUGH if layer.is_cluster else ():
            for key, value in list((layer.content.get(section, {}).get(inner) or {}).items()):
                if value is None:
                    del merged[section][inner][key]
    return merged


def sources(layers: Sequence[Layer], whole: Collection[str]) -> Sources:
    """Map each key to the layers that set it and their values; the last one applies. `whole`: as in
    `leaves`.
    """
    found: Sources = {}
    for layer in _with_cluster(layers):
        _note_sources(found, layer.where, layer.content, whole)
    return found


def _note_sources(
    found: Sources,
    where: str,
    content: Mapping[str, Any],
    whole: Collection[str],
) -> None:
    for section, value in content.items():
        names, rest = _named_preset(section, value)
        for name in names:
            for key in [key for key in found if key.startswith(f"{section}.")]:
                del found[key]
            preset = {section: _preset(section, name)}
            _note_sources(found, f"conf/{section}/{name}.yaml, named in {where}", preset, whole)
        for key, leaf in leaves(section, rest, whole):
            found.setdefault(key, []).append((where, leaf))


def leaves(key: str, value: Any, whole: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Keys and values below a key. `whole`: keys whose values are not looked into."""
    if not isinstance(value, Mapping) or key in whole:
        yield key, value
        return
    for name, inner in value.items():
        yield from leaves(f"{key}.{name}", inner, whole)


def read_file(path: Path, seen: tuple[Path, ...] = ()) -> Settings:
    if seen:
        named = f"{seen[-1]}: base names {path}, but there is"
    else:
        named = f"{path}:"
    if not path.is_file():
        others = [*(PACKAGE / "recipes").glob("*.yaml"), *path.parent.glob("*.yaml")]
        stems = {other.stem: other for other in others if other.is_file()}
        near = difflib.get_close_matches(path.stem, stems, n=1)
        hint = f"; did you mean {stems[near[0]]}?" if near else ""
        raise ConfigError(f"{named} no such file{hint}")
    try:
        loaded: Any = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path}: holds {as_written(loaded)[:80]}, expected keys such as `run:` or `learner:`"
        )
    return loaded


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """Merge `above` over `below`. A preset replaces its section: presets do not accumulate."""
    merged = dict(below)
    for section, value in above.items():
        names, rest = _named_preset(section, value)
        for name in names:
            merged[section] = _preset(section, name)
        merged = overlaid(merged, {section: rest})
    return merged


def _named_preset(section: str, value: Any) -> tuple[list[Any], Any]:
    """Return the preset that a section names, if any, and the keys on top of it."""
    if section not in PRESET_SECTIONS:
        return [], value
    if not isinstance(value, Mapping):
        return [value], {}
    rest = {key: one for key, one in value.items() if key != "preset"}
    if "preset" in value:
        return [value["preset"]], rest
    return [], rest


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """Merge two mappings section by section; `above` takes precedence."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = overlaid(merged[key], value)
        else:
            merged[key] = value
    return merged


def cluster(name: object) -> Settings:
    layer = _preset(CLUSTER, name)
    if CLUSTER in layer or "base" in layer:
        raise ConfigError(
            f"{CLUSTER}: conf/{CLUSTER}/{name}.yaml names another layer; write its keys there"
        )
    return layer


def _preset(section: str, name: object) -> Settings:
    known = presets(section)
    if not isinstance(name, str) or name not in known:
        hint = ""
        if isinstance(name, str):
            hint = did_you_mean(Path(name).stem.lower(), known, "did you mean {}? ")
        kind = "cluster" if section == CLUSTER else "preset"
        ways_out = f"{hint}{kind}s are {', '.join(known)}{OTHERWISE.get(section, '; or write a section of keys')}"
        raise ConfigError(f"{section} is {as_written(name)}: no {kind}; {ways_out}")
    return read_preset(known[name])


def _override(item: str) -> Settings:
    key, _, text = item.partition("=")
    if not key or not text.strip():
        raise ConfigError(
            f"{item!r}: an override is written section.key=value, with null for no value"
        )
    try:
        value = read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{item!r}: {' '.join(str(error).split())}") from None
    return nested(key, value)


def nested(key: str, value: Any) -> Settings:
    """A value in sections: run.name is {run: {name: value}}."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value
