"""Values of `${...}` in another project's YAML: other keys of it, by their full name, and plain arithmetic.

What reads anything else (`${oc.env:NAME}`), or comes to no value, stays as it is written.
"""

import operator
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml

from megatron_rl.config.plain_yaml import DEEPEST, read_yaml
from megatron_rl.workshop.translation.limits import Budget

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# of the resolvers that projects register, those that are plain arithmetic
ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
    "min": min,
}


def scalar(text: str) -> Any:
    """A word as YAML reads it; what is no YAML is text."""
    try:
        return read_yaml(text)
    except (ValueError, yaml.YAMLError):
        return text


@dataclass
class Interpolations:
    root: Any
    budget: Budget

    def resolved(self, node: Any, depth: int = 0) -> Any:
        self.budget.spend(values=1)
        if isinstance(node, dict):
            return {key: self.resolved(value, depth) for key, value in node.items()}
        if isinstance(node, list):
            return [self.resolved(value, depth) for value in node]
        with suppress(LookupError, TypeError, ValueError, ArithmeticError):
            while isinstance(node, str) and depth < DEEPEST and (found := INNERMOST.search(node)):
                value = self._value(found[1], depth + 1)
                if found[0] == node:
                    return value
                if "${" in str(value):
                    break
                node = node.replace(found[0], str(value))
                self.budget.spend(len(node))
        return node

    def _value(self, inside: str, depth: int) -> Any:
        name, _, words = inside.partition(":")
        if name in ARITHMETIC:
            value: float = ARITHMETIC[name](*map(float, words.split(",")))
            return int(value) if value.is_integer() else value
        if name != "oc.select":
            return self._at(inside, depth)
        key, _, otherwise = words.partition(",")
        with suppress(LookupError):
            return self._at(key.strip(), depth)
        return scalar(otherwise)

    def _at(self, name: str, depth: int) -> Any:
        node = self.root
        for part in name.split("."):
            node = node[part]
        if node == "???":
            raise LookupError(name)
        return self.resolved(node, depth)
