"""Final answers in answer columns of published data sets: after ####, in the last \\boxed{}, or a
whole number.
"""

import re
from collections.abc import Callable


class Unusable(ValueError):
    """A row that has no question or no answer; the message names its columns."""


def final_answer(first: str) -> Callable[[str], str]:
    """Return the function that finds the final answer in texts like `first`, a data set's first."""
    if "####" in first:
        return after_hashes
    if "\\boxed" in first:
        return boxed
    return whole_number


def after_hashes(solution: str) -> str:
    """GSM8K's last line."""
    if "####" not in solution:
        raise Unusable("an answer without ####")
    return solution.rpartition("####")[2].strip().replace(",", "")


def whole_number(answer: str) -> str:
    """AIME's answers, some of which are published with leading zeros; others as they are."""
    number = re.fullmatch(r"(\d+)(\.0+)?", answer.strip())
    if number:
        return number[1].lstrip("0") or "0"
    return answer.strip()


def boxed(solution: str) -> str:
    """Content of a solution's last box."""
    start = solution.rfind("\\boxed")
    if start < 0:
        raise Unusable("an answer without \\boxed")
    content = solution[start + len("\\boxed") :].lstrip()
    if not content.startswith("{"):
        return (content.split("$")[0].split() or [""])[0]
    depth = 0
    for found in re.finditer(r"\\.|[{}]", content, re.DOTALL):  # \{ and \} are signs of the answer
        depth += (found[0] == "{") - (found[0] == "}")
        if depth == 0:
            return content[1 : found.start()].strip()
    raise Unusable("a box that is never closed")


def boxed_or_plain(answer: str) -> str:
    """Content of the last box; a text without a box is the answer itself."""
    return boxed(answer) if "\\boxed" in answer else answer.strip()
