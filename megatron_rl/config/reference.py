"""Reference of the configuration keys for --explain and docs/reference/config.md: description, type, default,
example.

The description of a key or choice is the comment beside its definition.
"""

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

from megatron_rl.config.bounds import as_written
from megatron_rl.config.layers import ConfigError, nested
from megatron_rl.config.load import flat, read, sources
from megatron_rl.config.objective import LossParams
from megatron_rl.config.plain_yaml import write_line
from megatron_rl.config.schema import Config
from megatron_rl.config.shape import WANTED, Key, keys_of, schema_errors
from megatron_rl.loss.table import losses

EXAMPLE = re.compile(r"\bsuch as (\{.*?\}+|\[.*?\]|\"[^\"]*\"|.*?)(?=[:;,)]? |[;,)]?$)")
# suffix of a key with a list of sections, or with sections under user-defined names
OF_A_LIST = "[]"
OF_A_NAME = ".NAME"


@dataclass(frozen=True)
class Entry:
    """Entry of a key in the reference."""

    name: str  # correction.reject[].level: of each rule
    about: str
    takes: str
    default: str
    example: str
    choices: Mapping[str, str]  # name -> description, empty if the name suffices

    def stands_for(self, name: str) -> bool:
        """Return True if `name`, as on the command line (eval.sets.aime.samples), is this key."""
        pattern = (
            re.escape(self.name)
            .replace(re.escape(OF_A_NAME), r"\.[^.]+")
            .replace(re.escape(OF_A_LIST), r"\[\d*\]")
        )
        return re.fullmatch(pattern, name) is not None

    @property
    def description(self) -> str:
        """Description of the key, with the choices that need an explanation."""
        chosen = [f"{name}: {text}" for name, text in self.choices.items() if text]
        return "; ".join(filter(None, (self.about, *chosen)))


def entries(schema: type = Config, prefix: str = "") -> Iterator[Entry]:
    """Yield all keys in the schema's order; a list or mapping of sections is followed by their
    keys.
    """
    for name, key in keys_of(schema).items():
        full = f"{prefix}{name}"
        if key.section and key.container is None:
            yield from entries(key.section, f"{full}.")
            continue
        yield _entry(full, key, _note(schema, name))
        if full == "loss.params":
            yield from map(_with_losses, entries(LossParams, f"{full}."))
        if key.section:
            yield from entries(
                key.section, f"{full}{OF_A_LIST if key.container is list else OF_A_NAME}."
            )


def _with_losses(entry: Entry) -> Entry:
    """Add the losses that have a parameter to its description."""
    name = entry.name.rpartition(".")[2]
    owners = losses(lambda loss: name in loss.params)
    return replace(entry, about=f"{', '.join(owners)}: {entry.about}")


def explain(recipe: Path, overrides: Sequence[str], name: str) -> str:
    """Explain a key, or each key of a section: description, value in the recipe and its origin,
    choices.
    """
    known = list(entries())
    asked = (
        [one for one in known if one.stands_for(name)]
        or [one for one in known if one.name.startswith(f"{name}.")]
        # learner.megatron.fp8: shown as part of its mapping
        or [
            one
            for one in known
            if name.startswith(f"{one.name}.") and one.takes.startswith(WANTED[dict])
        ]
    )
    if not asked:
        raise ConfigError(
            next(schema_errors(nested(name, None), Config), f"{name}: no key").replace(
                "unknown key", "no key"
            )
        )
    config, found = read(recipe, overrides)
    if wrong := [line for line in found if line.startswith(name)]:
        raise ConfigError("\n".join(wrong))
    values = flat(config)
    by = sources(recipe, overrides)
    return "\n\n".join(
        _explained(one, name if len(asked) == 1 else one.name, values, by) for one in asked
    )


def _explained(
    entry: Entry, name: str, values: Mapping[str, Any], by: Mapping[str, Sequence[tuple[str, Any]]]
) -> str:
    rows = [
        ("takes", entry.takes),
        ("default", entry.default),
        ("example", f"{entry.name}={entry.example}"),
    ]
    if name in values:
        setters = [f"{where} ({write_line(value)})" for where, value in by.get(name, ())]
        last = "its default"
        over = ""
        if setters:
            last = by[name][-1][0]
        if len(setters) > 1:
            over = f", over {', '.join(reversed(setters[:-1]))}"
        rows = [("value", write_line(values[name])), ("from", f"{last}{over}"), *rows]
    elif inside := {one: value for one, value in values.items() if one.startswith(f"{name}.")}:
        rows = [
            *(
                (one, f"{write_line(value)}, from {by[one][-1][0] if one in by else 'its default'}")
                for one, value in inside.items()
            ),
            *rows,
        ]
    return "\n".join(
        [f"{name}: {entry.description}", *(f"  {label:<8} {text}" for label, text in rows)]
    )


def _entry(name: str, key: Key, about: str) -> Entry:
    choices = {str(one): _note(type(one), one.name) for one in key.choices}
    if key.choices:
        about = "; ".join(filter(None, (about, _note(type(key.choices[0])))))
    example = _example(key, about, key.default, choices)
    return Entry(name, about, _takes(key, choices), as_written(key.default), example, choices)


def _takes(key: Key, choices: Mapping[str, str]) -> str:
    if choices:
        words = [f"one of {', '.join(choices)}"]
    elif key.section:
        words = [f"a {'list' if key.container is list else 'mapping'} of sections"]
    else:
        words = [WANTED[one] for one in key.kinds if one in WANTED] or ["text or a list"]
    if NoneType in key.kinds:
        words.append("null")
    kinds = " or ".join(words)
    if not key.bound:
        return kinds
    if Any in key.kinds:
        return key.bound.words
    return f"{kinds}; {key.bound.words}"


def _example(key: Key, about: str, default: Any, choices: Mapping[str, str]) -> str:
    if named := EXAMPLE.search(about):
        return named[1]
    if choices:
        return next(one for one in choices if one != default)
    if isinstance(default, bool):
        return as_written(not default)
    return as_written(default)


def _note(owner: type, name: str = "") -> str:
    """Return the comment at a class, or at a name in it."""
    return _comments(owner.__module__).get(".".join(filter(None, (owner.__name__, name))), "")


@cache
def _comments(module: str) -> Mapping[str, str]:
    """Map Name or Class.name to the comment above its definition or on its lines."""
    text = inspect.getsource(sys.modules[module])
    tokens = [
        one
        for one in tokenize.generate_tokens(io.StringIO(text).readline)
        if one.type == tokenize.COMMENT
    ]
    beside = {one.start[0]: one.string.lstrip("# ") for one in tokens}
    alone = {one.start[0] for one in tokens if one.line.lstrip().startswith("#")}
    found = {}
    for name, node in _defined(ast.parse(text).body):
        first = node.lineno
        while first - 1 in alone:
            first -= 1
        lines = range(first, (node.end_lineno or first) + 1)
        found[name] = " ".join(beside[line] for line in lines if line in beside)
    return found


def _defined(body: Sequence[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{node.name}.")
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name):
            yield f"{prefix}{target.id}", node
