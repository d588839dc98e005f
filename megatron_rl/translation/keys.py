"""Reading another project's settings: typed access by name, and no key that is silently ignored."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron_rl.schema import CorrectionConfig


class TranslationError(ValueError):
    """A key that has no exact counterpart here, with the reason."""


class Translation(NamedTuple):
    """Our config, and under which conditions it does the same."""

    config: CorrectionConfig
    notes: list[str]


def nested(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names and command-line flags as nested sections with underscores."""
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        path = str(name).lstrip("-+").replace("-", "_").split(".")
        place = found
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise TranslationError(f"{name}: {part} is both a value and a section")
        inner = nested(value) if isinstance(value, Mapping) else value
        if isinstance(inner, dict) and isinstance(place.get(path[-1]), dict):
            place[path[-1]].update(inner)
        else:
            place[path[-1]] = inner
    return found


def section(mapping: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Down the named sections as far as they exist, whichever of them the mapping starts with."""
    place: Mapping[str, Any] = mapping
    for name in names:
        inner = place.get(name)
        if isinstance(inner, Mapping):
            place = inner
    return place


def leaves(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Every value by its last name, for projects whose names are unique without their section."""
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        found.update(leaves(value) if isinstance(value, Mapping) else {name: value})
    return found


class Keys:
    """The values of one section, each read once by name."""

    def __init__(self, framework: str, values: Mapping[str, Any], known: Iterable[str], strict: bool = True) -> None:
        self._framework, self._values = framework, values
        self.notes: list[str] = []
        known = set(known)
        others = [name for name in values if name not in known]
        for name in others:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if close:
                raise self.error(name, f"unknown; did you mean {close[0]}?")
            if strict:
                raise self.error(name, f"unknown; known are {', '.join(sorted(known))}")
        if others:
            self.notes.append(f"left out, as not about correction: {', '.join(sorted(others))}")

    def error(self, name: str, reason: str) -> TranslationError:
        value = self._values.get(name)
        said = "" if name not in self._values else f" is {value!r}"
        return TranslationError(f"{self._framework}: {name}{said}: {reason}")

    def given(self, name: str) -> bool:
        return self._values.get(name) is not None

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise self.error(name, "expected true or false")

    def choice(self, name: str, default: str | None, *choices: str) -> str | None:
        value = self._values.get(name, default)
        if value is None or str(value).lower() in ("null", "none"):
            return None
        if value not in choices:
            raise self.error(name, f"expected one of {', '.join(choices)}")
        return str(value)

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        return None if value is None else str(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self._values.get(name, default)
        if value is None:
            return None
        return self.as_number(name, value)

    def positive(self, name: str, default: float | None = None) -> float | None:
        value = self.number(name, default)
        if value is not None and value <= 0:
            raise self.error(name, "expected a number above 0")
        return value

    def as_number(self, name: str, value: Any) -> float:
        try:
            # underscores separate digits in Python and YAML, and bounds in verl: never guess which
            number = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(name, "expected a number")
        return number
