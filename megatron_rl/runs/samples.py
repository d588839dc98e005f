"""A few answers of a recorded step, for people: the first right one, the first that is not, the one where the engines
disagree most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.types import Scored, Verdict

if TYPE_CHECKING:
    import torch

WIDTH = 60  # characters of a prompt, and of an answer, on a line


def choose(scored: Sequence[Scored], prox_logprobs_BT: torch.Tensor | None) -> list[int]:
    """Their places among `scored`."""
    right = [place for place, one in enumerate(scored) if one.verdict == Verdict.right]
    other = [place for place, one in enumerate(scored) if one.verdict != Verdict.right]
    found = [*right[:1], *other[:1]]
    differences = [difference(one, prox_logprobs_BT, place) for place, one in enumerate(scored)]
    known = [place for place, value in enumerate(differences) if math.isfinite(value)]
    if known:
        found.append(max(known, key=differences.__getitem__))
    return list(dict.fromkeys(found))


def difference(one: Scored, prox_logprobs_BT: torch.Tensor | None, place: int) -> float:
    """Mean of abs d over the answer's tokens; NaN where it is not known."""
    mu_T = np.asarray(one.rollout.logprobs)
    if prox_logprobs_BT is None or not len(mu_T):
        return math.nan
    return float(np.abs(prox_logprobs_BT[place, : len(mu_T)].numpy(force=True) - mu_T).mean())


def finding(verdict: str | None, error: str | None) -> str:
    return error or (verdict or "not judged").replace("_", " ")


def line(one: Scored) -> str:
    """On one line: the end of the prompt, the end of the answer, what it was worth."""
    prompt, answer = _end(one.rollout.prompt.text), _end(one.text)
    return f"sample   {prompt} -> {answer}   {finding(one.verdict, one.error)}, reward {one.reward:g}"


def _end(text: str) -> str:
    short = " ".join(text.split())
    return repr(short if len(short) <= WIDTH else f"...{short[-WIDTH:]}")
