"""Mismatch of a batch by slices: position, probability, length, staleness, finish reason and weight
format; of sessions, also turn, place in the turn, and kind of token. For a step's metrics, and for
reports, which pool them.

A kernel that is wrong for long contexts shows in the position deciles, a quantized head in the
small probabilities, stale weights in the staleness, a stop-token fault in the finish reasons, a
format that does not suit in the weight formats; a cache that is wrong behind text that others wrote
in the later turns and the first tokens of each, a grammar that the engine enforces and does not
report in the tool calls.

Shape legend: B sequences, T response positions, N tokens under the mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.batch import Batch
from megatron_rl.config.schema import Format
from megatron_rl.rollout_correction.ratio import bounded_exp

CUTS = (
    "position",
    "probability",
    "length",
    "staleness",
    "finish",
    "format",
    "turn",
    "place",
)
OF_SESSIONS = CUTS[-2:]
# turns counted from 0; tokens of a turn from 1, in powers: what differs is how long ago the engine
# last read a prompt
TURNS = ("0", "1", "2", "3", "4 to 7", "8 to 15", "16 on", "last")
TURN_STARTS = (1, 2, 3, 4, 8, 16)
PLACES = ("first", "2 to 4", "5 to 16", "17 to 64", "65 on", "last")
PLACE_STARTS = (1, 4, 16, 64)
LABELS = {"turn": TURNS, "place": PLACES}
# what stands for these in a step's metrics: the first, the last, and all between
SHOWN = {"turn": ("first_turn", "last_turn", "middle_turns"), "place": ("turn_start", "turn_end")}
AGES = ("fresh", "stale")
PROBABILITY_EDGES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Slice:
    """Part of a batch. `kl` is the plain estimate of KL(sampler || learner), the mean of -d."""

    by: str  # one of CUTS
    label: str
    tokens: int
    kl: float
    k3_kl: float
    abs_diff: float  # mean |d|
    mult_prob_error: float  # mean exp|d|


@torch.no_grad()
def breakdowns(
    prox_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    finish_reasons: Sequence[str] | None = None,
    versions_BT: Tensor | None = None,
    policy_version: int | None = None,
    formats: Sequence[str] | None = None,
    sessions: Batch | None = None,
) -> list[Slice]:
    """Slices with at least one token, ordered by label; tokens without a ratio are left out.

    `sessions`: the batch itself, where it has turns. Staleness is `policy_version` (the newest of
    the batch where it is None) less the token's version.
    """
    tokens, counted_BT = _Tokens.of(prox_logprobs_BT, sampler_logprobs_BT, mask_BT)
    device = counted_BT.device
    lengths_B = mask_BT.bool().sum(dim=1)
    order_BT = mask_BT.bool().cumsum(dim=1) - 1  # a token's place among the row's own tokens

    decile_BT = (10 * order_BT).div(lengths_B.clamp(min=1)[:, None], rounding_mode="floor")
    names = [f"{10 * decile}-{10 * decile + 10} %" for decile in range(10)]
    found = list(tokens.slices("position", decile_BT[counted_BT], names))

    edges = torch.tensor(PROBABILITY_EDGES, device=device)
    bucket_N = torch.bucketize(sampler_logprobs_BT[counted_BT].float().exp(), edges)
    bounds = ("0", *map(str, PROBABILITY_EDGES), "1")
    names = [f"{low} to {high}" for low, high in pairwise(bounds)]
    found += tokens.slices("probability", bucket_N, names)

    power_B = lengths_B.clamp(min=1).double().log2().floor().long()
    if len(power_B):
        names = [f"{2**power} to {2 ** (power + 1) - 1}" for power in range(int(power_B.max()) + 1)]
    else:
        names = []
    found += tokens.slices("length", power_B[tokens.row_N], names)

    if versions_BT is not None and bool(counted_BT.any()):
        versions_N = versions_BT[counted_BT]
        if policy_version is None:
            newest = int(versions_N.max())
        else:
            newest = policy_version
        staleness_N = (newest - versions_N).clamp(min=0)
        names = [str(age) for age in range(int(staleness_N.max()) + 1)]
        found += tokens.slices("staleness", staleness_N, names)
    for by, words, least in (("finish", finish_reasons, 1), ("format", formats, 2)):
        names = sorted(set(words or ()))
        if words is not None and len(names) >= least:
            number_B = torch.tensor(
                [names.index(word) for word in words], dtype=torch.int64, device=device
            )
            found += tokens.slices(by, number_B[tokens.row_N], names)
    if sessions is not None and sessions.turns_BT is not None:
        for by, bucket_BT in _of_sessions(sessions.turns_BT, sessions).items():
            found += tokens.slices(by, bucket_BT[counted_BT], LABELS[by])
    return found


def _of_sessions(turns_BT: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Each token's place in LABELS. The last turn is its session's, which may have several rows."""
    starts = {
        name: torch.tensor(edges)
        for name, edges in (("turn", TURN_STARTS), ("place", PLACE_STARTS))
    }
    last_B = turns_BT.amax(dim=1)
    if batch.samples_B is not None:
        session_B = torch.stack([batch.groups_B, batch.samples_B]).unique(
            dim=1, return_inverse=True
        )[1]
        last_B = torch.zeros_like(last_B).scatter_reduce(0, session_B, last_B, "amax")[session_B]
    turn_BT = torch.bucketize(turns_BT, starts["turn"], right=True)
    turn_BT[(turns_BT == last_B[:, None]) & (turns_BT > 0)] = len(TURNS) - 1

    column_T = torch.arange(turns_BT.shape[1])
    other_BT = turns_BT[:, 1:] != turns_BT[:, :-1]  # whether a turn ends before the next token
    ends_BT, begins_BT = (
        torch.nn.functional.pad(other_BT, side, value=True) for side in ((0, 1), (1, 0))
    )
    order_BT = column_T - column_T.where(begins_BT, 0).cummax(dim=1).values
    place_BT = torch.bucketize(order_BT, starts["place"], right=True)
    place_BT[ends_BT & (order_BT > 0)] = len(PLACES) - 1
    return {"turn": turn_BT, "place": place_BT}


@torch.no_grad()
def mismatch_in_sessions(prox_logprobs_BT: Tensor | None, batch: Batch) -> dict[str, float]:
    """Mismatch of first, middle and last turns, and of their first and last tokens; empty for
    single responses and for what all tokens have in common.
    """
    found: dict[str, float] = {}
    if prox_logprobs_BT is None or batch.turns_N is None:
        return found
    tokens, counted_BT = _Tokens.of(prox_logprobs_BT, batch.sampler_logprobs_BT, batch.mask_BT)
    for by, bucket_BT in _of_sessions(batch.matrix(batch.turns_N, -1).long(), batch).items():
        bucket_N = bucket_BT[counted_BT]
        last = len(LABELS[by]) - 1
        bucket_N = torch.where(bucket_N == last, 1, torch.where(bucket_N == 0, 0, 2))
        if len(bucket_N.unique()) > 1:
            found |= _metrics(tokens, tokens.slices(by, bucket_N, SHOWN[by]))
    return found


@torch.no_grad()
def mismatch_by_format(prox_logprobs_BT: Tensor | None, batch: Batch) -> dict[str, float]:
    """Mismatch of each weight format of a mixed fleet; empty if a single one was used."""
    formats_B = batch.formats_B
    if prox_logprobs_BT is None or formats_B is None or len(formats_B.unique()) < 2:
        return {}
    tokens, _ = _Tokens.of(prox_logprobs_BT, batch.sampler_logprobs_BT, batch.mask_BT)
    return _metrics(
        tokens,
        tokens.slices("format", formats_B[tokens.row_N], [format.value for format in Format]),
    )


@torch.no_grad()
def mismatch_by_age(
    prox_logprobs_BT: Tensor | None, batch: Batch, version: int
) -> dict[str, float]:
    """Mismatch of fresh tokens (numerics alone), and of older ones (which includes learning).

    `version`: the learner's. Empty where all tokens are fresh: `rollout_corr/kl` etc. are theirs.
    """
    old_BT = batch.token_versions_BT < version
    if prox_logprobs_BT is None or not bool((old_BT & batch.mask_BT).any()):
        return {}
    tokens, counted_BT = _Tokens.of(prox_logprobs_BT, batch.sampler_logprobs_BT, batch.mask_BT)
    return _metrics(tokens, tokens.slices("staleness", old_BT[counted_BT].long(), AGES))


def _metrics(tokens: _Tokens, parts: Iterable[Slice]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for part in parts:
        metrics |= {
            f"rollout_corr/{part.label}/kl": part.kl,
            f"rollout_corr/{part.label}/k3_kl": part.k3_kl,
            f"rollout_corr/{part.label}/logp_abs_diff_mean": part.abs_diff,
            f"rollout_corr/{part.label}/mult_prob_error": part.mult_prob_error,
            f"rollout_corr/{part.label}/token_fraction": part.tokens / len(tokens.d_N),
        }
    return metrics


@dataclass(frozen=True)
class _Tokens:
    """The tokens with a ratio: their d, and the row of each."""

    d_N: Tensor
    row_N: Tensor

    @classmethod
    def of(cls, prox_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> tuple[_Tokens, Tensor]:
        """The tokens, and where they are."""
        d_BT = prox_BT.float() - sampler_BT.float()
        counted_BT = mask_BT.bool() & torch.isfinite(d_BT)
        return cls(d_BT[counted_BT], counted_BT.nonzero()[:, 0]), counted_BT

    def slices(self, by: str, bucket_N: Tensor, names: Sequence[str]) -> Iterator[Slice]:
        for bucket, label in enumerate(names):
            inside_N = bucket_N == bucket
            d = self.d_N[inside_N].double()
            if not len(d):
                continue
            yield Slice(
                by=by,
                label=label,
                tokens=len(d),
                kl=float(-d.mean()),
                k3_kl=float((bounded_exp(d) - 1.0 - d).mean()),
                abs_diff=float(d.abs().mean()),
                mult_prob_error=float(bounded_exp(d.abs()).mean()),
            )


def pooled(parts: Iterable[Slice]) -> list[Slice]:
    """Merge the slices of several batches, cut by cut and ordered by label."""
    groups: dict[tuple[str, str], list[Slice]] = {}
    for part in parts:
        groups.setdefault((part.by, part.label), []).append(part)
    return [
        _pool(groups[key])
        for key in sorted(groups, key=lambda key: (CUTS.index(key[0]), _place(*key)))
    ]


def _pool(parts: Sequence[Slice]) -> Slice:
    tokens = sum(part.tokens for part in parts)
    means = ("kl", "k3_kl", "abs_diff", "mult_prob_error")
    return Slice(
        by=parts[0].by,
        label=parts[0].label,
        tokens=tokens,
        **{
            name: sum(part.tokens * getattr(part, name) for part in parts) / tokens
            for name in means
        },
    )


def _place(by: str, label: str) -> tuple[float, str]:
    """Its place among known labels, or the number that it starts with, if any: `8 to 15` stands
    before `16 to 31`.
    """
    if by in LABELS:
        return LABELS[by].index(label), label
    number = re.match(r"[\d.]+", label)
    return float(number[0]) if number else 0.0, label
