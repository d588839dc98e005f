"""Bounds on what a translation reads, which are those of recipes, and the form of the values that it hands on."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.layers import MOST_FILES
from megatron_rl.config.plain_yaml import DEEPEST, LARGEST_TEXT, MOST_NODES
from megatron_rl.workshop.translation.keys import TranslationError, Unset

LONGEST_INTEGER = 4096  # bits; Python writes out few more digits than these have


class Budget:
    """What the reading of one file may still take: other files, characters, and values.

    Of characters and values there are twice those of a recipe: as the files have them, and as they are expanded.
    """

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
            size = len(text)
        elif path.is_file():
            size = path.stat().st_size
            with path.open(encoding="utf-8") as file:
                # no more than its size: files of /proc, such as a process's environment, have none
                text = file.read(min(size, LARGEST_TEXT))
        else:
            raise TranslationError(f"{path}: not readable as text: no regular file; copy its text into one")
        if size > LARGEST_TEXT:
            raise TranslationError(f"{path}: {size} bytes, expected at most {LARGEST_TEXT}")
        self.spend(len(text))
        return text


def plain(node: Any, depth: int = 0) -> Any:
    """A value in the types of YAML; what it leaves to others, such as `${name}`, is Unset."""
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    if isinstance(node, Mapping):
        return {str(key): plain(value, depth + 1) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [plain(value, depth + 1) for value in node]
    if isinstance(node, int) and node.bit_length() > LONGEST_INTEGER:
        raise ValueError(f"a whole number of more than {LONGEST_INTEGER} bits")
    if node in (None, "???"):  # OmegaConf's word for a value that has to be given
        return None
    if isinstance(node, Unset) or (isinstance(node, str | int | float) and "${" not in str(node)):
        return node
    return Unset(str(node), (str(node),))
