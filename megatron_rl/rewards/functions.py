"""The built-in rewards. A reward is a function `(row, answer_key, response) -> float`.

Name one of these in `reward.name`, or your own as `package.module:function`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Reward = Callable[[Mapping[str, Any], str, str], float]


def exact_match(row: Mapping[str, Any], answer_key: str, response: str) -> float:
    """1 where the response, stripped, is the row's answer."""
    return float(response.strip() == str(row[answer_key]).strip())


def resolve(name: str) -> Reward:
    """The function a configuration names; LookupError says what is wrong with the name."""
    built_in = {"exact_match": exact_match}
    if name in built_in:
        return built_in[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise LookupError(f"{name!r} is not a built-in reward ({', '.join(built_in)}) and not package.module:function")
    if os.getcwd() not in sys.path:  # a module beside the recipe, wherever the command itself is installed
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module of the user's: importing it can raise anything
        raise LookupError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise LookupError(f"{name!r} is {type(found).__name__}, not a function")
    try:
        inspect.signature(found).bind({}, "answer", "response")
    except TypeError as error:
        raise LookupError(f"{name!r} is called as (row, answer_key, response): {error}") from None
    except ValueError:
        pass  # a function that does not tell its signature
    return found
