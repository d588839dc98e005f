"""Verifier `math_dapo`: compares the last `Answer: ...` in the last 300 characters, normalized.

The normal form is Minerva's, as verl applies it, so that scores compare with published ones.
"""

import re
from functools import lru_cache

from megatron_rl.rewards.task import Judgement, Task, right_or_wrong, verifier
from megatron_rl.types import Verdict

TAIL = 300  # characters
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# One after the other: each sees what the ones before have left.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_REMOVED = (
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    r"\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    r"\text{s}",
    r"\text{.}",
    "\\text{\ns}",
    r"\text{}^2",
    r"\text{}^3",
    "\\text{\n}",
    r"\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    r"\dots",
)
_REWRITTEN = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r".*?\$(.*?)\$.*", r"$\1$"),  # of a line with formulas, the first one
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
)


@lru_cache(4096)  # the answers of a group are compared with one truth
def normal(answer: str) -> str:
    answer = answer.rpartition("=")[2]
    for text, by in _REPLACED:
        answer = answer.replace(text, by)
    for text in _REMOVED:
        answer = answer.replace(text, "")
    for pattern, by in _REWRITTEN:
        answer = pattern.sub(by, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    if digits.isdigit():
        return digits
    return answer.strip()


def found(response: str) -> str | None:
    """The last answer line, as it stands."""
    lines = _ANSWER.findall(response[-TAIL:])
    return lines[-1] if lines else None


@verifier
def reward(task: Task) -> Judgement:
    answer = found(task.response)
    if answer is None:
        return Judgement(Verdict.no_answer)
    return right_or_wrong(normal(answer) == normal(task.answer), normal(answer))
