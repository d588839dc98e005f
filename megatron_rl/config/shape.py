"""Whether a mapping fits the dataclasses of `schema.py`: every misfit as a sentence, none of them a surprise later.

A sentence names the key's path, its value and the way out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.bounds import as_written, members
from megatron_rl.config.removed import REMOVED
from megatron_rl.config.schema import Config

RESOLVER = re.compile(r"\$\{[^}]*:")  # a function of OmegaConf, such as ${oc.env:HOME}
WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section",
}


def misfits(mapping: Mapping[Any, Any], schema: type = Config, prefix: str = "") -> Iterator[str]:
    """What in `mapping` is no key of `schema`, or no value that its key can take."""
    types = get_type_hints(schema)
    names = [field.name for field in fields(schema)]
    for key, value in mapping.items():
        full = f"{prefix}{key}"
        if key not in names:
            hint = f"; {REMOVED[full]}" if full in REMOVED else _suggest(str(key), prefix, names)
            yield f"{full}: unknown key{hint}"
        elif is_dataclass(types[key]):
            yield from _section(value, types[key], full)
        elif get_origin(types[key]) is list and is_dataclass(get_args(types[key])[0]):
            yield from _sections(value, get_args(types[key])[0], full)
        elif isinstance(value, Mapping) and (named := named_sections(types[key])):
            for name, one in value.items():
                yield from _section(one, named, f"{full}.{name}")
        else:
            yield from _leaf(value, types[key], schema, full)


def key_of(misfit: str) -> str:
    """The key that a sentence of `misfits` is about, up to an element of a list."""
    return re.split(r"[\[: ]", misfit, maxsplit=1)[0]


def without(mapping: Mapping[str, Any], misfits: Sequence[str]) -> dict[str, Any]:
    """The mapping less the keys that the sentences name."""
    left = dict(mapping)
    for key in dict.fromkeys(map(key_of, misfits)):
        first, _, rest = key.partition(".")
        if rest and isinstance(left.get(first), Mapping):
            left[first] = without(left[first], [rest])
        else:
            left.pop(first, None)
    return left


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value


def known(mapping: Mapping[Any, Any], schema: type = Config) -> dict[Any, Any]:
    """The mapping without what is no key of `schema` (any more)."""
    types = get_type_hints(schema)
    kept: dict[Any, Any] = {}
    for key, value in mapping.items():
        if key not in types:
            continue
        inner = next((one for one in (types[key], *get_args(types[key])) if is_dataclass(one)), None)
        if (named := named_sections(types[key])) and isinstance(value, Mapping):
            kept[key] = {name: known(one, named) if isinstance(one, Mapping) else one for name, one in value.items()}
        elif isinstance(inner, type) and isinstance(value, Mapping):
            kept[key] = known(value, inner)
        elif isinstance(inner, type) and isinstance(value, list):
            kept[key] = [known(one, inner) if isinstance(one, Mapping) else one for one in value]
        else:
            kept[key] = value
    return kept


def named_sections(kind: Any) -> Any:
    """Of what dataclass the values are, where a key holds sections by names of the user's."""
    found = (get_args(one)[1] for one in (kind, *get_args(kind)) if get_origin(one) is dict)
    return next(filter(is_dataclass, found), None)


def _section(value: object, schema: Any, full: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from misfits(value, schema, f"{full}.")
    else:
        inner = ", ".join(field.name for field in fields(schema))
        yield f"{full} is {as_written(value)}: it is a section; its keys are {inner}"


def _sections(value: object, schema: Any, full: str) -> Iterator[str]:
    required = {field.name: field.metadata["choices"] for field in fields(schema) if "choices" in field.metadata}
    if not isinstance(value, list):
        keys = ", ".join(f"{name}: {choices[0]}" for name, choices in required.items())
        wanted = f"it is a list, such as [{{{keys}, ...}}], and an override replaces all of it"
        yield f"{full} is {as_written(value)}: {wanted}"
        return
    for index, element in enumerate(value):
        yield from _section(element, schema, f"{full}[{index}]")
        missing = [name for name in required if isinstance(element, Mapping) and name not in element]
        yield from (f"{full}[{index}].{name} is missing: use one of {', '.join(required[name])}" for name in missing)


def _leaf(value: object, kind: Any, schema: type, full: str) -> Iterator[str]:
    possible = members(kind)
    asked = next(filter(None, map(RESOLVER.search, _texts(value))), None)
    if asked:
        yield f"{full} holds {asked[0]}...}}: a recipe reads no environment and calls nothing; write the value itself"
        return
    if isinstance(value, str) and "${" in value:  # an interpolation: what it stands for is known at the end
        return
    if value is None:
        fits = NoneType in possible
    elif any(isinstance(one, type) and issubclass(one, StrEnum) for one in possible):
        # a member's name too: OmegaConf writes `raise_`, which is how configurations of earlier runs say `raise`
        fits = any(value in [*map(str, one), *one.__members__] for one in possible if one is not NoneType)
    elif isinstance(value, str) and "_" in value and float in possible:
        yield f"{full} is {as_written(value)}: one number, without `_`; where two bounds are meant, they are two keys"
        return
    elif type(value) is int and bool in possible:
        fits = value in (0, 1)
    else:
        fits = True
    if not fits:
        yield f"{full} is {as_written(value)}: {_way_out(value, kind)}"
        return
    if get_origin(kind) is list and isinstance(value, list):  # OmegaConf takes any container as an element
        for index, element in enumerate(value):
            if isinstance(element, (Mapping, list)):
                yield f"{full}[{index}] is {as_written(element)}: {_way_out(element, *get_args(kind))}"
                return
    try:
        OmegaConf.merge(defaults(schema), {full.rpartition(".")[2]: value})
    except (OmegaConfBaseException, TypeError) as error:  # TypeError: a list for a mapping, or the other way round
        where = str(getattr(error, "full_key", None) or "")
        element = where.removeprefix(full.rpartition(".")[2])  # of a list or a mapping
        if element:
            yield f"{full}{element}: {str(getattr(error, 'msg', None) or error).splitlines()[0]}"
        else:
            yield f"{full} is {as_written(value)}: {_way_out(value, kind)}"


@cache
def defaults(schema: type) -> Any:
    """What recipes are merged into."""
    return OmegaConf.structured(schema)


def _way_out(value: object, kind: Any) -> str:
    possible = members(kind)
    enum = next((one for one in possible if isinstance(one, type) and issubclass(one, StrEnum)), None)
    if enum is not None:
        near = difflib.get_close_matches(as_written(value).lower().replace("-", "_"), list(enum), n=1, cutoff=0.85)
        wanted = f"one of {', '.join(enum)}"
        hint = f"did you mean {near[0]}? " if near else ""
    else:
        wanted = " or ".join(WANTED[one] for one in possible if one in WANTED)
        hint = ""
    return f"{hint}use {wanted}{', or null' if NoneType in possible else ''}"


def _suggest(key: str, prefix: str, siblings: Sequence[str]) -> str:
    everywhere = all_keys()
    same = [known for known in everywhere if known.rpartition(".")[2] == key]
    inside = [known for known in same if known.startswith(prefix)]
    near = inside or [f"{prefix}{one}" for one in difflib.get_close_matches(key.lower(), siblings, n=1)] or same
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
