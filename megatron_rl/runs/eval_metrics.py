"""What an evaluation logs, for each of its sets: a part of the table in metrics.py."""

from __future__ import annotations

import re
from collections.abc import Iterable

ACCURACY = "eval/accuracy"
ROWS = (
    ("accuracy", "last", "", "avg@k: fraction of the answers that are right, mean over the prompts"),
    ("accuracy_stderr", "last", "", "its standard error, clustered by prompt, as are those below"),
    ("pass@K", "last", "", "fraction of prompts of which K answers hold a right one, unbiased (K: 2, 4, ... samples)"),
    ("pass@K_stderr", "last", "", "its standard error"),
    ("maj@K", "last", "", "fraction of prompts whose most frequent answer is right; ties count in part (K: samples)"),
    ("maj@K_stderr", "last", "", "its standard error"),
    ("reward_mean", "last", "", "mean reward on the held-out prompts"),
    ("n", "last", "prompts", "held-out prompts that were answered"),
    ("response_tokens_mean", "last", "tokens", "mean length of those answers"),
    ("truncated_fraction", "last", "", "fraction of them cut at the length limit"),
    ("no_answer_fraction", "last", "", "fraction of them in which the verifier found no answer"),
    ("errors", "last", "rollouts", "those without a score (an exception, a death, a timeout), which count as wrong"),
)  # fmt: skip
_OF_A_SET = re.compile(r"eval/(?:([\w-]+)/)?([a-z_]+)(@\d+)?(_stderr)?")


def row_name(name: str) -> str:
    """eval/aime/pass@8 -> eval/pass@K: of any set, and any number of samples."""
    found = _OF_A_SET.fullmatch(name)
    if found is None:
        return name
    return f"eval/{found[2]}{'@K' if found[3] else ''}{found[4] or ''}"


def accuracies(names: Iterable[str]) -> dict[str, str]:
    """Of all sets that were evaluated: metric -> how it is called; data.eval first."""
    found = {name: _OF_A_SET.fullmatch(name) for name in names}
    sets = {name: match[1] or "eval" for name, match in found.items() if match and row_name(name) == ACCURACY}
    return dict(sorted(sets.items(), key=lambda item: (item[0] != ACCURACY, item[0])))
