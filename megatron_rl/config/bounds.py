"""Which values a key can take: bounds stand beside the field that they bound, and `sound` is what reads them.

workers: int = field(default=1, metadata=at_least(1))
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Section = TypeVar("Section")
LARGEST = 2**32 - 1  # of a whole number: seeds beyond it are none to numpy, and no size comes near
LONGEST_NAME = 255  # bytes, of a file


@dataclass(frozen=True)
class Bound:
    holds: Callable[[Any], bool]
    complaint: str  # with places for the key and the value


def at_least(least: float, expected: str = "") -> dict[str, Bound]:
    return expect(lambda value: value >= least, expected or f"{least:g} or more")


def above(floor: float, expected: str = "") -> dict[str, Bound]:
    return expect(lambda value: value > floor, expected or f"above {floor:g}")


def between(least: float, most: float, expected: str = "") -> dict[str, Bound]:
    return expect(lambda value: least <= value <= most, expected or f"{least:g} or more, at most {most:g}")


def expect(holds: Callable[[Any], bool], expected: str) -> dict[str, Bound]:
    return {"bound": Bound(holds, "{key}: {value:g}, expected " + expected)}


def need(holds: Callable[[Any], bool], way_out: str) -> dict[str, Bound]:
    return {"bound": Bound(holds, "{key} is {value}: " + way_out)}


def is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def inside(**bounds: Mapping[str, Bound]) -> dict[str, Any]:
    """Of the keys in a map that is handed to megatron-core or vLLM; what they hold otherwise is theirs to say."""
    return {"inside": {key: bound["bound"] for key, bound in bounds.items()}}


def is_folder_name(name: str) -> bool:
    """One component of a path, which no file system and no command takes for something else."""
    return (
        name.isprintable()
        and name.strip(" ") == name
        and "/" not in name
        and not name.startswith("-")
        and name not in ("", ".", "..")
        and len(os.fsencode(name)) <= LONGEST_NAME
    )


FOLDER_NAME = {
    "bound": Bound(
        is_folder_name,
        "{key} is {value!r}: it names one folder; use letters, digits and any of . _ - after the first character, "
        f"at most {LONGEST_NAME} bytes",
    )
}


def as_written(value: object) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return repr(value) if value in ("", "null") or value != value.strip() else value
    return str(value).lower() if isinstance(value, bool) else str(value)


def members(kind: Any) -> tuple[Any, ...]:
    """float | None -> (float, NoneType); list[str] -> (list,)."""
    return tuple(get_origin(one) or one for one in (get_args(kind) if NoneType in get_args(kind) else (kind,)))


def sound(section: Section, path: str = "") -> tuple[Section, dict[str, str]]:
    """The section with every value that cannot be at null or its default, and by key what was wrong with it."""
    wrong: dict[str, str] = {}
    changes: dict[str, Any] = {}
    for field in fields(section):  # type: ignore[arg-type]
        key, value = f"{path}.{field.name}" if path else field.name, getattr(section, field.name)
        if is_dataclass(value):
            changes[field.name], inner = sound(value, key)
        elif isinstance(value, list) and value and is_dataclass(value[0]):
            changes[field.name], inner = [], {}
            for index, element in enumerate(value):
                better, own = sound(element, f"{key}[{index}]")
                changes[field.name].append(better)
                inner |= own
        elif isinstance(value, dict) and value and is_dataclass(next(iter(value.values()))):
            bound, inner, changes[field.name] = field.metadata["bound"], {}, {}
            if not bound.holds(value):
                inner[key] = bound.complaint.format(key=key, value=", ".join(value))
            for name, element in value.items():
                changes[field.name][name], own = sound(element, f"{key}.{name}")
                inner |= own
        else:
            kind = _types(type(section))[field.name]  # type: ignore[arg-type]
            complaint = _complaint(key, value, kind, field.metadata.get("bound"))
            inner = {key: complaint} if complaint else {}
            if complaint:
                changes[field.name] = None if NoneType in members(kind) else _default(field)
            elif "inside" in field.metadata:
                inner = _inside(key, value, field.metadata["inside"])
                changes[field.name] = {name: one for name, one in value.items() if f"{key}.{name}" not in inner}
        wrong |= inner
    return replace(section, **changes), wrong  # type: ignore[type-var]


def _complaint(key: str, value: Any, kind: Any, bound: Bound | None) -> str | None:
    possible = members(kind)
    if value is None and NoneType in possible:
        return None
    for one in possible:
        if isinstance(one, type) and issubclass(one, StrEnum) and value not in list(one):
            return f"{key} is {as_written(value)}: use one of {', '.join(one)}"
    if float in possible and not _finite(value):
        none = ", or null for none" if NoneType in possible else ""
        return f"{key} is {as_written(value)}: give a finite number{none}"
    if type(value) is int and int in possible and abs(value) > LARGEST:
        return f"{key} is {value}: give a whole number of at most {LARGEST}"
    if bound is None or bound.holds(value):
        return None
    return bound.complaint.format(key=key, value=value)


def _inside(path: str, given: Mapping[str, Any], bounds: Mapping[str, Bound]) -> dict[str, str]:
    wrong = {}
    for name in sorted(bounds.keys() & given.keys()):
        key, value, bound = f"{path}.{name}", given[name], bounds[name]
        if value is None:
            continue
        if not _finite(value):
            wrong[key] = f"{key} is {as_written(value)}: give a finite number, or leave it out"
        elif not bound.holds(value):
            wrong[key] = bound.complaint.format(key=key, value=value)
    return wrong


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@cache
def _types(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
