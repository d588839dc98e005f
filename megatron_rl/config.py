"""Recipes to typed configuration: strict keys, presets, overrides, and errors that name the way out.

A recipe is a small YAML delta. `base:` names the file or files it builds on (relative to itself).
A section may be the name of a preset (`correction: tis` is conf/correction/tis.yaml) or a mapping whose
`preset:` is one, with the other keys on top. Command-line overrides are `section.key=value`.
Imports no torch: a mistyped key is refused at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.correction import checks as objective
from megatron_rl.sampler.fleet_config import address_problems
from megatron_rl.schema import Config

CONF = Path(__file__).resolve().parent.parent / "conf"
PRESET_SECTIONS = ("correction", "quantization")


class ConfigError(Exception):
    """A configuration that cannot run. The message names the key, the value and the way out."""


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The typed configuration of a recipe with overrides applied; `run.name` defaults to the file's stem."""
    path = Path(recipe)
    merged = _read(path, seen=())
    for item in overrides:
        merged = _merge(merged, _override(item), path)
    config = from_mapping(merged)
    if config.run.name is None:
        config = from_mapping(_merge(merged, {"run": {"name": path.stem}}, path))
    found = [*objective.problems(config), *address_problems(config)]
    if found:
        raise ConfigError("\n".join(found))
    return config


def from_mapping(mapping: Mapping[str, Any]) -> Config:
    """Typed and strict: unknown keys and values of the wrong type are refused with their full path."""
    _refuse_unknown(mapping, Config, "")
    return _typed(mapping, Config, "")


def _typed(mapping: Mapping[str, Any], schema: type, prefix: str) -> Any:
    try:
        node = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(dict(mapping)))
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{prefix}{error.full_key or 'the configuration'}: {reason}") from None


def to_yaml(config: Config) -> str:
    """The resolved configuration; `from_mapping` of it gives the same object back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=3, cutoff=0.5)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such file{hint}")
    if path.resolve() in seen:
        raise ConfigError(f"{path}: `base` leads back to the file itself; remove one of the two lines")
    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # yaml raises a family of its own, OmegaConf another
        first = " ".join(str(error).split())
        raise ConfigError(f"{path}: not readable as YAML: {first}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: holds {type(loaded).__name__}, expected keys such as `run:` or `learner:`")
    bases = loaded.pop("base", [])
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged = _merge(merged, _read(path.parent / base, (*seen, path.resolve())), path)
    return _merge(merged, loaded, path)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`above` over `below`. Naming a preset starts its section afresh: presets do not pile up."""
    merged = dict(below)
    for section, value in above.items():
        if section in PRESET_SECTIONS and isinstance(value, str):
            merged[section] = _preset(section, value)
        elif section in PRESET_SECTIONS and isinstance(value, Mapping) and "preset" in value:
            rest = {key: v for key, v in value.items() if key != "preset"}
            merged[section] = _deep(_preset(section, value["preset"]), rest)
        elif section in merged and isinstance(value, Mapping) and isinstance(merged[section], Mapping):
            merged[section] = _deep(merged[section], value)
        else:
            merged[section] = value
    return merged


def _deep(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _deep(merged[key], value)
        else:
            merged[key] = value
    return merged


def _preset(section: str, name: str) -> dict[str, Any]:
    path = CONF / section / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in (CONF / section).glob("*.yaml"))
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{section}: no preset {name!r}; {hint}presets are {', '.join(known)}")
    return OmegaConf.to_container(OmegaConf.load(path)) or {}  # type: ignore[return-value]


def _override(item: str) -> dict[str, Any]:
    key, equals, _ = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"{item!r}: an override is written section.key=value")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([item]))  # type: ignore[return-value]
    except Exception as error:  # the grammar of values is OmegaConf's, and so are its errors
        raise ConfigError(f"{item!r}: {' '.join(str(error).split())}") from None


def _refuse_unknown(mapping: Mapping[str, Any], schema: type, prefix: str) -> None:
    types = get_type_hints(schema)
    names = [field.name for field in fields(schema)]
    for key, value in mapping.items():
        full = f"{prefix}{key}"
        if key not in names:
            raise ConfigError(f"{full}: unknown key{_suggest(full, str(key), prefix, names)}")
        if is_dataclass(types[key]):
            if not isinstance(value, Mapping):
                inner = ", ".join(field.name for field in fields(types[key]))
                raise ConfigError(f"{full}: {value!r} where a section was expected; its keys are {inner}")
            _refuse_unknown(value, types[key], f"{full}.")
        elif get_origin(types[key]) is list and is_dataclass(get_args(types[key])[0]):
            for index, element in enumerate(value or []):
                if isinstance(element, Mapping):
                    _refuse_unknown(element, get_args(types[key])[0], f"{full}[{index}].")
                    _typed(element, get_args(types[key])[0], f"{full}[{index}].")


def _suggest(full: str, key: str, prefix: str, siblings: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {prefix}{near[0]}?"
    everywhere = all_keys()
    same = [known for known in everywhere if known.rsplit(".", 1)[-1] == key]
    near = same or difflib.get_close_matches(full, everywhere, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; known here: {', '.join(siblings)}"


def all_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every key, as written on the command line."""
    types = get_type_hints(schema)
    keys: list[str] = []
    for field in fields(schema):
        key, inner = f"{prefix}{field.name}", types[field.name]
        if isinstance(inner, type) and is_dataclass(inner):
            keys += all_keys(inner, f"{key}.")
        else:
            keys.append(key)
    return keys
