"""The sequences that a server has sampled, as it sends them."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import msgspec
import numpy as np

from megatron_rl.engine.kept import Kept, of_lists
from megatron_rl.sampler.answering import by_token
from megatron_rl.weight_sync.manifest import NO_VERSION

MISSING_LOGPROB = -9999.0  # what the server writes for a logprob that is NaN, infinite or not there


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprob(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True)
class Answer:
    """One sampled sequence."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # NaN where there is none
    finish_reason: str
    spans: tuple[tuple[int, int], ...]  # policy version and number of tokens, one after the other
    kept: Kept | None = None  # what each token was drawn among; None: among all

    @property
    def oldest(self) -> int:
        return min(version for version, _ in self.spans)

    @property
    def versions(self) -> array[int] | None:
        """Of each token; None where they have one in common."""
        if len({version for version, _ in self.spans}) < 2:
            return None
        return by_token(self.spans)


def read_answers(content: bytes, candidates: int) -> list[Answer]:
    """In the order of samples; ValueError where they are not whole."""
    try:
        generated = msgspec.json.decode(content, type=_Generated)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    return [_answer(choice, candidates) for choice in sorted(generated.choices, key=lambda choice: choice.index)]


def _answer(choice: _Choice, candidates: int) -> Answer:
    content = (choice.logprobs and choice.logprobs.content) or []
    if len(content) != len(choice.token_ids):
        content = [_Logprob(MISSING_LOGPROB)] * len(choice.token_ids)
    logprobs = tuple(one.logprob if one.logprob > MISSING_LOGPROB else math.nan for one in content)
    kept = None
    if candidates:
        found = ([(top.token_id, top.logprob) for top in one.top_logprobs] for one in content)
        kept = of_lists(choice.token_ids, found, MISSING_LOGPROB, candidates)
        logprobs = tuple(np.where(kept.unknown_T, math.nan, logprobs).tolist())
    return Answer(tuple(choice.token_ids), logprobs, choice.finish_reason or "abort", _spans(choice), kept)


def _spans(choice: _Choice) -> tuple[tuple[int, int], ...]:
    length = len(choice.token_ids)
    if choice.weight_versions is None:
        return ((NO_VERSION, length),) if length else ()
    bounds = [0, *(span.end for span in choice.weight_versions)]
    if [span.start for span in choice.weight_versions] != bounds[:-1] or bounds[-1] != length:
        raise ValueError(f"policy versions that do not add up to {length} tokens")
    return tuple((_number(span.version), span.end - span.start) for span in choice.weight_versions)


def _number(version: str) -> int:
    """A server that stamps something else than a number holds weights that this run never gave it."""
    return int(version) if version.lstrip("-").isdecimal() else NO_VERSION
