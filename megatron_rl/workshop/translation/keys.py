"""Reading another project's settings: found wherever the user's file has them, and none silently ignored.

A file may be the section alone, a whole run's configuration, dotted overrides or flags. Everything is
flattened to dotted names first; what is not about correction is listed in a note, what may be is an error.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from megatron_rl.config.schema import CorrectionConfig
from megatron_rl.workshop.translation.left_out import LEFT_OUT_NAMES, may_correct

# what a removed setting holds when it is switched off
OFF = (None, False, -1, "", "null", "none", "disabled")
LEFT_OUT = "left out, as not about correction: "
RESOLVE = "resolve the configuration first"


class TranslationError(ValueError):
    """A key that has no exact counterpart here, with the reason."""


class Translation(NamedTuple):
    """Our config, and under which conditions it does the same."""

    config: CorrectionConfig
    notes: list[str]


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections, dotted names and command-line flags as dotted names with underscores."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        path = prefix + str(name).lstrip("-+").replace("-", "_")
        inner = flatten(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
        for key, leaf in inner.items():
            if key in flat and flat[key] != leaf:
                raise TranslationError(f"{key} is given twice, as {flat[key]!r} and as {leaf!r}")
            flat[key] = leaf
    return flat


def last(path: str) -> str:
    return path.rpartition(".")[2]


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip().lower() in ("null", "none"))


def _switched_off(value: Any) -> bool:
    """Whether a removed setting asks for nothing."""
    return (value.strip().lower() if isinstance(value, str) else value) in OFF


def _removed(framework: str, path: str, old: Mapping[str, str]) -> bool:
    """Whether it is a name that is no longer there; under the section of another loss it is that section's own."""
    return last(path) in old and LEFT_OUT_NAMES[framework].isdisjoint(path.split(".")[:-1])


def _read(framework: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    flat = flatten(mapping)
    if flat and all(path == "defaults" or path.startswith("hydra.") for path in flat):
        raise TranslationError(f"{framework}: {', '.join(flat)}: what the files it names set is not read; {RESOLVE}")
    return flat


class Keys:
    """The values of one project's settings, by name."""

    def __init__(self, framework: str, values: Mapping[str, Any], present: bool = True) -> None:
        self.framework, self._values = framework, dict(values)
        self.present = present  # whether the project's section is there at all
        self.replaced = False  # whether the values are those of another section
        self.notes: list[str] = []

    def error(self, name: str, reason: str) -> TranslationError:
        value = "" if name not in self._values else f" is {reprlib.repr(self._values[name])}"
        return TranslationError(f"{self.framework}: {name}{value}: {reason}")

    def raw(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name, default)
        if isinstance(value, str):
            if "${" in value:
                raise self.error(name, "an interpolation; write the value it stands for")
        return None if _is_null(value) else value

    def rename(self, former: Mapping[str, str]) -> None:
        """Values under a former name, as if they had been given under today's."""
        for old, new in former.items():
            if self.given(old):
                if self.given(new) and self._values[new] != self._values[old]:
                    raise self.error(old, f"given as {new} too, with a different value")
                self._values[new] = self._values[old]

    def replace(self, other: Keys, names: Collection[str]) -> None:
        """The values of another section for these names, absent ones included."""
        kept = {name: value for name, value in self._values.items() if name not in names}
        self._values = kept | {name: value for name, value in other._values.items() if name in names}
        self.notes += other.notes
        self.present = self.replaced = True

    def given(self, name: str) -> bool:
        return self.raw(name) is not None

    def null(self, name: str) -> bool:
        """Whether the key is there to say that there is no value."""
        return name in self._values and not self.given(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        raise self.error(name, "expected true or false")

    def choice(self, name: str, default: str | None, *choices: str) -> str | None:
        value = self.raw(name, default)
        if value is not None and value not in choices:
            raise self.error(name, f"expected one of {', '.join(choices)}")
        return value

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        return None if value is None else str(value)

    def number(self, name: str, default: float | None = None) -> float | None:
        value = self.raw(name, default)
        return None if value is None else self.as_number(name, value)

    def positive(self, name: str, default: float | None = None) -> float | None:
        value = self.number(name, default)
        if value is not None and value <= 0:
            raise self.error(name, "expected a number above 0")
        return value

    def lower(self, name: str, default: float | None = None) -> float | None:
        """A lower bound on a ratio: 0 bounds nothing."""
        value = self.number(name, default)
        if value is not None and value < 0:
            raise self.error(name, "ratios are never negative")
        return value or None

    def as_number(self, name: str, value: Any) -> float:
        try:
            # underscores separate digits in Python and YAML, and bounds in verl: never guess which
            number = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.error(name, "expected a number")
        return number


def anywhere(
    framework: str,
    mapping: Mapping[str, Any],
    known: Collection[str],
    common: Collection[str] = (),
    old: Mapping[str, str] | None = None,
) -> Keys:
    """For projects whose names say enough without their section; `common` ones are too short to look for typos of."""
    flat = _read(framework, mapping)
    used = {path for path in flat if last(path) in known}
    values: dict[str, Any] = {}
    for path in sorted(used):
        _set(framework, values, last(path), flat[path], path)
    keys = Keys(framework, values)
    _leave_out(keys, flat, used, set(known) - set(common), old or {}, known)
    return keys


def _set(framework: str, values: dict[str, Any], name: str, value: Any, path: str) -> None:
    if values.setdefault(name, value) != value:
        raise TranslationError(f"{framework}: {name} is given twice with different values, once at {path}")


def in_section(
    framework: str,
    mapping: Mapping[str, Any],
    section: str,
    known: Collection[str],
    beside: Collection[str] = (),
    common: Collection[str] = (),
    old: Mapping[str, str] | None = None,
    bare: bool = True,
) -> Keys:
    """For a section with dotted name `section`, given in full, from any of its parents on, or (`bare`) as its keys.

    `beside` are full dotted names outside it that are read too. Names in `common` may mean something else
    in other sections; any other known name outside is an error.
    """
    flat, old = _read(framework, mapping), old or {}
    parts = section.split(".")
    names = [".".join(parts[place:]) for place in range(len(parts))]
    values: dict[str, Any] = {}
    used: set[str] = set()
    present = loose = False
    for path, value in flat.items():
        if path in names:
            if value not in (None, {}):
                raise TranslationError(f"{framework}: {path} is {value!r}: expected keys and values")
            present |= value is not None
            used.add(path)
            continue
        inside = next((path[len(name) + 1 :] for name in names if path.startswith(f"{name}.")), None)
        if inside is None and bare and path in known:
            inside, loose = path, True
        if inside is not None:
            present = True
        elif any(name == path or name.endswith(f".{path}") for name in beside):
            inside = last(path)
        elif not (_removed(framework, path, old) and _switched_off(value)):
            continue
        used.add(path)
        if inside is not None and not (inside in old and _switched_off(value)):
            _set(framework, values, inside, value, path)
    keys = Keys(framework, values, present)
    outside = {last(name) for name in beside}
    for name in values:
        if name not in known and name not in outside:
            raise _unknown(keys, name, known, old)
    rest = [path for path in flat if path not in used]
    if rest and not any("." in path for path in flat) and (loose or not used):
        raise _unknown(Keys(framework, flat), rest[0], set(known if bare else ()) | outside | {last(section)}, old)
    telling = set(known) - set(common)
    _leave_out(keys, flat, used, telling | outside - set(common) | {last(section)}, old, {*common, *section.split(".")})
    for path in rest:
        if last(path) in telling and last(section) not in path and flat[path] is not None:
            raise TranslationError(f"{framework}: {path}: {framework} reads it under {section} only")
    return keys


def _unknown(keys: Keys, name: str, known: Iterable[str], old: Mapping[str, str]) -> TranslationError:
    if name in old:
        return keys.error(name, f"no longer there; {old[name]}")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
    return keys.error(name, f"unknown; {hint}")


def _leave_out(
    keys: Keys,
    flat: Mapping[str, Any],
    used: Collection[str],
    telling: Collection[str],
    old: Mapping[str, str],
    elsewhere: Collection[str],
) -> None:
    """What was not looked at goes into a note; names in `elsewhere` are known without being looked for."""
    shown: dict[str, None] = {}
    for path in flat:
        if path in used:
            continue
        _refuse_unread(keys.framework, path, flat[path], telling, old, elsewhere)
        parts = path.split(".")
        heads = (".".join(parts[: depth + 1]) for depth in range(len(parts)))
        shown[next(head for head in heads if head == path or not any(u.startswith(f"{head}.") for u in used))] = None
    if "defaults" in flat:
        keys.notes.append(f"defaults: what the files it names set is not read; {RESOLVE}")
    if shown:
        keys.notes.append(f"{LEFT_OUT}{', '.join(_summary(list(shown), used))}")


def _refuse_unread(
    framework: str,
    path: str,
    value: Any,
    telling: Collection[str],
    old: Mapping[str, str],
    elsewhere: Collection[str],
) -> None:
    """Refuses what looks like a mistyped, removed or new setting of the correction."""
    if _removed(framework, path, old) and not _switched_off(value):
        raise TranslationError(f"{framework}: {path}: no longer there; {old[last(path)]}")
    known = {*telling, *old, *elsewhere, *LEFT_OUT_NAMES[framework]}
    for part in path.split("."):
        if part in known:
            continue
        close = difflib.get_close_matches(part, telling, n=1, cutoff=0.85)
        if close:
            raise TranslationError(f"{framework}: {path}: unknown; did you mean {close[0]}?")
        if may_correct(part) and not _is_null(value):
            near = difflib.get_close_matches(part, telling, n=1, cutoff=0.0)
            raise TranslationError(
                f"{framework}: {path}: unknown, and by its words it may be about correction: the nearest that is known "
                f"is {near[0]}; take it out if it is about something else"
            )


def _summary(paths: list[str], used: Collection[str]) -> list[str]:
    """The names, and where a section holds many of them the section but for what was read."""
    children: dict[str, list[str]] = {}
    for path in paths:
        children.setdefault(path.rpartition(".")[0], []).append(path)
    summary = []
    for parent, names in children.items():
        if not parent or len(names) < 4:
            summary += names
            continue
        inside = [path[len(parent) + 1 :].partition(".")[0] for path in used if path.startswith(f"{parent}.")]
        summary.append(f"{parent} (all but {', '.join(sorted(set(inside)))})")
    return sorted(summary)
