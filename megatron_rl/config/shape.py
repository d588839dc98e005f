"""Validation of a recipe against the dataclasses of `schema.py`, each problem a sentence: unknown
keys and wrong types in what it writes (`misfits`), bounds of the values of a made section
(`sound`). `keys_of` describes each key.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, make_dataclass, replace
from enum import StrEnum
from functools import cache, partial
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import MISSING as NO_VALUE
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.bounds import Bound, Inside, as_written, is_number
from megatron_rl.config.unknown import unknown

Section = TypeVar("Section")
RESOLVER = re.compile(r"\$\{[^}]*(?::|\$\{)")  # a function of OmegaConf, such as ${oc.env:HOME}
LARGEST = 2**32 - 1  # of a whole number: seeds beyond it are none to numpy, and no size comes near
WANTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section",
}


@dataclass(frozen=True)
class Key:
    """A field of a section, as its annotation describes it."""

    field: Field[Any]
    kind: Any
    bound: Bound | None
    inside: Mapping[str, Bound]  # of keys in a map that is handed on
    # the dataclass of what it holds: one, a list of them or some by names of the user's; None: a
    # value
    section: Any
    container: Any  # list, dict or None

    @property
    def kinds(self) -> tuple[Any, ...]:
        """float | None -> (float, NoneType); list[str] -> (list,)."""
        return members(self.kind)

    @property
    def choices(self) -> type[StrEnum] | None:
        return next(
            (one for one in self.kinds if isinstance(one, type) and issubclass(one, StrEnum)), None
        )

    @property
    def default(self) -> Any:
        if self.field.default_factory is MISSING:
            return self.field.default
        return self.field.default_factory()

    def mapped(self, value: Any, change: Callable[[str, Any], Any]) -> Any:
        """The value with each section in it changed; `change` is told where it stands below the
        key.
        """
        if self.container is list and isinstance(value, list):
            return [change(f"[{index}]", one) for index, one in enumerate(value)]
        if self.container is dict and isinstance(value, Mapping):
            return {name: change(f".{name}", one) for name, one in value.items()}
        if self.section and self.container is None:
            return change("", value)
        return value


def members(kind: Any) -> tuple[Any, ...]:
    return tuple(
        get_origin(one) or one
        for one in (get_args(kind) if NoneType in get_args(kind) else (kind,))
    )


@cache
def keys_of(schema: type) -> dict[str, Key]:
    plain = get_type_hints(schema)
    annotated = get_type_hints(schema, include_extras=True)
    found = {}
    for field in fields(schema):
        kind = plain[field.name]
        whole = annotated[field.name]
        notes = [
            note for one in (whole, *get_args(whole)) for note in getattr(one, "__metadata__", ())
        ]
        bound = next((note for note in notes if isinstance(note, Bound)), None)
        inside: Inside = next((note for note in notes if isinstance(note, Inside)), Inside())
        places = (
            (each, get_origin(one))
            for one in (kind, *get_args(kind))
            for each in (one, *get_args(one))
        )
        section, container = next(
            (place for place in places if is_dataclass(place[0])), (None, None)
        )
        found[field.name] = Key(field, kind, bound, inside, section, container)
    return found


def misfits(
    mapping: Mapping[Any, Any], schema: type, prefix: str = "", everywhere: Sequence[str] = ()
) -> Iterator[str]:
    """What in `mapping` is no key of `schema`, or no value that its key can take. `everywhere`:
    what may be meant.
    """
    keys = keys_of(schema)
    everywhere = everywhere or keys_in(schema)
    for name, value in mapping.items():
        full = f"{prefix}{name}"
        if name not in keys:
            yield from unknown(str(name), value, prefix, list(keys), everywhere)
            continue
        key = keys[name]
        if key.section and key.container is None:
            yield from _section(value, key.section, full, everywhere)
        elif key.container is list:
            yield from _sections(value, key.section, full, everywhere)
        elif key.container is dict and isinstance(value, Mapping):
            for inner, one in value.items():
                yield from _section(one, key.section, f"{full}.{inner}", everywhere)
        else:
            yield from _leaf(value, key, schema, full)


def key_of(misfit: str) -> str:
    """The key that a sentence of `misfits` is about, up to an element of a list."""
    return re.split(r"[\[: ]", misfit, maxsplit=1)[0]


def without(mapping: Mapping[str, Any], misfits: Sequence[str]) -> dict[str, Any]:
    """The mapping less the keys that the sentences name."""
    left = dict(mapping)
    for key in dict.fromkeys(map(key_of, misfits)):
        first, _, rest = key.partition(".")
        if rest and isinstance(left.get(first), Mapping):
            left[first] = without(left[first], [rest])
        else:
            left.pop(first, None)
    return left


def known(mapping: Mapping[Any, Any], schema: type) -> dict[Any, Any]:
    """The mapping without what is no key of `schema` (any more)."""
    keys = keys_of(schema)

    def inner(key: Key, value: Any) -> Any:
        return key.mapped(
            value, lambda _, one: known(one, key.section) if isinstance(one, Mapping) else one
        )

    return {name: inner(keys[name], value) for name, value in mapping.items() if name in keys}


def _section(value: object, schema: Any, full: str, everywhere: Sequence[str]) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from misfits(value, schema, f"{full}.", everywhere)
    else:
        yield f"{full} is {as_written(value)}: it is a section; its keys are {', '.join(keys_of(schema))}"


def _sections(value: object, schema: Any, full: str, everywhere: Sequence[str]) -> Iterator[str]:
    required = {
        field.name: field.metadata["choices"]
        for field in fields(schema)
        if "choices" in field.metadata
    }
    if not isinstance(value, list):
        keys = ", ".join(f"{name}: {choices[0]}" for name, choices in required.items())
        wanted = f"it is a list, such as [{{{keys}, ...}}], and an override replaces all of it"
        yield f"{full} is {as_written(value)}: {wanted}"
        return
    for index, element in enumerate(value):
        yield from _section(element, schema, f"{full}[{index}]", everywhere)
        missing = [
            name for name in required if isinstance(element, Mapping) and name not in element
        ]
        yield from (
            f"{full}[{index}].{name} is missing: use one of {', '.join(required[name])}"
            for name in missing
        )


def _leaf(value: object, key: Key, schema: type, full: str) -> Iterator[str]:
    if asked := RESOLVER.search(str(value)):
        yield f"{full} holds {asked[0]}...}}: a recipe reads no environment and calls nothing; write the value itself"
        return
    # an interpolation: what it stands for is known at the end
    if isinstance(value, str) and "${" in value:
        return
    if isinstance(value, str) and "_" in value and float in key.kinds:
        yield f"{full} is {as_written(value)}: one number, without `_`; where two bounds are meant, they are two keys"
        return
    fits = True
    if value is None:
        fits = NoneType in key.kinds
    elif key.choices:
        # a member's name too: OmegaConf writes `raise_`, which is how configurations of earlier
        # runs say `raise`
        fits = value in [*map(str, key.choices), *key.choices.__members__]
    elif type(value) is int and bool in key.kinds:
        fits = value in (0, 1)
    elif isinstance(value, (bool, float)) and str in key.kinds:
        fits = type(value) in key.kinds  # OmegaConf would make 1.10 to 1.1, and no to False
    if not fits:
        yield f"{full} is {as_written(value)}: {_way_out(value, key.kind)}"
        return
    if key.container is None and get_origin(key.kind) is list and isinstance(value, list):
        for index, element in enumerate(value):  # OmegaConf takes any container as an element
            if isinstance(element, (Mapping, list)):
                yield f"{full}[{index}] is {as_written(element)}: {_way_out(element, *get_args(key.kind))}"
                return
    try:
        OmegaConf.merge(_alone(schema, key.field.name), {key.field.name: value})
    # TypeError: a list for a mapping, or the other way round; OverflowError: a whole number that no
    # float holds
    except (OmegaConfBaseException, TypeError, OverflowError) as error:
        # of a list or a mapping
        element = str(getattr(error, "full_key", None) or "").removeprefix(key.field.name)
        if element:
            yield f"{full}{element}: {str(getattr(error, 'msg', None) or error).splitlines()[0]}"
        else:
            yield f"{full} is {as_written(value)}: {_way_out(value, key.kind)}"


@cache
def _alone(schema: type, name: str) -> Any:
    """A section of one key, which a value is tried on: a merge copies all that it merges into."""
    return OmegaConf.structured(
        make_dataclass("Alone", [(name, keys_of(schema)[name].kind, NO_VALUE)])
    )


@cache
def defaults(schema: type) -> Any:
    """What recipes are merged into."""
    return OmegaConf.structured(schema)


def _way_out(value: object, kind: Any) -> str:
    possible = members(kind)
    hint = ""
    wanted = " or ".join(WANTED[one] for one in possible if one in WANTED)
    for one in possible:
        if isinstance(one, type) and issubclass(one, StrEnum):
            near = difflib.get_close_matches(
                as_written(value).lower().replace("-", "_"), list(one), n=1, cutoff=0.85
            )
            wanted = f"one of {', '.join(one)}"
            hint = f"did you mean {near[0]}? " if near else ""
    return f"{hint}use {wanted}{', or null' if NoneType in possible else ''}"


def keys_in(schema: type, prefix: str = "") -> list[str]:
    """Every key of a schema and its sections, with dots between."""
    found: list[str] = []
    for name, key in keys_of(schema).items():
        one_section = key.section is not None and key.container is None
        found += keys_in(key.section, f"{prefix}{name}.") if one_section else [f"{prefix}{name}"]
    return found


def sound(section: Section, path: str = "") -> tuple[Section, dict[str, str]]:
    """The section with every value that cannot be at null or its default, and by key what was wrong
    with it.
    """
    wrong: dict[str, str] = {}
    changes: dict[str, Any] = {}

    def inner(full: str, below: str, one: Any) -> Any:
        better, own = sound(one, f"{full}{below}")
        wrong.update(own)
        return better

    for name, key in keys_of(type(section)).items():  # type: ignore[arg-type]
        full = f"{path}.{name}" if path else name
        value = getattr(section, name)
        if complaint := _complaint(full, value, key):
            wrong[full] = complaint
        if key.section:
            changes[name] = key.mapped(value, partial(inner, full))
        elif complaint:
            changes[name] = None if NoneType in key.kinds else key.default
        elif key.inside:
            beyond = _inside(full, value, key.inside)
            changes[name] = {
                each: one for each, one in value.items() if f"{full}.{each}" not in beyond
            }
            wrong |= beyond
    return replace(section, **changes), wrong  # type: ignore[type-var]


def _complaint(full: str, value: Any, key: Key) -> str | None:
    if value is None and NoneType in key.kinds:
        return None
    if key.choices and value not in list(key.choices):
        return f"{full} is {as_written(value)}: use one of {', '.join(key.choices)}"
    if float in key.kinds and not is_number(value):
        none = ", or null for none" if NoneType in key.kinds else ""
        return f"{full} is {as_written(value)}: give a finite number{none}"
    if type(value) is int and int in key.kinds and abs(value) > LARGEST:
        return f"{full} is {value}: give a whole number of at most {LARGEST}"
    if key.bound is None or key.bound.holds(value):
        return None
    return key.bound.complaint.format(key=full, value=", ".join(value) if key.section else value)


def _inside(path: str, given: Mapping[str, Any], bounds: Mapping[str, Bound]) -> dict[str, str]:
    wrong = {}
    for name in sorted(bounds.keys() & given.keys()):
        full = f"{path}.{name}"
        value = given[name]
        if value is not None and not is_number(value):
            wrong[full] = f"{full} is {as_written(value)}: give a finite number, or leave it out"
        elif value is not None and not bounds[name].holds(value):
            wrong[full] = bounds[name].complaint.format(key=full, value=value)
    return wrong
