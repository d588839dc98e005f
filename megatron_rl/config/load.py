"""Loads recipes into the typed Config (base files, presets, cluster, overrides, strict keys), and writes one as YAML.

A recipe is a small YAML delta over its `base:` files. A section may be the name of a preset (`correction: tis` is
conf/correction/tis.yaml) or a mapping whose `preset:` is one, with the other keys on top. `cluster: 1n8g` puts
conf/cluster/1n8g.yaml below the keys of whoever names it; the last name counts.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.bounds import as_written
from megatron_rl.config.plain_yaml import CONF, DEEPEST, LARGEST_TEXT, MOST_NODES, read_yaml, write_yaml
from megatron_rl.config.rules import check
from megatron_rl.config.schema import Config
from megatron_rl.config.shape import defaults, key_of, keys_in, known, misfits, without

__all__ = ["CONF", "ConfigError", "all_keys", "from_mapping", "load", "read", "recorded_config", "to_yaml"]

MOST_FILES = 64  # that a recipe is made of
PRESET_SECTIONS = ("correction", "quantization", "model", "data")
PASSED_THROUGH = (("learner", "megatron"), ("optim", "megatron"), ("sampler", "vllm"))  # a cluster's null takes one out
CLUSTER = "cluster"
OTHERWISE = {CLUSTER: "", "model": "; or name a folder: model.path", "data": "; or name a file: data.train"}
MACHINE = "machine"  # of a cluster, as --on has it


class ConfigError(Exception):
    """A configuration that cannot run. The message names the key, the value and the way out."""


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The typed configuration of a recipe with overrides applied; `run.name` defaults to the file's stem."""
    return _sound(*read(recipe, overrides))


def read(recipe: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """The configuration, and what the recipe alone shows to be wrong: those values stand at null or their defaults."""
    path = Path(recipe)
    return _checked(_layers(path, []), path, overrides)


def cluster(recipe: str | Path, overrides: Sequence[str] = ()) -> tuple[str | None, str | None]:
    """The cluster that a recipe is for, and the machine that this is, as `--on` has it."""
    layers = [*_layers(Path(recipe), []), *map(_override, overrides)]
    name = next((layer[CLUSTER] for layer in reversed(layers) if CLUSTER in layer), None)
    return name, (_cluster(name).get(MACHINE) if name is not None else None)


def all_keys() -> list[str]:
    """Every key, as written on the command line."""
    return keys_in(Config)


def _checked(layers: Sequence[Mapping[str, Any]], path: Path, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    merged = _merged([*layers, *map(_override, overrides)])
    if _values(merged) > MOST_NODES:
        raise ConfigError(f"{path}: more than {MOST_NODES} values with all overrides")
    if "axes" in merged:
        raise ConfigError(
            f"{path}: `axes` make it a grid of runs, started by python tools/compare_corrections.py {path}"
        )
    run = merged.get("run", {})
    if isinstance(run, Mapping) and run.get("name") is None:
        merged["run"] = {**run, "name": path.stem}
    unreadable = list(misfits(merged, Config))
    if unreadable:  # those keys stand at their defaults, and of their sections nothing else is said
        rest = without(merged, unreadable)
        merged = {section: value for section, value in rest.items() if not any(misfits({section: value}, Config))}
    config, found = check(_typed(merged))
    sections = {key_of(line).partition(".")[0] for line in unreadable}
    found = [line for line in found if not any(f"{section}." in line for section in sections)]
    return config, [*unreadable, *found]


def from_mapping(mapping: Mapping[str, Any]) -> Config:
    """Typed and strict: unknown keys and values of the wrong type are refused with their full path, all at once."""
    resolved = _without_preset_names(mapping)
    found = list(misfits(resolved, Config))
    if found:
        raise ConfigError("\n".join(found))
    return _typed(resolved)


def _typed(mapping: Mapping[str, Any]) -> Config:
    try:
        node = OmegaConf.merge(defaults(Config), OmegaConf.create(dict(mapping)))
        return OmegaConf.to_object(node)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{error.full_key or 'the configuration'}: {reason}") from None


def to_yaml(config: Config) -> str:
    """The resolved configuration, which `from_mapping` reads back. A section that is what a preset says names it."""
    mapping = asdict(config)
    for section in PRESET_SECTIONS:
        if name := preset_name(section, getattr(config, section)):
            mapping[section] = {"preset": name, **mapping[section]}
    return write_yaml(mapping)


def preset_name(section: str, value: Any) -> str | None:
    for path in sorted((CONF / section).glob("*.yaml")):
        preset = read_yaml(path.read_text(encoding="utf-8")) or {}
        if OmegaConf.to_object(OmegaConf.merge(defaults(value.__class__), preset)) == value:
            return path.stem
    return None


def _without_preset_names(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Drop each section's `preset`: a resolved section already holds the values that it stands for."""
    resolved = dict(mapping)
    for section in PRESET_SECTIONS:
        if isinstance(resolved.get(section), Mapping):
            resolved[section] = {key: value for key, value in resolved[section].items() if key != "preset"}
    return resolved


def recorded_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a run has left behind, whose keys and presets may be gone since."""
    return _sound(*_checked([recorded(path)], path, overrides))


def from_base(base: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Overrides, presets included, over a mapping that is no recipe's file."""
    return _sound(*_checked([base], Path("overrides"), overrides))


def recorded(path: Path) -> dict[str, Any]:
    """The mapping of a recorded configuration, without preset names and removed keys: a base for overrides."""
    return known(_without_preset_names(_loaded(path)), Config)


def _sound(config: Config, found: Sequence[str]) -> Config:
    if found:
        raise ConfigError("\n".join(found))
    return config


def _layers(path: Path, read: list[int], seen: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """A file above its bases. `read`: how many values each file had so far; `seen`: the files that lead here."""
    if path.resolve() in [one.resolve() for one in seen]:
        raise ConfigError(f"{path}: `base` leads back to the file itself; remove one of the two lines")
    loaded = _loaded(path, seen)
    read.append(_values(loaded))
    if len(read) > MOST_FILES or len(seen) > DEEPEST or sum(read) > MOST_NODES:
        most = f"{MOST_FILES} files or {MOST_NODES} values"
        raise ConfigError(f"{(*seen, path)[0]}: more than {most} by way of `base`; build on fewer files")
    bases = loaded.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base is {as_written(bases)}: name a file or a list of files")
    return [layer for base in bases for layer in _layers(path.parent / base, read, (*seen, path))] + [loaded]


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each over those before it; the last cluster that is named below the layer that names it."""
    named = max((place for place, layer in enumerate(layers) if CLUSTER in layer), default=None)
    merged: dict[str, Any] = {}
    for place, layer in enumerate(layers):
        if place == named:
            below = _cluster(layer[CLUSTER])
            merged = _merge(merged, {key: value for key, value in below.items() if key != MACHINE})
            for section, inner in PASSED_THROUGH:
                for key, value in list((below.get(section, {}).get(inner) or {}).items()):  # may be the same map
                    if value is None:
                        del merged[section][inner][key]
        merged = _merge(merged, {key: value for key, value in layer.items() if key != CLUSTER})
    return merged


def _values(node: Any) -> int:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    return 1 + sum(map(_values, inner))


def _loaded(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    named = f"{seen[-1]}: base names {path}, but there is" if seen else f"{path}:"
    if not path.is_file():
        stems = {other.stem: other for other in path.parent.glob("*.yaml")}
        near = difflib.get_close_matches(path.stem, stems, n=1)
        hint = f"; did you mean {stems[near[0]]}?" if near else ""
        raise ConfigError(f"{named} no such file{hint}")
    try:
        if path.stat().st_size > LARGEST_TEXT:
            raise ValueError(f"it has {path.stat().st_size} bytes, expected at most {LARGEST_TEXT}")
        loaded: Any = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: holds {as_written(loaded)[:80]}, expected keys such as `run:` or `learner:`")
    return loaded


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`. Naming a preset starts its section afresh: presets do not pile up."""
    merged = dict(below)
    for section, value in above.items():
        if section in PRESET_SECTIONS:
            if not isinstance(value, Mapping):
                value = {"preset": value}
            if "preset" in value:
                merged[section] = _preset(section, value["preset"])
                value = {key: one for key, one in value.items() if key != "preset"}
        merged = _deep(merged, {section: value})
    return merged


def _deep(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _deep(merged[key], value)
        else:
            merged[key] = value
    return merged


def _cluster(name: object) -> dict[str, Any]:
    layer = _preset(CLUSTER, name)
    if CLUSTER in layer or "base" in layer:
        raise ConfigError(f"{CLUSTER}: conf/{CLUSTER}/{name}.yaml names another layer; write its keys there")
    return layer


def _preset(section: str, name: object) -> dict[str, Any]:
    presets = {path.stem: path for path in sorted((CONF / section).glob("*.yaml"))}
    if not isinstance(name, str) or name not in presets:
        near = difflib.get_close_matches(Path(str(name)).stem.lower(), presets, n=1) if isinstance(name, str) else []
        hint = f"did you mean {near[0]}? " if near else ""
        kind = "cluster" if section == CLUSTER else "preset"
        ways_out = f"{hint}{kind}s are {', '.join(presets)}{OTHERWISE.get(section, '; or write a section of keys')}"
        raise ConfigError(f"{section} is {as_written(name)}: no {kind}; {ways_out}")
    return read_yaml(presets[name].read_text(encoding="utf-8")) or {}


def _override(item: str) -> dict[str, Any]:
    key, _, text = item.partition("=")
    if not key or not text.strip():
        raise ConfigError(f"{item!r}: an override is written section.key=value, with null for no value")
    try:
        value = read_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{item!r}: {' '.join(str(error).split())}") from None
    if key.count(".") > DEEPEST:
        raise ConfigError(f"{item[:60]!r}...: a key of more than {DEEPEST} parts; no section is that deep")
    for name in reversed(key.split(".")):
        value = {name: value}
    return value
