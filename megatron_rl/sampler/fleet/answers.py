"""What a server has answered, held against what was asked; whatever else it sends is a ValueError."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Generic, Literal, TypeVar

import aiohttp
import msgspec
import numpy as np

from megatron_rl.engine.generation import Kept, of_lists
from megatron_rl.engine.readiness import LARGEST_ID
from megatron_rl.sampler.protocol import versions_of_tokens
from megatron_rl.types import SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION

MISSING_LOGPROB = -9999.0  # what the server writes for a logprob that is NaN, infinite or not there
TOKEN_BYTES = 384  # more than any server writes for a token and its logprob ...
CANDIDATE_BYTES = 128  # ... and for each candidate beside it

LONGEST_ERROR = 200  # characters: it may quote what was sent
T = TypeVar("T")

# the decoder holds every number against these: no other loop over the tokens is needed
_Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ID)]
_LogprobValue = Annotated[float, msgspec.Meta(le=1e-3)]  # at most 0, and what rounding may add


class Results(msgspec.Struct, Generic[T]):
    """What each worker of the engine has answered."""

    results: Annotated[list[T], msgspec.Meta(min_length=1)]


class _Candidate(msgspec.Struct):
    token_id: _Number
    logprob: _LogprobValue


class _Logprob(msgspec.Struct):
    logprob: _LogprobValue
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: Annotated[str, msgspec.Meta(max_length=32)]
    start: _Number
    end: _Number


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[_Number]
    finish_reason: Literal["stop", "length", "abort"] | None = None
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
        """Policy version of each token; None where all have one in common."""
        if len({version for version, _ in self.spans}) < 2:
            return None
        return versions_of_tokens(self.spans)


async def read_body(response: aiohttp.ClientResponse, largest: int) -> bytes:
    """Read a body as it was sent: what unpacking would make of it has no bound."""
    packing = response.headers.get("content-encoding", "identity")
    if packing != "identity":
        raise ValueError(f"the answer is packed ({packing:.20}), which nobody asked for")
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > largest:
            raise ValueError(f"the answer has more than the {largest} bytes that it can take")
    return bytes(body)


def read_json(content: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)[:LONGEST_ERROR]) from None


def largest_body(prompt_tokens: int, params: SamplingParams) -> int:
    """Bytes that answers to one prompt can take."""
    token = TOKEN_BYTES + CANDIDATE_BYTES * params.candidates
    return (1 << 16) + 16 * prompt_tokens + token * params.samples * params.max_tokens


def read_answers(content: bytes, params: SamplingParams, vocabulary: int) -> list[Answer]:
    """Answers in the order of samples; ValueError where they are not whole, or cannot have been sampled."""
    generated: _Generated = read_json(content, _Generated)
    choices = sorted(generated.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(len(choices))):
        raise ValueError("samples that are not numbered from 0 on")
    most = max((len(choice.token_ids) for choice in choices), default=0)
    if most > params.max_tokens:
        raise ValueError(f"{most} tokens, {params.max_tokens} were asked for")
    answers = [_answer(choice, params.candidates) for choice in choices]
    for answer in answers:
        highest = max(chain(answer.token_ids, answer.kept.ids if answer.kept else ()), default=0)
        if highest >= vocabulary:
            raise ValueError(f"token {highest} is beyond the vocabulary of {vocabulary} tokens")
    return answers


def _answer(choice: _Choice, candidates: int) -> Answer:
    content = (choice.logprobs and choice.logprobs.content) or []
    if len(content) != len(choice.token_ids):
        content = [_Logprob(MISSING_LOGPROB)] * len(choice.token_ids)
    logprobs = tuple(one.logprob if one.logprob > MISSING_LOGPROB else math.nan for one in content)
    kept = None
    if candidates:
        if max((len(one.top_logprobs) for one in content), default=0) > candidates:
            raise ValueError(f"more than the {candidates} candidates of a token that were asked for")
        found = ([(top.token_id, top.logprob) for top in one.top_logprobs] for one in content)
        kept = of_lists(choice.token_ids, found, MISSING_LOGPROB, candidates)
        logprobs = tuple(np.where(kept.unknown_T, math.nan, logprobs).tolist())
    return Answer(tuple(choice.token_ids), logprobs, choice.finish_reason or "abort", _spans(choice), kept)


def _spans(choice: _Choice) -> tuple[tuple[int, int], ...]:
    length = len(choice.token_ids)
    if choice.weight_versions is None:
        return ((NO_VERSION, length),) if length else ()
    bounds = [0, *(span.end for span in choice.weight_versions)]
    starts = [span.start for span in choice.weight_versions]
    if starts != bounds[:-1] or bounds != sorted(bounds) or bounds[-1] != length:
        raise ValueError(f"policy versions that do not add up to {length} tokens")
    return tuple((_number(span.version), span.end - span.start) for span in choice.weight_versions)


def _number(version: str) -> int:
    """A server that stamps something else than a number holds weights that this run never gave it."""
    return int(version) if version.lstrip("-").isdecimal() else NO_VERSION
