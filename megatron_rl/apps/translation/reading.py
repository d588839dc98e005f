"""Bounds on what a translation reads of others' files; and a file's values, in the types of YAML.

Of `${...}` other keys of the file and plain arithmetic are read. What asks for anything else
(`${oc.env:NAME}`), or comes to no value, is Unset.
"""

import operator
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.apps.translation.keys import TranslationError, Unset
from megatron_rl.config.plain_yaml import read_yaml

LARGEST_TEXT = 1 << 20
MOST_NODES = 10_000  # values of a file; what aliases repeat counts each time
MOST_FILES = 64
DEEPEST = 32
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# of the resolvers that projects register, those that are plain arithmetic
ARITHMETIC: dict[str, Any] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "min": min,
}

Place = tuple[Any, ...]  # keys and indices on the way to a value


class Reading:
    """A file being read: its values, and limits on further files, characters and values.

    Characters count twice, as text and as expanded, and values up to four times: as words,
    arguments, YAML and results.
    """

    root: Any = None  # what holds all of its values
    _files = MOST_FILES
    _characters = 2 * LARGEST_TEXT
    _values = 4 * MOST_NODES

    def spend(self, characters: int = 0, values: int = 0) -> None:
        self._characters -= characters
        self._values -= values
        if min(self._files, self._characters, self._values) < 0:
            most = f"{MOST_FILES} files, {LARGEST_TEXT} characters or {MOST_NODES} values"
            said = (
                "with all that it takes over and expands; leave out what the training does not need"
            )
            raise TranslationError(f"more than {most}, {said}")

    def read(self, path: Path) -> str:
        """The text of a regular file, or of standard input (`-`)."""
        self._files -= 1
        if str(path) == "-":
            text = sys.stdin.read(LARGEST_TEXT + 1)
        elif path.is_file():
            with path.open(encoding="utf-8") as file:
                # no more than its size: files of /proc, such as a process's environment, have none
                text = file.read(min(path.stat().st_size, LARGEST_TEXT + 1))
        else:
            raise TranslationError(
                f"{path}: not readable as text: no regular file; name one, or copy its text there"
            )
        if len(text) > LARGEST_TEXT:
            raise TranslationError(f"{path}: more than {LARGEST_TEXT} characters")
        self.spend(len(text))
        return text

    def yaml(self, text: str) -> Any:
        value = read_yaml(text)
        self._count(value)
        return value

    def _count(self, node: Any, depth: int = 0) -> None:
        """Spend the values of a node, those of its aliases each time."""
        self.spend(values=1)
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        if isinstance(node, Mapping):
            node = list(node.values())
        for inner in node if isinstance(node, list) else ():
            self._count(inner, depth + 1)

    def scalar(self, text: str) -> Any:
        """A word as YAML reads it; what is no YAML is text."""
        try:
            return self.yaml(text)
        except (ValueError, yaml.YAMLError):
            return text

    def plain(self, node: Any, place: Place = (), depth: int = 0) -> Any:
        """A value in the types of YAML; what it leaves to others is Unset. `depth`: of references
        that lead to it.
        """
        self.spend(values=1)
        if len(place) + depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        if isinstance(node, Mapping):
            return {
                str(key): self.plain(value, (*place, key), depth) for key, value in node.items()
            }
        if isinstance(node, list | tuple):
            return [self.plain(value, (*place, index), depth) for index, value in enumerate(node)]
        if isinstance(node, Unset) or node is None:
            return node
        text = str(node)  # ValueError: a number of more digits than are ever meant
        if text == "???":  # OmegaConf's word for a value that has to be given
            return None
        if "${" in text:
            return self._interpolated(text, place, depth + 1)
        if isinstance(node, str | int | float):
            return node
        return Unset(text)

    def _interpolated(self, text: str, place: Place, depth: int) -> Any:
        with suppress(LookupError, TypeError, ValueError, ArithmeticError):
            while found := INNERMOST.search(text):
                value = self._value(found[1], place, depth)
                if found[0] == text or isinstance(value, Unset):
                    return value
                text = text.replace(found[0], str(value))
                self.spend(len(text))
        return Unset(text) if "${" in text else text

    def _value(self, inside: str, place: Place, depth: int) -> Any:
        name, _, words = inside.partition(":")
        if name in ARITHMETIC:
            number = ARITHMETIC[name](*map(float, words.split(",")))
            if number.is_integer():
                return int(number)
            return number
        if name != "oc.select":
            return self._at(inside, place, depth)
        key, _, otherwise = words.partition(",")
        with suppress(LookupError):
            return self._at(key.strip(), place, depth)
        return self.scalar(otherwise)

    def _at(self, key: str, place: Place, depth: int) -> Any:
        """The value of a key; leading dots name the section of the reference, and its parents."""
        name = key.lstrip(".")
        within = place[: len(name) - len(key)] if name != key else ()
        path = (*within, *name.split("."))
        return self.plain(reduce(operator.getitem, path, self.root), path, depth)
