"""rollout_correction: from two policies' logprobs to importance weights, a mask, and what to log.

The sampler that wrote a response (mu) and the learner that trains on it (p) disagree about every
token's probability. With d = p - mu and rho = exp(d) this module
1. decides what happens to tokens without a ratio (`non_finite`),
2. rejects tokens and sequences by rules on d (`reject`),
3. weighs what is left (`weight`),
4. measures the disagreement (`metrics`, all under `rollout_corr/`).

It is pure: no distributed state, the caller hands over the global batch. Rows are worked on in slices
that fit a core's cache; only `budget`, `target_ess` and `normalize` look at all of them together.
The statistics are in `correction/rules.py`, the weights in `correction/weights.py`, the metrics in
`correction/metrics.py`; `docs/corrections.md` explains how to choose.

Shape legend: B sequences, T response positions (right-padded).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.correction.metrics import PREFIX, MismatchSums, WeightSums
from megatron_rl.correction.ratio import LogRatio, as_float, filled, log_ratio, row_chunks
from megatron_rl.correction.rules import budget_cutoff, judged_BT, stat_of, violations
from megatron_rl.correction.weights import Weighted, bound, fraction_bounds, raw_ratio, solve_cap
from megatron_rl.schema import Anchor, CorrectionConfig, Level, RejectRule, WeightConfig

__all__ = [
    "Correction",
    "CorrectionConfig",
    "RejectRule",
    "WeightConfig",
    "apply_conditional_rules",
    "keep_rows",
    "rollout_correction",
]


@dataclass(frozen=True)
class Source:
    """What a correction was made from: references, no copies. `prox` is None before an anchor-sampler loss."""

    prox_logprobs_BT: Tensor | None
    sampler_logprobs_BT: Tensor
    mask_BT: Tensor

    def ratio(self, rows: slice, config: CorrectionConfig, out_BT: Tensor | None = None) -> LogRatio:
        assert self.prox_logprobs_BT is not None
        if out_BT is None:
            out_BT = torch.empty(self.mask_BT[rows].shape, dtype=torch.float32, device=self.mask_BT.device)
        prox_BT, sampler_BT = self.prox_logprobs_BT[rows], self.sampler_logprobs_BT[rows]
        return log_ratio(prox_BT, sampler_BT, self.mask_BT[rows], config.non_finite, out_BT)


@dataclass(frozen=True)
class Correction:
    """`weights_BT` is 0 where `mask_BT` is false; `denominator_mask_BT` is what reductions count."""

    weights_BT: Tensor  # float32, detached
    mask_BT: Tensor  # bool: tokens that are trained on
    denominator_mask_BT: Tensor  # bool
    metrics: dict[str, float]
    rejected_B: Tensor  # bool: rows that had a response token and lost all to the unconditional rules
    source: Source

    def baseline_keep_B(self, config: CorrectionConfig) -> Tensor:
        """Rows that count in their group's baseline: the `keep_N` to hand to `group_advantages`.

        With `rebaseline`, only rows that are trained on: neither the rejected ones, nor those whose mask
        was empty before (truncated answers under reward.overlong_filter).
        """
        return filled(self.mask_BT) if config.rebaseline else torch.ones_like(self.rejected_B)


@torch.no_grad()
def rollout_correction(
    prox_logprobs_BT: Tensor | None, sampler_logprobs_BT: Tensor, mask_BT: Tensor, config: CorrectionConfig
) -> Correction:
    """Weights, mask and metrics for the global batch.

    With `anchor: sampler` there is no proximal policy before the loss: hand over None here, and give
    `config` to `policy_loss`, which finishes the correction from the policy's own logprobs.
    """
    source = Source(prox_logprobs_BT, sampler_logprobs_BT, mask_BT.bool())
    if prox_logprobs_BT is None:
        return _without_prox(source, config)
    work = _Work(source, config)
    for rows in row_chunks(source.mask_BT):
        work.observe(rows)
        if not work.needs_all_rows:
            work.weigh(rows)
    if work.needs_all_rows:
        work.apply_budgets()
        work.solve_cap()
        for rows in row_chunks(source.mask_BT):
            work.weigh(rows)
    return work.result()


class _Work:
    """One batch on its way through the correction. `weights_BT` holds d until `weigh` replaces it."""

    def __init__(self, source: Source, config: CorrectionConfig) -> None:
        self.source, self.config = source, config
        mask_BT = source.mask_BT
        self.weights_BT = torch.empty(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
        self.kept_BT = torch.empty_like(mask_BT)
        self.stays_BT = torch.empty_like(mask_BT)
        self.ratios: dict[int, LogRatio] = {}
        self.mismatch = MismatchSums(len(mask_BT), mask_BT.device)
        self.applied = WeightSums()
        self.cap = config.weight.high
        rules = [rule for rule in config.reject if rule.when is None]
        self.bounded_rules = [rule for rule in rules if rule.budget is None]
        self.budget_rules = [rule for rule in rules if rule.budget is not None]
        self.needs_all_rows = bool(self.budget_rules) or config.weight.target_ess is not None

    def observe(self, rows: slice) -> None:
        """The log-ratio of some rows, what it says about the mismatch, and the rules with bounds."""
        ratio = self.source.ratio(rows, self.config, out_BT=self.weights_BT[rows])
        kept_BT = ratio.stays_BT
        for rule in self.bounded_rules:
            kept_BT = kept_BT & ~violations(rule, ratio)
        self.kept_BT[rows], self.stays_BT[rows] = kept_BT, ratio.stays_BT
        assert self.source.prox_logprobs_BT is not None
        self.mismatch.add(rows, ratio, self.source.prox_logprobs_BT[rows])
        self.ratios[rows.start] = ratio.without_cache() if self.needs_all_rows else ratio

    def apply_budgets(self) -> None:
        """Rules with a budget look at the statistic of the whole batch, before any rule has masked anything."""
        for rule in self.budget_rules:
            assert rule.budget is not None
            pieces = [stat_of(rule, ratio)[judged_BT(rule, ratio)] for ratio in self.ratios.values()]
            cutoff = budget_cutoff(torch.cat(pieces), rule.budget) if pieces else 0.0
            for rows in row_chunks(self.kept_BT):
                ratio = self.ratios[rows.start]
                self.kept_BT[rows] &= ~((stat_of(rule, ratio) >= cutoff) & judged_BT(rule, ratio))

    def solve_cap(self) -> None:
        if self.config.weight.target_ess is None:
            return
        parts, kept = [], 0
        for rows in row_chunks(self.kept_BT):
            ratio, kept_BT = self.ratios[rows.start], self.kept_BT[rows]
            weighed_BT = kept_BT & ratio.counted_BT
            ones = 0
            if ratio.one_BT is not None:
                ones = int((ratio.one_BT & kept_BT).sum())
                weighed_BT = weighed_BT & ~ratio.one_BT
            per_row = self.config.weight.level == Level.sequence
            tokens = weighed_BT.sum(dim=1, keepdim=True) if per_row else weighed_BT
            parts.append(Weighted(raw_ratio(self.config.weight, ratio), tokens, ones))
            kept += int(kept_BT.sum())
        self.cap = solve_cap(parts, self.config.weight, kept)

    def weigh(self, rows: slice) -> None:
        ratio = self.ratios.pop(rows.start)
        _weigh(self.config.weight, ratio, self.kept_BT[rows], self.cap, self.weights_BT[rows], self.applied)

    def result(self) -> Correction:
        metrics = self.mismatch.metrics()
        scale = _normalize_(self.weights_BT, self.config.weight, self.applied)
        metrics |= self.applied.metrics(scale)
        if self.config.weight.target_ess is not None and self.cap is not None:
            metrics[PREFIX + "cap"] = self.cap
        # never the memory of the mask: whoever changes one means that one
        denominator_BT = self.stays_BT.copy_(self.kept_BT) if self.config.renormalize else self.stays_BT
        rejected_B = filled(self.source.mask_BT) & ~filled(self.kept_BT)
        return Correction(self.weights_BT, self.kept_BT, denominator_BT, metrics, rejected_B, self.source)


def _weigh(
    config: WeightConfig, ratio: LogRatio, kept_BT: Tensor, cap: float | None, out_BT: Tensor, applied: WeightSums
) -> None:
    """Bounded weights of some rows into `out_BT`, which may be the memory of `ratio.d_BT`."""
    raw = raw_ratio(config, ratio)
    bounded = bound(config, raw, cap)
    kept_float_BT = as_float(kept_BT)
    kept_B1 = kept_float_BT.sum(dim=1, keepdim=True)
    applied.add_rows(ratio.stays_B1, kept_B1)
    units = (kept_B1 > 0).float() if config.level == Level.sequence else kept_float_BT
    applied.add_units(raw, bounded, units, *fraction_bounds(config, cap))
    if config.level == Level.none:
        measured_BT = kept_float_BT * ratio.counted_float_BT
        applied.add(raw * measured_BT, measured_BT)
    torch.mul(bounded, kept_float_BT, out=out_BT)
    ratio.fix_weights_(out_BT, kept_BT)
    if config.level != Level.none:
        applied.add(out_BT, kept_float_BT)


def _normalize_(weights_BT: Tensor, config: WeightConfig, applied: WeightSums) -> float:
    """Divide by the mean weight: over kept tokens, or over rows with a kept token. Returns the factor."""
    if not config.normalize or config.level == Level.none:
        return 1.0
    mean = applied.unit_mean if config.level == Level.sequence else applied.token_mean
    if mean == 0.0:
        return 1.0
    weights_BT.div_(mean)
    return 1.0 / mean


def _without_prox(source: Source, config: CorrectionConfig) -> Correction:
    """`anchor: sampler` before the loss: only the sampler's own faults can be judged."""
    if config.anchor != Anchor.sampler:
        raise ValueError("correction.anchor is prox, which needs the learner's logprobs; they are None")
    weights_BT = torch.empty(source.mask_BT.shape, dtype=torch.float32, device=source.mask_BT.device)
    stays_BT = torch.empty_like(source.mask_BT)
    faults = 0
    for rows in row_chunks(source.mask_BT):
        sampler_BT = source.sampler_logprobs_BT[rows]
        zeros_BT = torch.zeros_like(sampler_BT)
        ratio = log_ratio(zeros_BT, sampler_BT, source.mask_BT[rows], config.non_finite, weights_BT[rows])
        stays_BT[rows] = ratio.stays_BT
        weights_BT[rows] = ratio.counted_BT.float()
        faults += ratio.sampler_faults
    rejected_B = filled(source.mask_BT) & ~filled(stays_BT)
    metrics = {PREFIX + "non_finite_sampler": float(faults)}
    return Correction(weights_BT, stays_BT, stays_BT.clone(), metrics, rejected_B, source)


@torch.no_grad()
def keep_rows(correction: Correction, keep_B: Tensor, config: CorrectionConfig) -> Correction:
    """Rows that the advantages could not use (a group with one survivor) leave like rejected ones."""
    return _narrow(correction, correction.mask_BT & keep_B.bool()[:, None], config)


@torch.no_grad()
def apply_conditional_rules(correction: Correction, advantages_B: Tensor, config: CorrectionConfig) -> Correction:
    """Rules with `when: negative_advantage`, once the advantages are known; they move no baseline.

    Adds `weight_bias` and `weight_variance`, which need the advantages too.
    """
    if correction.source.prox_logprobs_BT is None:
        return correction
    rules = [rule for rule in config.reject if rule.when is not None]
    kept_BT = correction.mask_BT
    if rules:
        kept_BT = kept_BT.clone()
        negative_B1 = (advantages_B < 0)[:, None]
        for rows in row_chunks(kept_BT):
            ratio = correction.source.ratio(rows, config)
            for rule in rules:
                kept_BT[rows] &= ~(violations(rule, ratio) & negative_B1[rows])
    correction = _narrow(correction, kept_BT, config)
    return replace(correction, metrics=correction.metrics | _weight_quality(correction, advantages_B, config))


def _narrow(correction: Correction, kept_BT: Tensor, config: CorrectionConfig) -> Correction:
    """The same correction on fewer tokens, with everything that depends on the survivors brought up to date."""
    gone_BT = correction.mask_BT & ~kept_BT
    gone = int(gone_BT.sum())
    if gone == 0:
        return correction
    denominator_BT = correction.denominator_mask_BT
    weights_BT = correction.weights_BT.masked_fill(gone_BT, 0.0)
    metrics = dict(correction.metrics)
    if correction.source.prox_logprobs_BT is not None:
        applied = WeightSums()
        cap = correction.metrics.get(PREFIX + "cap", config.weight.high)
        for rows in row_chunks(kept_BT):
            ratio = correction.source.ratio(rows, config)
            _weigh(config.weight, ratio, kept_BT[rows], cap, weights_BT[rows], applied)
        scale = _normalize_(weights_BT, config.weight, applied)
        metrics |= applied.metrics(scale)
    return replace(
        correction,
        weights_BT=weights_BT,
        mask_BT=kept_BT,
        denominator_mask_BT=denominator_BT & ~gone_BT if config.renormalize else denominator_BT,
        metrics=metrics,
    )


def _weight_quality(correction: Correction, advantages_B: Tensor, config: CorrectionConfig) -> dict[str, float]:
    """What bounding the weights costs: the shift of mean(w A), and the variance of that mean."""
    total = torch.zeros(3, dtype=torch.float64, device=advantages_B.device)
    kept = int(correction.mask_BT.sum())
    for rows in row_chunks(correction.mask_BT):
        kept_BT, weights_BT = correction.mask_BT[rows], correction.weights_BT[rows]
        raw = raw_ratio(config.weight, correction.source.ratio(rows, config))
        advantages = advantages_B[rows].double()
        weighted_B = weights_BT.sum(dim=1).double() * advantages
        square_B = torch.linalg.vector_norm(weights_BT, dim=1).double().square() * advantages.square()
        raw_B = (raw * kept_BT).sum(dim=1).double() * advantages
        total += torch.stack([weighted_B.sum(), square_B.sum(), raw_B.sum()])
    n = max(1, kept)
    weighted, square, raw_mean = (value / n for value in total.tolist())
    return {
        PREFIX + "weight_bias": weighted - raw_mean,
        PREFIX + "weight_variance": max(0.0, square - weighted * weighted) / n,
    }
