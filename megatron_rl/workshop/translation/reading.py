"""Bounds on what a translation reads, which are those of recipes; and a file's values, in the types of YAML.

Of `${...}` other keys of the file, by their full name, and plain arithmetic are read. What asks for anything else
(`${oc.env:NAME}`), or comes to no value, is Unset.
"""

import operator
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from megatron_rl.config.layers import MOST_FILES, n_values
from megatron_rl.config.plain_yaml import DEEPEST, LARGEST_TEXT, MOST_NODES, read_yaml
from megatron_rl.workshop.translation.keys import TranslationError, Unset

LONGEST_INTEGER = 4096  # bits; Python writes out few more digits than these have
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# of the resolvers that projects register, those that are plain arithmetic
ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "min": min,
}


class Reading:
    """One file as it is read: what that may still take of other files, characters and values; and its values.

    Of characters and values there are twice those of a recipe: as the files have them, and as they are expanded.
    """

    root: Any = None  # what holds all of its values
    _files = MOST_FILES
    _characters = 2 * LARGEST_TEXT
    _values = 2 * MOST_NODES

    def spend(self, characters: int = 0, values: int = 0) -> None:
        self._characters -= characters
        self._values -= values
        if min(self._files, self._characters, self._values) < 0:
            most = f"{MOST_FILES} files, {LARGEST_TEXT} characters or {MOST_NODES} values"
            said = "with all that it takes over and expands; leave out what the training does not need"
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
            raise TranslationError(f"{path}: not readable as text: no regular file; copy its text into one")
        if len(text) > LARGEST_TEXT:
            raise TranslationError(f"{path}: more than {LARGEST_TEXT} characters")
        self.spend(len(text))
        return text

    def yaml(self, text: str) -> Any:
        value = read_yaml(text)
        self.spend(values=n_values(value))
        return value

    def scalar(self, text: str) -> Any:
        """A word as YAML reads it; what is no YAML is text."""
        try:
            return self.yaml(text)
        except (ValueError, yaml.YAMLError):
            return text

    def plain(self, node: Any, depth: int = 0) -> Any:
        """A value in the types of YAML; what it leaves to others is Unset."""
        self.spend(values=1)
        if depth > DEEPEST or (isinstance(node, int) and node.bit_length() > LONGEST_INTEGER):
            raise ValueError(f"nested more than {DEEPEST} deep, or a number of more than {LONGEST_INTEGER} bits")
        if isinstance(node, Mapping):
            return {str(key): self.plain(value, depth + 1) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [self.plain(value, depth + 1) for value in node]
        if isinstance(node, str) and "${" in node:
            return self._interpolated(node, depth + 1)
        if node in (None, "???"):  # OmegaConf's word for a value that has to be given
            return None
        return node if isinstance(node, str | int | float | Unset) else Unset(str(node))

    def _interpolated(self, text: str, depth: int) -> Any:
        with suppress(LookupError, TypeError, ValueError, ArithmeticError):
            while found := INNERMOST.search(text):
                value = self._value(found[1], depth)
                if found[0] == text or isinstance(value, Unset):
                    return value
                text = text.replace(found[0], str(value))
                self.spend(len(text))
        return Unset(text) if "${" in text else text

    def _value(self, inside: str, depth: int) -> Any:
        name, _, words = inside.partition(":")
        if name in ARITHMETIC:
            number = ARITHMETIC[name](*map(float, words.split(",")))
            return int(number) if number.is_integer() else number
        if name != "oc.select":
            return self._at(inside, depth)
        key, _, otherwise = words.partition(",")
        with suppress(LookupError):
            return self._at(key.strip(), depth)
        return self.scalar(otherwise)

    def _at(self, key: str, depth: int) -> Any:
        node = self.root
        for part in key.split("."):
            node = node[part]
        return self.plain(node, depth)
