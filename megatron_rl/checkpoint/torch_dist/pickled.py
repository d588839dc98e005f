"""Safe pickle reader for checkpoint indexes: a class is a stand-in that keeps what it is given, so
that nothing of the names in a pickle is imported or called.

Keys of dicts are not hashed, so that a small file cannot ask for endless work. Torch-free.
"""

import io
import pickle
import struct
from collections.abc import Container
from typing import Any

DAMAGED = (
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    EOFError,
    struct.error,
    pickle.UnpicklingError,
)


class Made:
    """Stand-in for an object; its subclasses are stand-ins for the classes named in a pickle."""

    name = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "Made":
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def fields(self, *wanted: str) -> list[Any]:
        """Fields by their names; None for one that it lacks."""
        found = dict(self.state.named()) if isinstance(self.state, Items) else {}
        return [found.get(each) for each in wanted]


class Items(list[Any]):
    """Stand-in for a dict, as pairs of key and value, or for a set."""

    add = list.append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append((key, value))

    def named(self) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in self if isinstance(key, str)]


_Unpickler: Any = pickle._Unpickler  # in Python: its instructions can be replaced


class _Reader(_Unpickler):
    dispatch = {  # noqa: RUF012
        **_Unpickler.dispatch,
        pickle.EMPTY_DICT[0]: lambda self: self.append(Items()),
        pickle.EMPTY_SET[0]: lambda self: self.append(Items()),
    }
    del dispatch[pickle.DICT[0]], dispatch[pickle.FROZENSET[0]]

    def __init__(self, content: bytes, names: Container[str]) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        text = f"{module}.{name}"
        if text not in self._names:
            raise ValueError(f"it refers to {text[:200]}, which no checkpoint needs")
        return type("Made", (Made,), {"name": text})


def read_pickle(content: bytes, names: Container[str]) -> Any:
    """ValueError where it is damaged, or names what is not in `names`."""
    try:
        return _Reader(content, names).load()
    except DAMAGED as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
