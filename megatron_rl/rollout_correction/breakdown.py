"""Mismatch of a batch by slices: position, probability, length, staleness, finish reason and weight format.

A kernel that is wrong for long contexts shows in the position deciles, a quantized head in the small probabilities,
stale weights in the staleness, a stop-token fault in the finish reasons, a format that does not suit in the weight
formats.

Shape legend: B sequences, T response positions, N tokens under the mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.config.schema import Format
from megatron_rl.rollout_correction.ratio import bounded_exp
from megatron_rl.types import Batch

CUTS = ("position", "probability", "length", "staleness", "finish", "format")
AGES = ("fresh", "stale")
PROBABILITY_EDGES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Slice:
    """One part of a batch. `kl` is the plain estimate of KL(sampler || learner), the mean of -d."""

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
) -> list[Slice]:
    """Slices with at least one token, in the order of their labels; tokens without a ratio are left out.

    Staleness is `policy_version` (the newest of the batch where it is None) less the token's version.
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
    names = [f"{2**power} to {2 ** (power + 1) - 1}" for power in range(int(power_B.max()) + 1)] if len(power_B) else []
    found += tokens.slices("length", power_B[tokens.row_N], names)

    if versions_BT is not None and bool(counted_BT.any()):
        versions_N = versions_BT[counted_BT]
        newest = int(versions_N.max()) if policy_version is None else policy_version
        staleness_N = (newest - versions_N).clamp(min=0)
        names = [str(age) for age in range(int(staleness_N.max()) + 1)]
        found += tokens.slices("staleness", staleness_N, names)
    for by, words, least in (("finish", finish_reasons, 1), ("format", formats, 2)):
        names = sorted(set(words or ()))
        if words is not None and len(names) >= least:
            number_B = torch.tensor([names.index(word) for word in words], dtype=torch.int64, device=device)
            found += tokens.slices(by, number_B[tokens.row_N], names)
    return found


@torch.no_grad()
def mismatch_by_format(prox_logprobs_BT: Tensor | None, batch: Batch) -> dict[str, float]:
    """The mismatch of each weight format of a mixed fleet; nothing where one format answered everything."""
    formats_B = batch.formats_B
    if prox_logprobs_BT is None or formats_B is None or len(formats_B.unique()) < 2:
        return {}
    tokens, _ = _Tokens.of(prox_logprobs_BT, batch.sampler_logprobs_BT, batch.mask_BT)
    return _metrics(tokens, tokens.slices("format", formats_B[tokens.row_N], [format.value for format in Format]))


@torch.no_grad()
def mismatch_by_age(prox_logprobs_BT: Tensor | None, batch: Batch, version: int) -> dict[str, float]:
    """The mismatch of fresh tokens, which is numerics alone, and of older ones, which holds what was learned since.

    `version`: the learner's. Nothing where all tokens are fresh: `rollout_corr/kl` and so on are of them then.
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
    """The slices of several batches as those of one, cut by cut and in the order of their labels."""
    groups: dict[tuple[str, str], list[Slice]] = {}
    for part in parts:
        groups.setdefault((part.by, part.label), []).append(part)
    return [_pool(groups[key]) for key in sorted(groups, key=lambda key: (CUTS.index(key[0]), _place(key[1])))]


def _pool(parts: Sequence[Slice]) -> Slice:
    tokens = sum(part.tokens for part in parts)
    means = ("kl", "k3_kl", "abs_diff", "mult_prob_error")
    return Slice(
        by=parts[0].by,
        label=parts[0].label,
        tokens=tokens,
        **{name: sum(part.tokens * getattr(part, name) for part in parts) / tokens for name in means},
    )


def _place(label: str) -> tuple[float, str]:
    """The number that a label starts with, if any: `8 to 15` stands before `16 to 31`."""
    number = re.match(r"[\d.]+", label)
    return float(number[0]) if number else 0.0, label
