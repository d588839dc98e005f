"""Loads and calls the rewards of `reward.name` (ours, `module:function`, `file.py:function`);
returns their weighted sum.

The names of a function's parameters decide how it is called: as ours, verl's or TRL's. It returns a
number, or a mapping whose `score` is one; other numbers in it are metrics. `imported` serves
environments and integrations as well.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl.config.bounds import did_you_mean
from megatron_rl.config.schema import VERIFIERS
from megatron_rl.rewards import math_dapo
from megatron_rl.rewards.task import Judgement, Reward, Task
from megatron_rl.types import LARGEST_NUMBER, NEARLY_RIGHT, RIGHT, Verdict

# a function of a recipe's: row, name of its answer column, response -> score, alone or in a mapping
RewardFunction = Callable[[Mapping[str, Any], str, str], float | Mapping[str, Any]]
# characters of a response, where a verifier looks at no others
READS_LAST = {"math_dapo": math_dapo.TAIL}
# of the environment: set by the command, for the ranks that it starts
RECIPE_FOLDER = "MEGATRON_RL_RECIPE_FOLDER"
MOST_DETAILS = 16
LONGEST_NAME = 64


def reads_last(names: Iterable[str]) -> int | None:
    """Number of characters at a response's end that these rewards read; None: all of them."""
    found = [READS_LAST.get(name) for name in names]
    if None in found:
        return None
    return max(filter(None, found), default=None)


def resolve(name: str) -> Reward:
    """A module of megatron_rl/rewards or a user's function; LookupError describes the problem."""
    if name in VERIFIERS:
        try:
            return importlib.import_module(f"megatron_rl.rewards.{name}").reward
        except ImportError as error:
            raise LookupError(
                f"{name!r} needs a library that is not installed ({error}); run make install"
            ) from None
    if ":" in name:
        return load(name)
    hint = did_you_mean(name, VERIFIERS, "; did you mean {}?")
    raise LookupError(
        f"{name!r} is not a built-in reward ({', '.join(VERIFIERS)}) and not "
        f"package.module:function or path/file.py:function{hint}"
    )


class Rewards:
    """Weighted sum of rewards. The verdict is the first applicable one, unless one is late."""

    def __init__(self, weights: Mapping[str, float], wrong: float) -> None:
        self._parts = [(name, resolve(name), weight) for name, weight in weights.items()]
        self._wrong = wrong

    def judge(self, task: Task) -> Judgement:
        """Add up what the rewards say; raises what a reward raises."""
        score = 0.0
        details: dict[str, float] = {}
        applied: list[Judgement] = []
        for name, reward, weight in self._parts:
            one = reward(task)
            if one is None:
                continue
            applied.append(one)
            score += self._worth(one) * weight
            # of two numbers of one name the first counts
            own = {f"own/{key.replace('/', '_')}": value for key, value in one.details.items()}
            details = own | details
            if len(self._parts) > 1:
                details[f"part/{name.replace('/', '_')}"] = self._worth(one)
        if not applied:
            raise ValueError("no reward applies to this row")
        verdict = applied[0].verdict
        if any(one.verdict == Verdict.timeout for one in applied):
            verdict = Verdict.timeout
        return Judgement(verdict, score, details, applied[0].answer)

    def _worth(self, one: Judgement) -> float:
        if one.score is not None:
            return one.score
        if one.verdict == Verdict.right:
            return RIGHT
        return self._wrong


def places() -> list[str]:
    """Folders searched for user modules after installed ones: the working folder, the recipe's."""
    return list(dict.fromkeys([os.getcwd(), os.environ.get(RECIPE_FOLDER) or os.getcwd()]))


def load(name: str) -> Reward:
    """Load `package.module:function` or `path/file.py:function`; LookupError if that fails."""
    found = imported(name)
    if not callable(found):
        raise LookupError(f"{name!r} is {type(found).__name__}, not a function")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise LookupError(
            f"{name!r} gives no number when it is called: make it an ordinary function"
        )
    return _called(name, found)


def imported(name: str) -> Any:
    """Import the user's `package.module:name` or `path/file.py:name`; LookupError if that fails."""
    where, _, function = name.rpartition(":")
    sys.path += [place for place in places() if place not in sys.path]
    try:
        return getattr(
            _file(where) if where.endswith(".py") else importlib.import_module(where), function
        )
    except BaseException as error:  # a module of the user's: importing it can raise anything
        raise LookupError(f"{name!r} cannot be imported: {type(error).__name__}: {error}") from None


def _file(where: str) -> ModuleType:
    tried = [Path(place, where) for place in places()]
    path = next((path for path in tried if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"no file {' or '.join(map(str, tried))}")
    sys.path.append(str(path.parent))
    # math.py is no math
    if path.stem not in {*sys.modules, *sys.stdlib_module_names}:
        name = path.stem
    else:
        name = str(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _called(name: str, function: Callable[..., Any]) -> Reward:
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except ValueError:  # a function that does not tell its signature
        parameters = {}

    def taken(given: dict[str, Any]) -> dict[str, Any]:
        if any(one.kind == inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            return given
        return {name: value for name, value in given.items() if name in parameters}

    if "solution_str" in parameters:
        return lambda task: read(function(**taken(_as_verl(task))))
    if "completions" in parameters:
        return lambda task: _first(function(**taken(_as_trl(task))))
    if parameters:
        try:
            inspect.signature(function).bind(
                {}, "answer", "response", **taken(_about(Task({}, "response")))
            )
        except TypeError as error:
            raise LookupError(
                f"{name!r} is called as (row, answer_key, response): {error}; verl's (data_source, "
                "solution_str, ground_truth, extra_info) and TRL's (prompts, completions, "
                "**columns) are known by these names"
            ) from None
    return lambda task: read(
        function(task.row, task.answer_key, task.response, **taken(_about(task)))
    )


def _about(task: Task) -> dict[str, Any]:
    """What any signature may take besides its own arguments."""
    return {"finish_reason": task.finish_reason, "response_tokens": task.response_tokens}


def _as_verl(task: Task) -> dict[str, Any]:
    row = task.row
    return {
        "data_source": row.get("data_source", ""),
        "solution_str": task.response,
        "ground_truth": row.get(task.answer_key),
        "extra_info": {**(row.get("extra_info") or {}), **_about(task)},
        **_about(task),
    }


def _as_trl(task: Task) -> dict[str, Any]:
    prompt = task.row.get(task.prompt_key)
    said = (
        task.response
        if isinstance(prompt, str)
        else [{"role": "assistant", "content": task.response}]
    )
    columns = {
        name: [value] for name, value in task.row.items() if name not in ("prompt", "completion")
    }
    about = {name: [value] for name, value in _about(task).items()}
    return columns | {"prompts": [prompt], "completions": [said]} | about


def _first(results: Any) -> Judgement | None:
    (result,) = results
    # TRL's way of saying that a reward does not apply
    return None if result is None else read(result)


def read(result: Any) -> Judgement:
    """The judgement in what a reward returned; raises where there is no finite number in it."""
    others: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise TypeError(
                "the reward is a mapping without 'score', it has "
                f"{', '.join(map(str, result)) or 'nothing'}"
            )
        others = {name: value for name, value in result.items() if name != "score"}
        result = result["score"]
    score = number(result)
    if score is None:
        raise TypeError(
            f"the reward is {result!r:.60}, expected a number, or a mapping with the number 'score'"
        )
    if not abs(score) <= LARGEST_NUMBER:
        raise ValueError(
            f"the score is {score:g}, expected a finite number of at most {LARGEST_NUMBER:g}"
        )
    # verl's functions say so themselves
    right = number(others["acc"]) if "acc" in others else score
    answer = others.get("pred")  # verl's functions call it so
    if (right or 0.0) >= NEARLY_RIGHT:
        verdict = Verdict.right
    else:
        verdict = Verdict.wrong
    return Judgement(verdict, score, for_metrics(others), None if answer is None else str(answer))


def for_metrics(values: Mapping[Any, Any] | None) -> dict[str, float]:
    """The finite numbers among what a user's code reports, by name."""
    numbers = ((str(name)[:LONGEST_NAME], number(value)) for name, value in (values or {}).items())
    finite = (
        (name, one) for name, one in numbers if one is not None and abs(one) <= LARGEST_NUMBER
    )
    return dict(islice(finite, MOST_DETAILS))


def number(value: Any) -> float | None:
    """Convert a bool, a number or a tensor of one number to a float; None for anything else."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    # an array or a tensor of several numbers, an integer too large for a float
    with suppress(Exception):
        return float(value)
    return None
