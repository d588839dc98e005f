"""Loads recipes (`layers.py`), or what a run has recorded, into the typed Config; applies every
rule of rules.py and engine_rules.py; writes it as YAML, and reports the origin of each key and
changes to its base.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config import engine_rules, layers, rules
from megatron_rl.config.layers import (
    MACHINE,
    PASSED_THROUGH,
    PRESET_SECTIONS,
    ConfigError,
    Layer,
    Sources,
)
from megatron_rl.config.plain_yaml import Settings, presets, read_preset, write_line, write_yaml
from megatron_rl.config.rules import findings
from megatron_rl.config.schema import Config
from megatron_rl.config.shape import key_of, keys_in, made, schema_errors, without
from megatron_rl.config.unknown import carried

RESOLVER = re.compile(r"\$\{[^}]*(?::|\$\{)")  # a function, such as ${oc.env:HOME}


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The typed configuration of a recipe with overrides applied; `run.name` defaults to the file's
    stem.
    """
    return _sound(*read(recipe, overrides))


def read(recipe: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """Return the configuration and the errors of the recipe; invalid values are null or their
    defaults.
    """
    path = layers.find_recipe(recipe)
    return _checked(layers.of_recipe(path, overrides), path)


def cluster(recipe: str | Path, overrides: Sequence[str] = ()) -> tuple[str | None, str | None]:
    """The cluster that a recipe is for, and the machine that this is, as `--on` has it."""
    name = layers.naming(layers.of_recipe(recipe, overrides)).content[layers.CLUSTER]
    if name is None:
        return None, None
    return name, layers.cluster(name).get(MACHINE)


def all_keys() -> list[str]:
    """Every key, as written on the command line."""
    return keys_in(Config)


def sources(recipe: str | Path, overrides: Sequence[str] = ()) -> Sources:
    """Map each key to the files, presets and overrides that set it and their values; the last
    applies.
    """
    return layers.sources(layers.of_recipe(recipe, overrides), _whole_keys())


def _whole_keys() -> set[str]:
    """Return the keys with a single value, not a mapping passed to megatron-core or vLLM."""
    return set(all_keys()) - {".".join(one) for one in PASSED_THROUGH}


def changes(recipe: str | Path, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Yield the changes of a recipe and overrides to its base, key by key, with their origin if it
    is not the recipe's file; then the keys of `data` from a layer whose data.train is replaced.
    """
    whole = layers.of_recipe(recipe, overrides)
    by = sources(recipe, overrides)
    own = whole[-1 - len(overrides)].where
    before, _ = _checked(whole[: -1 - len(overrides)], Path(recipe))
    after, _ = _checked(whole, Path(recipe))
    old = flat(before)
    new = flat(after)
    for key in dict.fromkeys((*new, *old)):
        if new.get(key) != old.get(key):
            where = by[key][-1][0] if key in by else "its default"
            where = "" if where == own else f" ({where.removesuffix(f', named in {own}')})"
            was = write_line(old[key]) if key in old else "unset"
            yield f"{key} {write_line(new.get(key))}, was {was}{where}"
    trained = [where for where, _ in by.get("data.train", ())]
    for key, settings in by.items():
        where, value = settings[-1]
        if key.startswith("data.") and where in trained and where != trained[-1]:
            yield f"{key} {write_line(value)}, which {where} sets for its own data.train"


def flat(config: Config) -> Settings:
    """Map each key to its value, including keys passed to megatron-core and vLLM."""
    found: Settings = {}
    whole = _whole_keys()
    for section, value in asdict(config).items():
        found |= layers.leaves(section, value, whole)
    return found


def _checked(given: Sequence[Layer], path: Path) -> tuple[Config, list[str]]:
    merged = layers.merged(given)
    if "axes" in merged:
        raise ConfigError(
            f"{path}: `axes` make it a grid of runs; in the repository's folder, start it by "
            f"python tools/compare_corrections.py {path}"
        )
    run = merged.get("run", {})
    if isinstance(run, Mapping) and run.get("name") is None:
        merged["run"] = {**run, "name": path.stem}
    text = str(merged)
    # one that calls a function is not resolved, not even behind another key: `schema_errors` refuses it
    if "${" in text and not RESOLVER.search(text):
        merged = _interpolated(merged)
    wrong = list(schema_errors(merged, Config))
    if wrong:  # those keys are at their defaults
        merged = {
            section: value
            for section, value in without(merged, wrong).items()
            if not any(schema_errors({section: value}, Config))
        }
    config = made(Config, merged)
    keys = set(map(key_of, wrong))
    return config, [
        *wrong,
        *(line for line in check(config) if not any(key in line for key in keys)),
    ]


def _interpolated(given: Settings) -> Settings:
    """Return the mapping with references to other keys replaced by their values."""
    whole: Any = OmegaConf.merge(asdict(Config()), given)
    try:
        found = OmegaConf.to_container(whole, resolve=True)
    except OmegaConfBaseException as error:
        section: Any = OmegaConf.to_container(error.parent_node)
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(
            f"{error.full_key} is {section[error.key]}: {reason}; name another key, or the value"
        ) from None
    return _part(found, given)


def _part(found: Any, given: Any) -> Any:
    """Return the part of `found` under the given keys."""
    if isinstance(given, Mapping):
        return {key: _part(found[key], value) for key, value in given.items()}
    return found


def check(config: Config) -> list[str]:
    """Return the errors of keys that conflict."""
    return list(findings((*rules.RULES, *engine_rules.RULES), vars(config)))


def from_mapping(mapping: Mapping[str, Any]) -> Config:
    """Typed and strict: unknown keys and values of the wrong type are refused with their full path,
    all at once.
    """
    resolved = _without_preset_names(mapping)
    found = list(schema_errors(resolved, Config))
    if found:
        raise ConfigError("\n".join(found))
    return made(Config, resolved)


def to_yaml(config: Config) -> str:
    """Write the resolved configuration, which `from_mapping` reads. A section equal to a preset
    names it.
    """
    mapping = asdict(config)
    for section in PRESET_SECTIONS:
        if name := preset_name(section, getattr(config, section)):
            mapping[section] = {"preset": name, **mapping[section]}
    return write_yaml(mapping)


def preset_name(section: str, value: Any) -> str | None:
    for name, path in presets(section).items():
        if made(type(value), read_preset(path)) == value:
            return name
    return None


def _without_preset_names(mapping: Mapping[str, Any]) -> Settings:
    """Drop each section's `preset`: a resolved section already holds the values that it stands
    for.
    """
    resolved = dict(mapping)
    for section in PRESET_SECTIONS:
        if isinstance(resolved.get(section), Mapping):
            resolved[section] = {
                key: value for key, value in resolved[section].items() if key != "preset"
            }
    return resolved


def recorded_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load a run's recorded configuration, whose keys and presets may have been removed since."""
    return from_base(recorded(path), overrides, path)


def from_base(
    base: Mapping[str, Any], overrides: Sequence[str] = (), path: Path = Path("overrides")
) -> Config:
    """Overrides, presets included, over a mapping that is no recipe's file."""
    return _sound(*_checked([Layer(str(path), base), *layers.of_overrides(overrides)], path))


def recorded(path: Path) -> Settings:
    """The mapping of a recorded configuration in today's keys, without preset names: a base for
    overrides.
    """
    try:
        return carried(_without_preset_names(layers.read_file(path)))
    except ValueError as error:
        raise ConfigError(f"{path}: recorded by another version:\n{error}") from None


def _sound(config: Config, found: Sequence[str]) -> Config:
    if found:
        raise ConfigError("\n".join(found))
    return config
