"""Verifier `math_verify`: the answer named or boxed, else the last expression, compared as
mathematics by math-verify.

Its time-outs (SIGALRM, hence the main thread) read as "not equal" in its own verdict; here they are
counted as such. What never returns to Python ends with its worker.
"""

from functools import lru_cache
from itertools import product
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

from megatron_rl.rewards.task import Judgement, Task, right_or_wrong, verifier
from megatron_rl.types import Verdict

PRECISION = 6  # digits after the point: what the library's own metric uses
_TRUTH = (LatexExtractionConfig(),)
_RESPONSE = (ExprExtractionConfig(), LatexExtractionConfig())


class UnreadableReference(ValueError):
    """The row's answer is nothing that the library can read."""


@lru_cache(1024)  # the answers of a group are compared with one truth
def _truth(answer: str) -> list[Any]:
    found = _parsed("\\boxed{" + answer + "}", _TRUTH)
    if not found:
        raise UnreadableReference(f"math-verify reads nothing in the row's answer {answer[:80]!r}")
    return found


def _parsed(text: str, targets: tuple[Any, ...]) -> list[Any]:
    try:
        return parse(text, targets, raise_on_error=True)
    except Exception:  # sympy raises many types; the library treats each as no match
        return []


def _text(found: list[Any]) -> str | None:
    """The response's value in canonical form, equal for equal answers; None if it has no text."""
    try:
        return str(found[0])
    except ValueError:  # a number of more digits than Python writes
        return None


@verifier
def reward(task: Task) -> Judgement:
    try:
        truth = _truth(task.answer)
        response = _parsed(task.response, _RESPONSE)
    except TimeoutException:
        return Judgement(Verdict.timeout)
    if not response:
        return Judgement(Verdict.no_answer)
    late = False
    for pair in product(truth, response):
        try:
            if verify(*pair, PRECISION, raise_on_error=True):
                # everything equal to the truth counts as one answer
                return Judgement(Verdict.right, answer=_text(truth))
        except TimeoutException:
            late = True
        except Exception:
            pass  # this pair cannot be compared
    if late:
        return Judgement(Verdict.timeout)
    return right_or_wrong(False, _text(response))
