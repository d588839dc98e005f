"""Responses as models write them, with 60 truths in several forms and 14 phrasings.

`expected_verdicts.json` holds the verdicts of verl's `math_dapo` and of the library's own metric,
in this order: `+` right, `-` wrong, `?` the library raised (no readable truth); a text per reward.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
# truth: what is said in its place; the first is always the truth itself
ANSWERS: dict[str, list[str]] = json.loads((HERE / "answers.json").read_text(encoding="utf-8"))
SAID = (
    "Answer: {}",
    "So we are done.\nAnswer: ${}$",
    "Therefore the final answer is \\boxed{{{}}}.",
    "First \\boxed{{1}}, but then \\boxed{{{}}}",
    "answer :  {}\n",
    "**Answer:** {}",
    "Answer: \\boxed{{{}}}",
    "Answer: 17\nI made a mistake.\nAnswer: $x = {}$.",
    "Answer: {}" + " and so on" * 40,  # beyond the last 300 characters
    "The final answer is: $\\boxed{{{}}}$. I hope it is correct.",
    "Let me think. $${}$$",
    "\\[ {} \\] Answer:",
    "<think>Answer: 3</think> ANSWER: {}\n\nDone",
    "The answer is {}",
)


def cases() -> list[tuple[str, str]]:
    """(response, truth). Each form has four of the phrasings in turn, every fourth truth all."""
    found = []
    forms = [(form, truth) for truth, forms in ANSWERS.items() for form in forms]
    for turn, (form, truth) in enumerate(forms):
        some = [SAID[(turn + 5 * each) % len(SAID)] for each in range(4)]
        ways = SAID if form == truth and len(truth) % 4 == 0 else some
        found += [(way.format(form), truth) for way in ways]
    return found
