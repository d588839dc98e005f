"""A pickle read as data: its values, and what it would call, of which nothing is ever called. Torch-free.

A checkpoint's index is a pickle, and so is the head of every tensor in it. Whoever unpickles one runs what it names;
here a class is its name, an object the arguments that it would be made from, and a dict its items: keys are not
hashed, so that a small file cannot ask for endless work, nor for more memory than it holds.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

LARGEST_HEAD = 1 << 16
DAMAGED = (zipfile.BadZipFile, LookupError, NotImplementedError, OverflowError, RuntimeError, EOFError, struct.error)


@dataclass(frozen=True)
class Name:
    """What would be imported: module.name."""

    text: str


@dataclass(eq=False)
class Made:
    """What calling `name` would have made."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    def fields(self, *wanted: str) -> list[Any]:
        """Of an object that keeps them under their names; None for one that it lacks."""
        found = dict(self.state.named()) if isinstance(self.state, Items) else {}
        return [found.get(each) for each in wanted]


@dataclass(eq=False)
class Items:
    """A dict: key, value, key, value."""

    flat: list[Any] = field(default_factory=list)

    def pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self.flat[::2], self.flat[1::2], strict=True))

    def named(self) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in self.pairs() if isinstance(key, str)]


def read_pickle(content: bytes, names: Container[str]) -> Any:
    """ValueError where it is damaged, or names what is not in `names`."""
    machine = _Machine(names)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in _VALUES:
                machine.stack.append(argument)
            elif opcode.name in _STEPS:
                _STEPS[opcode.name](machine, argument)
            else:
                raise ValueError(f"it holds the instruction {opcode.name}, which no checkpoint needs")
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
    if machine.below or len(machine.stack) != 1:
        raise ValueError("it is damaged")
    return machine.stack[0]


def read_saved_head(archive: zipfile.ZipFile, names: Container[str]) -> Any:
    """What torch.save has pickled into its zip archive; ValueError, LookupError where it is packed or damaged."""
    members = [info for info in archive.infolist() if info.filename.partition("/")[2] == "data.pkl"]
    if len(members) != 1 or not is_plain(members[0], LARGEST_HEAD):
        raise ValueError("its head is packed, too large, or not there once")
    return read_pickle(archive.read(members[0]), names)


def is_plain(member: zipfile.ZipInfo, most: int) -> bool:
    return member.compress_type == zipfile.ZIP_STORED and member.file_size == member.compress_size <= most


class _Machine:
    """The stack that a pickle's instructions work on; `below` are those beneath its marks."""

    def __init__(self, names: Container[str]) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self._names = names

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values

    def make_tuple(self, _: Any) -> None:
        values = self.since_mark()  # first: it changes the stack
        self.stack.append(tuple(values))

    def take(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def remember(self, argument: int | None) -> None:
        self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]

    def name(self, module: str, name: str) -> None:
        text = f"{_of(module, str)}.{_of(name, str)}"
        if text not in self._names:
            raise ValueError(f"it refers to {text[:200]}, which no checkpoint needs")
        self.stack.append(Name(text))

    def make(self, _: Any) -> None:
        name, arguments = self.take(2)
        self.stack.append(Made(_of(name, Name).text, _of(arguments, tuple)))

    def build(self, _: Any) -> None:
        (state,) = self.take(1)
        _of(self.stack[-1], Made).state = state

    def fill(self, values: list[Any], kind: type) -> None:
        (_of(self.stack[-1], Items).flat if kind is Items else _of(self.stack[-1], list)).extend(values)


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "STOP": lambda machine, _: None,
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "MARK": _Machine.mark,
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.take(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.take(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.take(3))),
    "TUPLE": _Machine.make_tuple,
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_SET": lambda machine, _: machine.stack.append([]),
    "EMPTY_DICT": lambda machine, _: machine.stack.append(Items()),
    "APPEND": lambda machine, _: machine.fill(machine.take(1), list),
    "APPENDS": lambda machine, _: machine.fill(machine.since_mark(), list),
    "ADDITEMS": lambda machine, _: machine.fill(machine.since_mark(), list),
    "SETITEM": lambda machine, _: machine.fill(machine.take(2), Items),
    "SETITEMS": lambda machine, _: machine.fill(machine.since_mark(), Items),
    "MEMOIZE": _Machine.remember,
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "BINGET": lambda machine, argument: machine.stack.append(machine.memo[argument]),
    "LONG_BINGET": lambda machine, argument: machine.stack.append(machine.memo[argument]),
    "GLOBAL": lambda machine, argument: machine.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.take(2)),
    "REDUCE": _Machine.make,
    "NEWOBJ": _Machine.make,
    "BUILD": _Machine.build,
    "BINPERSID": lambda machine, _: machine.stack.append(Made("", tuple(machine.take(1)))),
}
