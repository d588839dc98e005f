"""Reads the table of each other project in `tables/`: its recipe's keys, ours, and how values
translate; docs show it.

A row is `theirs: ours`, or a mapping: `to` (our key, several, or a fact that `derived.py` makes
keys of, after a =), `default` (theirs, where the file is silent), `words` (ours for each of their
values), `instead` (for some of them), `part` (the first value of a list where names and values take
turns), `spread` (a list over several keys), `when` or `unless` (another of their keys that has to
be on or off), `former` (its names in other versions), or `why` there is no counterpart and the
values (`fine`) for which that does not matter. `not_needed` lists, by reason, patterns of keys that
change nothing of what is trained; `correction` names the settings of a correction, which a module
per project reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megatron_rl.config.plain_yaml import read_yaml

FOLDER = Path(__file__).parent / "tables"
Words = tuple[str, ...]
FINE = (None, False, "", 0, "none", "null", "None", "disable", "disabled")


@dataclass(frozen=True)
class KeyRow:
    theirs: str
    to: Words = ()
    default: Any = None
    words: Mapping[Any, Any] | None = None
    instead: Mapping[Any, Any] = field(default_factory=dict)
    part: int | None = None
    spread: bool = False  # a list, over several of ours
    when: str = ""  # a key of theirs that has to be on for this one to count
    unless: str = ""  # one that has to be off
    when_loss: str = ""  # the loss that it is of, by their name
    why: str = ""
    fine: tuple[Any, ...] = FINE
    former: Words = ()  # names of the key in other versions

    @property
    def names(self) -> Words:
        return (self.theirs, *self.former)

    def asks(self, value: Any) -> bool:
        """True if a key without a counterpart changes anything at this value."""
        return not any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in (*self.fine, [])
        )

    def ours(self, value: Any) -> Mapping[str, Any]:
        """Our keys with their values for theirs; KeyError where there are none."""
        if self.part is not None and isinstance(value, list):
            value = value[self.part :: 2]
        if self.words is not None:
            value = self.words[value if value in self.words else "else"]
        elif not isinstance(value, list | dict):
            value = self.instead.get(value, value)
        if self.spread and isinstance(value, list):
            return dict(zip(self.to, value, strict=False))
        if isinstance(value, Mapping):
            return value
        return dict.fromkeys(self.to, value)


def expected(key: str, value: Any) -> str:
    """The number that should have stood there for a key or a fact of ours; empty where one does, or
    none is needed.
    """
    least, most = shared()["bounds"].get(key, (None, None))
    whole = isinstance(least, int)
    if least is None or (type(value) in (int, int if whole else float) and least <= value <= most):
        return ""
    return f"a {'whole ' * whole}number from {least:g} to {most:g}"


@dataclass(frozen=True)
class Names:
    """The settings of a correction by name."""

    keys: Words
    section: str = ""  # that they are in, dotted; without one they are looked for everywhere
    bare: bool = True  # whether they may stand alone, without their section
    beside: Words = ()  # of settings outside of it that are read too, in full
    apart: Words = ()  # parts of keys that the project's module reads itself
    common: Words = ()  # too short to look for typos of
    former: Mapping[str, str] = field(default_factory=dict)  # in other versions -> today
    # no longer there -> what has taken its place
    removed: Mapping[str, str] = field(default_factory=dict)
    others: Words = ()  # that sound alike
    says: Mapping[str, str] = field(default_factory=dict)  # what is said of them, by a word for it

    @property
    def outside(self) -> set[str]:
        return {path.rpartition(".")[2] for path in self.beside}

    def is_removed(self, path: str) -> bool:
        """True for a removed name, unless it is in the section of another loss."""
        *sections, name = path.split(".")
        return name in self.removed and set(self.others).isdisjoint(sections)


@dataclass(frozen=True)
class Table:
    project: str
    about: str
    correction: Names
    version: str = ""  # of the project that the rows were read from
    command: str = ""  # a pattern of the word that starts its training
    # in Python: whose arguments are settings -> their section
    calls: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[KeyRow, ...] = ()  # none where the correction alone is read
    # of ours: what that project does without a key for it
    always: Mapping[str, Any] = field(default_factory=dict)
    not_needed: Mapping[str, Words] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, KeyRow]:
        return {name: row for row in self.rows for name in row.names}

    def reason(self, path: str) -> str | None:
        """Reason that a key is not needed here, or None."""
        for why, patterns in self.not_needed.items():
            if any(fnmatchcase(path, pattern) for pattern in patterns):
                return why
        return None


@cache
def shared() -> Mapping[str, Any]:
    """`facts` for rows with a =; `switches`; `others`: names like a correction's; `says`: notes."""
    return dict(read_yaml((FOLDER.parent / "shared.yaml").read_text(encoding="utf-8")))


@cache
def table(project: str) -> Table:
    read: dict[str, Any] = read_yaml((FOLDER / f"{project}.yaml").read_text(encoding="utf-8"))
    rows = tuple(_rows(read.pop("keys", {})))
    needless = {why: tuple(keys.split()) for why, keys in read.pop("not_needed", {}).items()}
    words = {
        name: tuple(read["correction"].get(name, "").split())
        for name in ("keys", "beside", "common", "others", "apart")
    }
    words["others"] += tuple(shared()["others"].split())
    names = Names(**{**read.pop("correction"), **words})
    return Table(project, correction=names, rows=rows, not_needed=needless, **read)


@cache
def projects() -> list[str]:
    """Projects whose whole recipes are read, not only their corrections."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if table(path.stem).rows)


def _rows(keys: Mapping[str, Any]) -> Iterator[KeyRow]:
    for theirs, said in keys.items():
        fields = dict(said) if isinstance(said, Mapping) else {"to": said}
        for name in ("to", "fine", "former"):
            if name in fields:
                given = fields[name]
                fields[name] = tuple(given if isinstance(given, list) else [given])
        yield KeyRow(theirs, **fields)
