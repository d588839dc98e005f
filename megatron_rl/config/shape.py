"""Validation of a recipe against the dataclasses of `schema.py`: unknown keys, wrong types, values
out of bounds, each a sentence (`schema_errors`); typed sections of values that fit (`made`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_rl.config.bounds import Bound, Inside, as_written, did_you_mean, is_number
from megatron_rl.config.unknown import unknown

Section = TypeVar("Section")
LARGEST = 2**32 - 1  # largest whole number: numpy takes no larger seeds, and no size comes near
WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "text",
    list: "a list",
    dict: "a section",
}


@dataclass(frozen=True)
class Key:
    """A field of a section, as its annotation describes it."""

    field: Field[Any]
    kind: Any
    bound: Bound | None
    inside: Mapping[str, Bound]  # of keys in a map passed to megatron-core or vLLM
    # dataclass of its section, list of sections or sections by user-defined names; None: a plain
    # value
    section: Any
    container: Any  # list, dict or None

    @property
    def kinds(self) -> tuple[Any, ...]:
        """float | None -> (float, NoneType); list[str] -> (list,)."""
        return tuple(get_origin(one) or one for one in members(self.kind))

    @property
    def choices(self) -> tuple[StrEnum, ...]:
        """Values that a key of an enumeration takes."""
        found = next((tuple(one) for one in self.kinds if is_enum(one)), ())
        return self.field.metadata.get("choices", found)

    @property
    def default(self) -> Any:
        if self.field.default_factory is MISSING:
            return self.field.default
        return self.field.default_factory()

    def sections(self, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the sections in its value, with their paths below the key."""
        if value is None or self.section is None:
            return
        if self.container is list:
            yield from ((f"[{index}]", one) for index, one in enumerate(value))
        elif self.container is dict:
            yield from ((f".{name}", one) for name, one in value.items())
        else:
            yield "", value


def is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of another, itself."""
    if get_origin(kind) in (Union, UnionType):
        return get_args(kind)
    return (kind,)


@cache
def keys_of(schema: type) -> dict[str, Key]:
    plain = get_type_hints(schema)
    annotated = get_type_hints(schema, include_extras=True)
    found = {}
    for field in fields(schema):
        kind = plain[field.name]
        whole = annotated[field.name]
        notes = [
            note for one in (whole, *get_args(whole)) for note in getattr(one, "__metadata__", ())
        ]
        bound = next((note for note in notes if isinstance(note, Bound)), None)
        inside: Inside = next((note for note in notes if isinstance(note, Inside)), Inside())
        places = (
            (each, get_origin(one))
            for one in (kind, *get_args(kind))
            for each in (one, *get_args(one))
        )
        section, container = next(
            (place for place in places if is_dataclass(place[0])), (None, None)
        )
        found[field.name] = Key(field, kind, bound, inside, section, container)
    return found


def keys_in(schema: type, prefix: str = "") -> list[str]:
    """Return every key of a schema and its sections, dotted."""
    found: list[str] = []
    for name, key in keys_of(schema).items():
        one_section = key.section is not None and key.container is None
        if one_section:
            found += keys_in(key.section, f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def schema_errors(
    mapping: Mapping[Any, Any], schema: type, prefix: str = "", everywhere: Sequence[str] = ()
) -> Iterator[str]:
    """Yield errors for unknown keys and invalid values. `everywhere`: keys to suggest."""
    keys = keys_of(schema)
    everywhere = everywhere or keys_in(schema)
    for name, value in mapping.items():
        full = f"{prefix}{name}"
        if name not in keys:
            yield from unknown(str(name), value, prefix, list(keys), everywhere)
            continue
        key = keys[name]
        if problem := _problem(full, value, key):
            yield problem
            continue
        yield from _inside(full, value, key.inside)
        for place, section in key.sections(value):
            yield from schema_errors(section, key.section, f"{full}{place}.", everywhere)
            if key.container is list:
                yield from _missing(section, key.section, f"{full}{place}")


def _problem(full: str, value: Any, key: Key) -> str | None:
    if key.section is None and "${" in str(value):
        return f"{full} is {as_written(value)}: no environment is read and no function called; write the value itself"
    if not fits(key.kind, value) or (key.choices and value not in (None, *key.choices)):
        return f"{full} is {as_written(value)}: {_way_out(value, key)}"
    if value is None or key.bound is None:
        return None
    if key.bound.holds(value if key.section else made(key.kind, value)):
        return None
    return f"{full} is {as_written(value)}: {key.bound.hint}"


def fits(kind: Any, value: Any) -> bool:
    """True if a value is of a type, as YAML writes it."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(one, value) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(inner[0], one) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and fits(inner[1], one) for name, one in value.items()
        )
    if is_dataclass(kind):
        return isinstance(value, Mapping)
    if is_enum(kind):
        return value in list(kind)
    if kind is float:
        return is_number(value)
    if kind is int:
        return type(value) is int and abs(value) <= LARGEST
    if kind is str:
        return isinstance(value, str) or type(value) is int
    return isinstance(value, kind)


def _way_out(value: object, key: Key) -> str:
    null = ", or null" if NoneType in key.kinds else ""
    if key.choices:
        word = as_written(value).lower().replace("-", "_")
        hint = did_you_mean(word, key.choices, "did you mean {}? ", cutoff=0.85)
        return f"{hint}use one of {', '.join(key.choices)}{null}"
    if key.section and key.container is None:
        return f"it is a section; its keys are {', '.join(keys_of(key.section))}"
    if key.section:
        return f"use a {'list' if key.container is list else 'mapping'} of sections{null}"
    if type(value) is int and int in key.kinds:
        return f"use a whole number of at most {LARGEST}"
    for inner in get_args(key.kind):
        if is_enum(inner):
            return f"use a list of {', '.join(inner)}{null}"
    return f"use {' or '.join(WANTED[one] for one in key.kinds if one in WANTED)}{null}"


def _inside(full: str, given: Any, bounds: Mapping[str, Bound]) -> Iterator[str]:
    for name in sorted(bounds.keys() & given.keys()) if bounds else ():
        value = given[name]
        if value is None or (is_number(value) and bounds[name].holds(value)):
            continue
        yield f"{full}.{name} is {as_written(value)}: {bounds[name].hint}"


def _missing(section: Mapping[str, Any], schema: type, full: str) -> Iterator[str]:
    """Yield errors for keys that each section of a list requires."""
    for name, key in keys_of(schema).items():
        if "choices" in key.field.metadata and name not in section:
            yield f"{full}.{name} is missing: use one of {', '.join(key.choices)}"


def key_of(misfit: str) -> str:
    """Return the key in an error of `schema_errors`, up to an element of a list."""
    return re.split(r"[\[: ]", misfit, maxsplit=1)[0]


def without(mapping: Mapping[str, Any], schema_errors: Sequence[str]) -> dict[str, Any]:
    """Return the mapping without the keys that the errors name."""
    left = dict(mapping)
    for key in dict.fromkeys(map(key_of, schema_errors)):
        first, _, rest = key.partition(".")
        if rest and isinstance(left.get(first), Mapping):
            left[first] = without(left[first], [rest])
        else:
            left.pop(first, None)
    return left


def made(kind: Any, value: Any) -> Any:
    """Convert a valid value to its type: dataclasses, enumerations, floats."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, UnionType):
        return made(next(one for one in inner if fits(one, value)), value)
    if origin is list:
        return [made(inner[0], one) for one in value]
    if origin is dict:
        return {name: made(inner[1], one) for name, one in value.items()}
    if is_dataclass(kind):
        keys = keys_of(kind)  # type: ignore[arg-type]
        return kind(**{name: made(keys[name].kind, one) for name, one in value.items()})  # type: ignore[operator]
    if kind in (float, str) or is_enum(kind):
        return kind(value)
    return value


def sanitize(section: Section, path: str) -> tuple[Section, list[str]]:
    """Return a section with invalid values at their defaults, and the errors."""
    whole = {path: asdict(section)}  # type: ignore[call-overload]
    wrong = list(schema_errors(whole[path], type(section), f"{path}."))
    return made(type(section), without(whole, wrong)[path]), wrong
