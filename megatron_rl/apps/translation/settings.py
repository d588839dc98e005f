"""Finds another project's correction settings among the keys of a file, which sources.py reads;
none silently ignored.

A file may be the section alone, a whole run's configuration, dotted overrides or flags. Everything
is flattened to dotted names first. What is not about correction is listed in a note, what may be is
an error: a misspelt switch, or one that is newer than this translator, must not be left out as if
it changed nothing.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_rl.apps.translation.keys import (
    Keys,
    Native,
    TranslationError,
    is_null,
)
from megatron_rl.apps.translation.reading import DEEPEST
from megatron_rl.apps.translation.table import Names, table
from megatron_rl.config.bounds import did_you_mean

# what a removed setting holds when it is switched off
OFF = (None, False, -1, "", "null", "none", "disabled")
LEFT_OUT = "left out, as not about correction: "
LISTED = 12  # names in a comment, of which the rest is counted
RESOLVE = "resolve the configuration first"
# acronyms stay whole, camel case comes apart
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# by one of its words, a name may be a setting of a rollout correction
SUSPECT = re.compile(
    r"is|tis|rs|mis|icepop|opsm|kl|veto|correction|importance|(clip|loss|mask|stale)[a-z]*", re.I
)


def flatten(mapping: Native, prefix: str = "") -> dict[str, Any]:
    """Sections, dotted names and command-line flags as dotted names with underscores."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        path = prefix + str(name).lstrip("-+").replace("-", "_")
        if path.count(".") > DEEPEST:
            raise TranslationError(f"{path[:60]}...: a key of more than {DEEPEST} parts")
        if isinstance(value, Mapping) and value:
            inner = flatten(value, f"{path}.")
        else:
            inner = {path: value}
        for key, leaf in inner.items():
            if key in flat and flat[key] != leaf:
                raise TranslationError(f"{key} is given twice, as {flat[key]!r} and as {leaf!r}")
            flat[key] = leaf
    return flat


def last(path: str) -> str:
    return path.rpartition(".")[2]


def settings(project: str, mapping: Native, names: Names | None = None) -> Keys:
    """Settings of a correction, by the last part of their names.

    Those of a section are given in full, from any of its parents on, or (`bare`) alone; without a
    section the name is enough. Names in `common` may mean something else in other sections; any
    other known name outside is an error.
    """
    names = names or table(project).correction
    keys = Keys(project, flatten(mapping), present=not names.section)
    flat = keys.flat
    for path in list(flat):
        if any(f".{part}." in f".{path}." for part in names.apart):
            keys.apart[path] = flat.pop(path)
    if flat and all(path == "defaults" or path.startswith("hydra.") for path in flat):
        raise TranslationError(
            f"{project}: {', '.join(flat)}: what the files it names set is not read; {RESOLVE}"
        )
    if names.section:
        _of_section(keys, names)
    else:
        for path in sorted(path for path in flat if last(path) in names.keys):
            keys.take(last(path), flat[path], path)
    _leave_out(keys, names)
    keys.rename(names.former)
    return keys


def _of_section(keys: Keys, names: Names) -> None:
    flat = keys.flat
    parts = names.section.split(".")
    heads = [".".join(parts[place:]) for place in range(len(parts))]
    loose = False
    for path, value in flat.items():
        inside = next(
            (path[len(head) + 1 :] for head in heads if path.startswith(f"{head}.")), None
        )
        if path in heads:
            if value not in (None, {}):
                raise TranslationError(
                    f"{keys.framework}: {path} is {value!r}: expected keys and values"
                )
            keys.present |= value is not None
        elif inside is not None or (names.bare and path in names.keys):
            keys.present = True
            loose |= inside is None
            inside = inside or path
            if not (inside in names.removed and _switched_off(value)):
                keys.take(inside, value, path)
        elif any(f".{name}".endswith(f".{path}") for name in names.beside):
            keys.take(last(path), value, path)
        elif not (names.is_removed(path) and _switched_off(value)):
            continue
        keys.paths.add(path)
    for name in keys.values:
        if name not in names.keys and name not in names.outside:
            raise _unknown(keys, name, names.keys, names)
    rest = [path for path in flat if path not in keys.paths]
    if rest and not any("." in path for path in flat) and (loose or not keys.paths):
        known = {*(names.keys if names.bare else ()), *names.outside, last(names.section)}
        keys.values = flat
        raise _unknown(keys, rest[0], known, names)


def _switched_off(value: Any) -> bool:
    return (value.strip().lower() if isinstance(value, str) else value) in OFF


def _unknown(keys: Keys, name: str, known: Collection[str], names: Names) -> TranslationError:
    if name in names.removed:
        return keys.error(name, f"no longer there; {names.removed[name]}")
    hint = did_you_mean(name, known) or f"known are {', '.join(sorted(known))}"
    return keys.error(name, f"unknown; {hint}")


def _leave_out(keys: Keys, names: Names) -> None:
    """Note what was not looked at, unless it looks like a setting of the correction."""
    flat = keys.flat
    rest = [path for path in flat if path not in keys.paths]
    for path in rest:
        _refuse_unread(keys.framework, path, flat[path], names)
    if "defaults" in flat:
        keys.note(f"defaults: what the files it names set is not read; {RESOLVE}")
    if rest:
        keys.note(f"{LEFT_OUT}{some(sorted(rest))}")
    for path in rest if names.section else ():
        own = last(path) in names.keys and last(path) not in names.common
        if own and last(names.section) not in path and flat[path] is not None:
            raise TranslationError(
                f"{keys.framework}: {path}: {keys.framework} reads it under {names.section} only"
            )


def _refuse_unread(framework: str, path: str, value: Any, names: Names) -> None:
    """Refuses what looks like a mistyped, removed or new setting of the correction."""
    if names.is_removed(path) and not _switched_off(value):
        raise TranslationError(f"{framework}: {path}: no longer there; {names.removed[last(path)]}")
    parents = names.section.split(".") if names.section else []
    telling = {*names.keys, *names.outside}.difference(names.common).union(parents[-1:])
    for part in path.split("."):
        if part in telling.union(names.common, parents, names.removed, names.others):
            continue
        if hint := did_you_mean(part, telling, cutoff=0.85):
            raise TranslationError(f"{framework}: {path}: unknown; {hint}")
        if any(map(SUSPECT.fullmatch, WORD.findall(part))) and not is_null(value):
            near = difflib.get_close_matches(part, telling, n=1, cutoff=0.0)
            raise TranslationError(
                f"{framework}: {path}: unknown, and by its words it may be about correction: the "
                f"nearest that is known is {near[0]}; take it out if it is about something else"
            )


def some(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are."""
    listed = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        return f"{listed} and {len(names) - LISTED} more"
    return listed
