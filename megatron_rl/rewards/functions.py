"""The built-in rewards. A reward is a function `(row, answer_key, response) -> float`.

Name one of these in `reward.name`, or your own as `package.module:function`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Reward = Callable[[Mapping[str, Any], str, str], float]
RECIPE_FOLDER = "MEGATRON_RL_RECIPE_FOLDER"  # of the environment: set by the command, for the ranks that it starts


def exact_match(row: Mapping[str, Any], answer_key: str, response: str) -> float:
    """1 where the response, stripped, is the row's answer."""
    return float(response.strip() == str(row[answer_key]).strip())


BUILT_IN: dict[str, Reward] = {"exact_match": exact_match}


def own_places() -> list[str]:
    """Where the user's modules lie, after all that is installed: the working folder, and the recipe's."""
    return list(dict.fromkeys([os.getcwd(), os.environ.get(RECIPE_FOLDER) or os.getcwd()]))


def resolve(name: str) -> Reward:
    """The function a configuration names; LookupError says what is wrong with the name."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, function = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise LookupError(
            f"{name!r} is not a built-in reward ({', '.join(BUILT_IN)}) and not package.module:function{hint}"
        )
    sys.path += [place for place in own_places() if place not in sys.path]
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a module of the user's: importing it can raise anything
        raise LookupError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise LookupError(f"{name!r} is {type(found).__name__}, not a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise LookupError(f"{name!r} gives no number when it is called: make it an ordinary function")
    try:
        inspect.signature(found).bind({}, "answer", "response")
    except TypeError as error:
        raise LookupError(f"{name!r} is called as (row, answer_key, response): {error}") from None
    except ValueError:
        pass  # a function that does not tell its signature
    return found
