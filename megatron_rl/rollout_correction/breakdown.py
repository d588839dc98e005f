"""Mismatch of a batch by slices: position, probability, length, staleness, finish reason and weight
format; of sessions, also turn, place in the turn, and kind of token. For a step's metrics, and for
reports, which pool them.

A kernel that is wrong for long contexts shows in the position deciles, a quantized head in the
small probabilities, stale weights in the staleness, a stop-token fault in the finish reasons, a
format that does not suit in the weight formats; a cache that is wrong behind text that others wrote
in the later turns and the first tokens of each, a grammar that the engine enforces and does not
report in the tool calls.

Shape legend: N response tokens, B rows, E top tokens at all tokens.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.batch import Batch, Replicas, Share
from megatron_rl.config.schema import Format
from megatron_rl.rollout_correction.metrics import TOP_DIVERGENCES, divergences_N
from megatron_rl.rollout_correction.ratio import as_float, bounded_exp
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.types import Metrics

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
# their groups in a step's metrics: first, middle and last turns
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
    # tokens whose top tokens have the logprobs of both, and means over these
    top_tokens: int = 0
    top_kl: float = 0.0
    top_reverse_kl: float = 0.0
    top_tv: float = 0.0


@torch.no_grad()
def breakdowns(
    prox_logprobs_N: Tensor,
    batch: Batch,
    *,
    finish_reasons: Sequence[str] | None = None,
    policy_version: int | None = None,
    formats: Sequence[str] | None = None,
    top_prox_E: Tensor | None = None,
) -> list[Slice]:
    """Slices with at least one token, ordered by label; tokens without a ratio are left out.

    Staleness is `policy_version` (the newest of the batch where it is None) less the token's
    version.
    """
    share = Share.alone(batch)
    tokens = _Tokens.of(prox_logprobs_N, share, top_prox_E)
    counted_N = tokens.counted_N
    rows = batch.responses
    masked_N = as_float(batch.mask_N)
    lengths_B = rows.sum(masked_N).long()
    order_N = rows.running_sum(masked_N).long() - 1  # a token's place among the row's own tokens

    length_N = rows.at_tokens(lengths_B.clamp(min=1))
    decile_N = (10 * order_N).div(length_N, rounding_mode="floor")
    names = [f"{10 * decile}-{10 * decile + 10} %" for decile in range(10)]
    found = tokens.slices("position", decile_N, names)

    edges = torch.tensor(PROBABILITY_EDGES)
    bucket_N = torch.bucketize(batch.sampler_logprobs_N.float().exp(), edges)
    bounds = ("0", *map(str, PROBABILITY_EDGES), "1")
    found += tokens.slices(
        "probability", bucket_N, [f"{low} to {high}" for low, high in pairwise(bounds)]
    )

    power_N = length_N.double().log2().floor().long()
    names = [f"{2**power} to {2 ** (power + 1) - 1}" for power in range(_count(power_N))]
    found += tokens.slices("length", power_N, names)

    if bool(counted_N.any()):
        versions_N = batch.token_versions_N
        newest = int(versions_N.max()) if policy_version is None else policy_version
        staleness_N = (newest - versions_N).clamp(min=0)
        names = [str(age) for age in range(_count(staleness_N))]
        found += tokens.slices("staleness", staleness_N, names)
    for by, words, least in (("finish", finish_reasons, 1), ("format", formats, 2)):
        names = sorted(set(words or ()))
        if words is not None and len(names) >= least:
            number_B = torch.tensor([names.index(word) for word in words], dtype=torch.int64)
            found += tokens.slices(by, rows.at_tokens(number_B), names)
    for by, bucket_N in _of_sessions(share).items():
        found += tokens.slices(by, bucket_N, LABELS[by])
    return found


def _count(numbers_N: Tensor) -> int:
    """Return the largest number plus one; 0 if there is none."""
    return int(numbers_N.max()) + 1 if len(numbers_N) else 0


def _of_sessions(share: Share) -> dict[str, Tensor]:
    """Each token's place in LABELS; empty without turns. The last turn is its session's, which may
    have several rows.
    """
    batch = share.batch
    table = share.all
    turns = batch.turns
    if turns is None or batch.turns_N is None:
        return {}
    turns_N = batch.turns_N.long()
    last_B = share.everywhere(batch.responses.extreme(turns_N.double(), True).clamp(min=-1))
    if table.samples_B is not None:
        _, session_B = torch.stack([table.groups_B, table.samples_B]).unique(
            dim=1, return_inverse=True
        )
        last_B = torch.zeros_like(last_B).scatter_reduce(0, session_B, last_B, "amax")[session_B]
    last_N = batch.responses.at_tokens(last_B[share.own])
    turn_N = torch.bucketize(turns_N, torch.tensor(TURN_STARTS), right=True)
    turn_N[(turns_N == last_N) & (turns_N > 0)] = len(TURNS) - 1

    order_N = turns.place_N
    place_N = torch.bucketize(order_N, torch.tensor(PLACE_STARTS), right=True)
    ends_N = torch.nn.functional.pad(order_N[1:] == 0, (0, 1), value=True)
    place_N[ends_N & (order_N > 0)] = len(PLACES) - 1
    return {"turn": turn_N, "place": place_N}


@torch.no_grad()
def mismatch_in_sessions(
    prox_logprobs_N: Tensor, share: Share, top_prox_E: Tensor | None = None
) -> Metrics:
    """Mismatch of first, middle and last turns, and of their first and last tokens; empty for
    single responses and for what all tokens have in common.
    """
    found: Metrics = {}
    tokens = _Tokens.of(prox_logprobs_N, share, top_prox_E)
    for by, bucket_N in _of_sessions(share).items():
        last = len(LABELS[by]) - 1
        bucket_N = torch.where(bucket_N == last, 1, torch.where(bucket_N == 0, 0, 2))
        slices = tokens.slices(by, bucket_N, (*SHOWN[by], "")[:3])
        if len(slices) > 1:
            found |= _metrics([one for one in slices if one.label], tokens.count)
    return found


@torch.no_grad()
def mismatch_by_format(
    prox_logprobs_N: Tensor, share: Share, top_prox_E: Tensor | None = None
) -> Metrics:
    """Mismatch of each weight format of a mixed fleet; empty if a single one was used."""
    formats_B = share.all.formats_B
    if formats_B is None or len(formats_B.unique()) < 2:
        return {}
    tokens = _Tokens.of(prox_logprobs_N, share, top_prox_E)
    format_N = share.batch.responses.at_tokens(formats_B[share.own])
    return _metrics(
        tokens.slices("format", format_N, [format.value for format in Format]), tokens.count
    )


@torch.no_grad()
def mismatch_by_age(
    prox_logprobs_N: Tensor, share: Share, version: int, top_prox_E: Tensor | None = None
) -> Metrics:
    """Mismatch of fresh tokens (numerics alone), and of older ones (which includes learning).

    `version`: the learner's. Empty where all tokens are fresh: `rollout_corr/kl` etc. are theirs.
    """
    old_N = share.batch.token_versions_N < version
    if not share.replicas.sum((old_N & share.batch.mask_N).sum()):
        return {}
    tokens = _Tokens.of(prox_logprobs_N, share, top_prox_E)
    return _metrics(tokens.slices("staleness", old_N.long(), AGES), tokens.count)


def _metrics(parts: Iterable[Slice], tokens: int) -> Metrics:
    metrics: Metrics = {}
    for part in parts:
        metrics |= {
            f"rollout_corr/{part.label}/kl": part.kl,
            f"rollout_corr/{part.label}/k3_kl": part.k3_kl,
            f"rollout_corr/{part.label}/logp_abs_diff_mean": part.abs_diff,
            f"rollout_corr/{part.label}/mult_prob_error": part.mult_prob_error,
            f"rollout_corr/{part.label}/token_fraction": part.tokens / tokens,
        }
        if part.top_tokens:
            metrics[f"rollout_corr/{part.label}/top_kl"] = part.top_kl
    return metrics


@dataclass(frozen=True)
class _Tokens:
    """The tokens with a ratio of a replica's rows."""

    counted_N: Tensor  # which they are
    d: Tensor  # float64, of these alone
    top: tuple[Tensor, ...]  # of each with top tokens 1, and divergences
    count: int  # of all replicas
    replicas: Replicas

    @classmethod
    def of(cls, prox_N: Tensor, share: Share, top_prox_E: Tensor | None) -> "_Tokens":
        batch = share.batch
        d_N = prox_N.float() - batch.sampler_logprobs_N.float()
        counted_N = batch.mask_N & torch.isfinite(d_N)
        count = int(share.replicas.sum(counted_N.sum()))
        of_top: Sequence[Tensor] = [torch.zeros_like(d_N)] * (1 + len(TOP_DIVERGENCES))
        if top_prox_E is not None:
            assert batch.top_counts_N is not None and batch.top_logprobs_E is not None
            top = TopLogprobs.of(batch.top_counts_N, batch.top_logprobs_E, top_prox_E)
            of_top = top.usable_N, *divergences_N(top)
        chosen = tuple(one_N[counted_N].double() for one_N in of_top)
        return cls(counted_N, d_N[counted_N].double(), chosen, count, share.replicas)

    def slices(self, by: str, bucket_N: Tensor, names: Sequence[str]) -> list[Slice]:
        """Slices of all replicas' tokens; a bucket without a token is left out."""
        bucket = bucket_N[self.counted_N]
        d = self.d
        inside = (bucket >= 0) & (bucket < len(names))
        of_d = (torch.ones_like(d), -d, bounded_exp(d) - 1.0 - d, d.abs(), bounded_exp(d.abs()))
        values = of_d + self.top
        sums = torch.stack(
            [
                torch.bincount(bucket[inside], weights=one[inside], minlength=len(names))
                for one in values
            ]
        ).double()  # int64 where there is no token
        found = []
        for label, totals in zip(names, self.replicas.sum(sums).t().tolist(), strict=True):
            tokens, *of_tokens = totals[: len(of_d)]
            top_tokens, *of_top = totals[len(of_d) :]
            if tokens:
                means = (total / tokens for total in of_tokens)
                part = Slice(by, label, int(tokens), *means)
                of_names = zip(TOP_DIVERGENCES, of_top, strict=True)
                top_means = {name: total / max(1.0, top_tokens) for name, total in of_names}
                found.append(replace(part, top_tokens=int(top_tokens), **top_means))
        return found


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
    top_tokens = sum(part.top_tokens for part in parts)
    pooled: dict[str, float] = {}
    for name in ("kl", "k3_kl", "abs_diff", "mult_prob_error"):
        pooled[name] = sum(part.tokens * getattr(part, name) for part in parts) / tokens
    for name in TOP_DIVERGENCES:
        total = sum(part.top_tokens * getattr(part, name) for part in parts)
        pooled[name] = total / max(1, top_tokens)
    return Slice(parts[0].by, parts[0].label, tokens, top_tokens=top_tokens, **pooled)


def _place(by: str, label: str) -> tuple[float, str]:
    """Its place among known labels, or the number that it starts with, if any: `8 to 15` stands
    before `16 to 31`.
    """
    if by in LABELS:
        return LABELS[by].index(label), label
    number = re.match(r"[\d.]+", label)
    return float(number[0]) if number else 0.0, label
