"""Safe pickle reader for checkpoint indexes and torch.save archives: values, and the names of
calls, none of them made.

A class is its name, an object the arguments that it would be made from, and a dict its items: keys
are not hashed, so that a small file cannot ask for endless work, nor for more memory than it holds.
Torch-free.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

LARGEST_HEAD = 1 << 16
DAMAGED = (
    zipfile.BadZipFile,
    LookupError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    EOFError,
    struct.error,
)


@dataclass(frozen=True)
class Name:
    """A name that would be imported: module.name."""

    text: str


@dataclass(eq=False)
class Made:
    """An object that calling `name` would have made."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    def fields(self, *wanted: str) -> list[Any]:
        """Fields by their names; None for one that it lacks."""
        if isinstance(self.state, Items):
            found = dict(self.state.named())
        else:
            found = {}
        return [found.get(each) for each in wanted]


@dataclass(eq=False)
class Items:
    """A dict, as pairs of a key and a value."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def named(self) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in self.pairs if isinstance(key, str)]


_Unpickler: Any = pickle._Unpickler  # the one of the two whose instructions can be replaced


class _Reader(_Unpickler):
    """Knows the instructions that a checkpoint needs. None of them makes, calls or hashes anything
    but the above.
    """

    def __init__(self, content: bytes, names: Container[str]) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if (text := f"{module}.{name}") not in self._names:
            raise ValueError(f"it refers to {text[:200]}, which no checkpoint needs")
        return Name(text)

    def persistent_load(self, pid: Any) -> Made:
        return Made("", (pid,))

    def make(self) -> None:
        arguments = self.stack.pop()
        name = self.stack.pop()
        self.append(Made(_of(name, Name).text, _of(arguments, tuple)))

    def build(self) -> None:
        state = self.stack.pop()
        _of(self.stack[-1], Made).state = state

    def extend(self) -> None:
        values = self.pop_mark()
        _of(self.stack[-1], list).extend(values)

    def append_one(self) -> None:
        value = self.stack.pop()
        _of(self.stack[-1], list).append(value)

    def set_one(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _of(self.stack[-1], Items).pairs.append((key, value))

    def set_many(self) -> None:
        flat = self.pop_mark()
        _of(self.stack[-1], Items).pairs.extend(zip(flat[::2], flat[1::2], strict=True))

    _AS_THEY_ARE = (
        *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT"),
        *(
            "BINUNICODE",
            "SHORT_BINUNICODE",
            "BINUNICODE8",
            "SHORT_BINBYTES",
            "BINBYTES",
            "BINBYTES8",
        ),
        *("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "EMPTY_LIST"),
        *(
            "MEMOIZE",
            "BINPUT",
            "LONG_BINPUT",
            "BINGET",
            "LONG_BINGET",
            "GLOBAL",
            "STACK_GLOBAL",
            "BINPERSID",
        ),
    )
    dispatch = {  # noqa: RUF012
        **{
            code: _Unpickler.dispatch[code]
            for code in (getattr(pickle, name)[0] for name in _AS_THEY_ARE)
        },
        **{pickle.REDUCE[0]: make, pickle.NEWOBJ[0]: make, pickle.BUILD[0]: build},
        **{
            pickle.EMPTY_DICT[0]: lambda self: self.append(Items()),
            pickle.EMPTY_SET[0]: lambda self: self.append([]),
        },
        **{pickle.APPEND[0]: append_one, pickle.APPENDS[0]: extend, pickle.ADDITEMS[0]: extend},
        **{pickle.SETITEM[0]: set_one, pickle.SETITEMS[0]: set_many},
    }


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def read_pickle(content: bytes, names: Container[str]) -> Any:
    """ValueError where it is damaged, or names what is not in `names`."""
    try:
        return _Reader(content, names).load()
    except KeyError as error:
        raise ValueError(
            f"it holds the instruction {chr(error.args[0])!r}, which no checkpoint needs"
        ) from None
    except (
        LookupError,
        TypeError,
        AttributeError,
        pickle.UnpicklingError,
        EOFError,
        struct.error,
    ) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None


def read_saved_head(archive: zipfile.ZipFile, names: Container[str]) -> Any:
    """What torch.save has pickled into its zip archive; ValueError, LookupError where it is packed
    or damaged.
    """
    members = [info for info in archive.infolist() if info.filename.partition("/")[2] == "data.pkl"]
    if len(members) != 1 or not is_plain(members[0], LARGEST_HEAD):
        raise ValueError("its head is packed, too large, or not there once")
    return read_pickle(archive.read(members[0]), names)


def is_plain(member: zipfile.ZipInfo, most: int) -> bool:
    return (
        member.compress_type == zipfile.ZIP_STORED
        and member.file_size == member.compress_size <= most
    )
