"""From the names in `reward.name` to what judges an answer: several rewards with weights, added up."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping

from megatron_rl.config.schema import VERIFIERS
from megatron_rl.rewards import math_dapo, own
from megatron_rl.rewards.task import Judgement, Reward, Task
from megatron_rl.types import RIGHT, Verdict

READS_LAST = {"math_dapo": math_dapo.TAIL}  # characters of a response, where a verifier looks at no others


def reads_last(names: Iterable[str]) -> int | None:
    """How many characters before the end these rewards look at; None: all of them."""
    found = [READS_LAST.get(name) for name in names]
    return None if None in found else max(filter(None, found), default=None)


def resolve(name: str) -> Reward:
    """A module of this room, or a function of the user's; LookupError says what is wrong with the name."""
    if name in VERIFIERS:
        return _built_in(name)
    if ":" in name:
        return own.load(name)
    near = difflib.get_close_matches(name, VERIFIERS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise LookupError(
        f"{name!r} is not a built-in reward ({', '.join(VERIFIERS)}) and not package.module:function "
        f"or path/file.py:function{hint}"
    )


def _built_in(name: str) -> Reward:
    try:
        return importlib.import_module(f"megatron_rl.rewards.{name}").reward
    except ImportError as error:
        raise LookupError(f"{name!r} needs a library that is not installed ({error}); run make install") from None


class Rewards:
    """The weighted sum of what the rewards say. The first of them has the verdict."""

    def __init__(self, weights: Mapping[str, float], wrong: float) -> None:
        self._parts = [(name, resolve(name), weight) for name, weight in weights.items()]
        self._wrong = wrong

    def judge(self, task: Task) -> Judgement:
        """Raises what a reward raises."""
        judged = [(name, reward(task), weight) for name, reward, weight in self._parts]
        applied = [(name, one, self._worth(one), weight) for name, one, weight in judged if one is not None]
        if not applied:
            raise ValueError("no reward applies to this row")
        late = any(one.verdict == Verdict.timeout for _, one, _, _ in applied)
        details = {_metric("own", name): value for _, one, _, _ in applied for name, value in one.details.items()}
        if len(self._parts) > 1:
            details |= {_metric("part", name): score for name, _, score, _ in applied}
        verdict = Verdict.timeout if late else applied[0][1].verdict
        return Judgement(verdict, sum(score * weight for _, _, score, weight in applied), details, applied[0][1].answer)

    def _worth(self, one: Judgement) -> float:
        if one.score is not None:
            return one.score
        return RIGHT if one.verdict == Verdict.right else self._wrong


def _metric(family: str, name: str) -> str:
    return f"{family}/{name.replace('/', '_')}"
