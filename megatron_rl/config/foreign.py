"""Check of recipe keys handed to megatron-core or vLLM against their dataclasses, parsed from
source, not imported: preflight asks for it, and the learner as it is built; load.py does not.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.config.bounds import is_number

_PLAIN = {
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "text"),
    "list": (list, "a list"),
    "set": (list, "a list"),
    "tuple": (list, "a list"),
    "dict": (dict, "a section"),
}
_UNWRITABLE = ("Callable", "dtype", "type", "Timers")  # what no YAML can express


@cache
def fields_of(
    package: str, files: tuple[str, ...], classes: tuple[str, ...]
) -> Mapping[str, ast.expr] | None:
    """Name -> annotation of each public field, or key -> value of a mapping; None where there is no
    such package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    found: dict[str, ast.expr] = {}
    for file in files:
        for node in ast.parse(
            (Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8")
        ).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        found.setdefault(each.target.id, each.annotation)
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Dict)
                and _name(node.targets[0]) in classes
            ):
                pairs = zip(node.value.keys, node.value.values, strict=True)
                found |= {
                    str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)
                }
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


def misfits(
    prefix: str,
    whose: str,
    given: Mapping[str, Any],
    known: Mapping[str, ast.expr],
    null: bool = False,
) -> Iterator[str]:
    """What in `given` is no field of `whose`, or no value that its field takes. `null`: each field
    takes that.
    """
    for key in sorted(given, key=str):
        full = f"{prefix}.{key}"
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            yield f"{full}: {whose} has no such field" + (
                f"; did you mean {prefix}.{near[0]}?" if near else ""
            )
        elif not (fits(known[key], given[key]) or (null and given[key] is None)):
            words = list(dict.fromkeys(_words(known[key])))
            if words:
                way_out = f"use {' or '.join(words)}"
            else:
                way_out = "no recipe can write such a value; remove it"
            yield f"{full} is {given[key]!r}: {way_out}"


def fits(kind: ast.expr, value: Any) -> bool:
    """Whether the annotation allows the value; one that is written in words of its package's own
    allows any.
    """
    if isinstance(kind, ast.Constant):
        if kind.value is None:
            return value is None
        return fits(_parsed(str(kind.value)), value)
    if isinstance(kind, ast.BinOp):
        return fits(kind.left, value) or fits(kind.right, value)
    name = _name(kind)
    inner = _inner(kind)
    if name == "Optional":
        return value is None or fits(inner[0], value)
    if name == "Union":
        return any(fits(one, value) for one in inner)
    if name == "Literal":
        return any(isinstance(one, ast.Constant) and one.value == value for one in inner)
    if name in _UNWRITABLE:
        return False
    plain = _PLAIN.get(name.lower())
    if plain is None:
        return True
    if isinstance(value, list) and plain[0] is list and name.lower() != "tuple" and inner:
        return all(fits(inner[0], element) for element in value)
    if plain[0] is float:
        return is_number(value)
    return type(value) is plain[0]


def _words(kind: ast.expr) -> Iterator[str]:
    if isinstance(kind, ast.Constant) and kind.value is not None:
        kind = _parsed(str(kind.value))
    name = _name(kind)
    if isinstance(kind, ast.BinOp):
        yield from (*_words(kind.left), *_words(kind.right))
    elif name in ("Optional", "Union"):
        for one in _inner(kind):
            yield from _words(one)
    elif name == "Literal":
        yield f"one of {', '.join(str(one.value) for one in _inner(kind) if isinstance(one, ast.Constant))}"
    elif name.lower() in _PLAIN:
        yield _PLAIN[name.lower()][1]


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _name(kind: ast.expr) -> str:
    if isinstance(kind, ast.Subscript):
        return _name(kind.value)
    return (
        kind.id
        if isinstance(kind, ast.Name)
        else kind.attr
        if isinstance(kind, ast.Attribute)
        else ""
    )


def _inner(kind: ast.expr) -> list[ast.expr]:
    if not isinstance(kind, ast.Subscript):
        return []
    if isinstance(kind.slice, ast.Tuple):
        return list(kind.slice.elts)
    return [kind.slice]
