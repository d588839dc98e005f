"""Passes over a batch that `correction.py` puts in order: log-ratios, reject rules, budgets, the
cap, weights, metrics.

Shape legend: B sequences, T response positions.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.config.schema import CorrectionConfig, Level, Stat, WeightConfig
from megatron_rl.rollout_correction.metrics import PREFIX, MismatchSums, WeightSums
from megatron_rl.rollout_correction.ratio import LogRatio, as_float, log_ratio, row_chunks
from megatron_rl.rollout_correction.rules import budget_cutoff, judged, stat_of, violations
from megatron_rl.rollout_correction.weights import (
    Weighted,
    bound,
    fraction_bounds,
    raw_ratio,
    solve_cap,
    units,
)


@dataclass(frozen=True)
class Source:
    """Inputs of a correction: references, no copies. `prox` is None if the loss computes it."""

    prox_logprobs_BT: Tensor | None
    sampler_logprobs_BT: Tensor
    mask_BT: Tensor
    turns_BT: Tensor | None = None

    def ratio(
        self, rows: slice, config: CorrectionConfig, out_BT: Tensor | None = None
    ) -> LogRatio:
        assert self.prox_logprobs_BT is not None
        if out_BT is None:
            out_BT = torch.empty(
                self.mask_BT[rows].shape, dtype=torch.float32, device=self.mask_BT.device
            )
        prox_BT = self.prox_logprobs_BT[rows]
        sampler_BT = self.sampler_logprobs_BT[rows]
        turns_BT = None if self.turns_BT is None else self.turns_BT[rows]
        return log_ratio(
            prox_BT, sampler_BT, self.mask_BT[rows], config.non_finite, out_BT, turns_BT
        )


class BatchWork:
    """Intermediate state of a correction. `weights_BT` holds d until `weigh` replaces it."""

    def __init__(self, source: Source, config: CorrectionConfig) -> None:
        self.source = source
        self.config = config
        mask_BT = source.mask_BT
        self.weights_BT = torch.empty(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
        self.kept_BT = torch.empty_like(mask_BT)
        self.stays_BT = torch.empty_like(mask_BT)
        self.ratios: dict[int, LogRatio] = {}
        self.mismatch = MismatchSums(len(mask_BT), mask_BT.device)
        self.applied = WeightSums()
        self.cap = config.weight.high
        rules = [
            rule for rule in config.reject if rule.when is None and rule.stat != Stat.staleness
        ]
        self.bounded_rules = [rule for rule in rules if rule.budget is None]
        self.budget_rules = [rule for rule in rules if rule.budget is not None]
        self.needs_all_rows = bool(self.budget_rules) or config.weight.target_ess is not None

    def observe(self, rows: slice) -> None:
        """Compute the log-ratio of some rows, their mismatch sums, and the rules with bounds."""
        ratio = self.source.ratio(rows, self.config, out_BT=self.weights_BT[rows])
        kept_BT = ratio.stays_BT
        for rule in self.bounded_rules:
            kept_BT = kept_BT & ~violations(rule, ratio)
        self.kept_BT[rows] = kept_BT
        self.stays_BT[rows] = ratio.stays_BT
        self.mismatch.add(rows, ratio)
        # without what it has derived
        self.ratios[rows.start] = replace(ratio) if self.needs_all_rows else ratio

    def apply_budgets(self) -> None:
        """Apply rules with a budget to the statistic of the whole batch before any rule masked."""
        for rule in self.budget_rules:
            assert rule.budget is not None
            pieces = [stat_of(rule, ratio)[judged(rule, ratio)] for ratio in self.ratios.values()]
            if pieces:
                cutoff = budget_cutoff(torch.cat(pieces), rule.budget)
            else:
                cutoff = 0.0
            for rows in row_chunks(self.kept_BT):
                ratio = self.ratios[rows.start]
                beyond = (stat_of(rule, ratio) >= cutoff) & judged(rule, ratio)
                self.kept_BT[rows] &= ~ratio.at_tokens(rule.level, beyond)

    def solve_target(self) -> None:
        if self.config.weight.target_ess is None:
            return
        parts = []
        kept = 0
        for rows in row_chunks(self.kept_BT):
            ratio = self.ratios[rows.start]
            kept_BT = self.kept_BT[rows]
            weighed_BT = kept_BT & ratio.counted_BT
            ones = 0
            if ratio.one_BT is not None:
                ones = int((ratio.one_BT & kept_BT).sum())
                weighed_BT = weighed_BT & ~ratio.one_BT
            grouped = self.config.weight.level in (Level.sequence, Level.turn)
            if grouped:
                tokens = ratio.sums(self.config.weight.level, weighed_BT.float())
            else:
                tokens = weighed_BT
            parts.append(Weighted(raw_ratio(self.config.weight, ratio), tokens, ones))
            kept += int(kept_BT.sum())
        self.cap = solve_cap(parts, self.config.weight, kept)

    def weigh(self, rows: slice) -> None:
        ratio = self.ratios.pop(rows.start)
        weigh_rows(
            self.config.weight,
            ratio,
            self.kept_BT[rows],
            self.cap,
            self.weights_BT[rows],
            self.applied,
        )

    def finish(self) -> dict[str, float]:
        """The weights normalized, and what there is to log."""
        scale = normalize_(self.weights_BT, self.config.weight, self.applied)
        metrics = self.mismatch.metrics() | self.applied.metrics(scale)
        if self.config.weight.target_ess is not None and self.cap is not None:
            metrics[PREFIX + "cap"] = self.cap
        return metrics


def weigh_rows(
    config: WeightConfig,
    ratio: LogRatio,
    kept_BT: Tensor,
    cap: float | None,
    out_BT: Tensor,
    applied: WeightSums,
) -> None:
    """Bounded weights of some rows into `out_BT`, which may be the memory of `ratio.d_BT`."""
    raw = raw_ratio(config, ratio)
    bounded = bound(config, raw, cap)
    kept_float_BT = as_float(kept_BT)
    kept_B1 = kept_float_BT.sum(dim=1, keepdim=True)
    applied.add_rows(ratio.stays_B1, kept_B1)
    applied.add_units(
        raw, bounded, units(config, ratio, kept_float_BT), *fraction_bounds(config, cap)
    )
    if config.level == Level.none:
        measured_BT = kept_float_BT * ratio.counted_float_BT
        applied.add(raw * measured_BT, measured_BT)
    apply_weights(config, ratio, bounded, kept_BT, out_BT)
    if config.level != Level.none:
        applied.add(out_BT, kept_float_BT)


def apply_weights(
    config: WeightConfig, ratio: LogRatio, bounded: Tensor, kept_BT: Tensor, out_BT: Tensor
) -> Tensor:
    """Write weights of kept tokens to `out_BT`, 0 elsewhere, from bounded ratios of the level."""
    torch.mul(ratio.at_tokens(config.level, bounded), as_float(kept_BT), out=out_BT)
    ratio.fix_weights_(out_BT, kept_BT)
    return out_BT


def normalize_(weights_BT: Tensor, config: WeightConfig, applied: WeightSums) -> float:
    """Divide by the mean weight over kept tokens, or rows or turns with one. Return the factor."""
    if not config.normalize or config.level == Level.none:
        return 1.0
    if config.level in (Level.sequence, Level.turn):
        mean = applied.unit_mean
    else:
        mean = applied.token_mean
    if mean == 0.0:
        return 1.0
    weights_BT.div_(mean)
    return 1.0 / mean


def weigh_again(
    source: Source,
    weights_BT: Tensor,
    kept_BT: Tensor,
    cap: float | None,
    config: CorrectionConfig,
) -> dict[str, float]:
    """Weights of fewer tokens into `weights_BT`, under the same cap. Returns the metrics
    that describe them.
    """
    applied = WeightSums()
    for rows in row_chunks(kept_BT):
        weigh_rows(
            config.weight,
            source.ratio(rows, config),
            kept_BT[rows],
            cap,
            weights_BT[rows],
            applied,
        )
    return applied.metrics(normalize_(weights_BT, config.weight, applied))


def weight_quality(
    source: Source,
    weights_BT: Tensor,
    mask_BT: Tensor,
    advantages_B: Tensor,
    config: CorrectionConfig,
) -> dict[str, float]:
    """Cost of bounding the weights: the shift of mean(w A), and the variance of that mean."""
    total = torch.zeros(3, dtype=torch.float64, device=advantages_B.device)
    kept = int(mask_BT.sum())
    for rows in row_chunks(mask_BT):
        kept_BT = mask_BT[rows]
        applied_BT = weights_BT[rows]
        ratio = source.ratio(rows, config)
        raw = ratio.at_tokens(config.weight.level, raw_ratio(config.weight, ratio))
        advantages = advantages_B[rows].double()
        weighted_B = applied_BT.sum(dim=1).double() * advantages
        square_B = (
            torch.linalg.vector_norm(applied_BT, dim=1).double().square() * advantages.square()
        )
        raw_B = (raw * kept_BT).sum(dim=1).double() * advantages
        total += torch.stack([weighted_B.sum(), square_B.sum(), raw_B.sum()])
    n = max(1, kept)
    weighted, square, raw_mean = (value / n for value in total.tolist())
    return {
        PREFIX + "weight_bias": weighted - raw_mean,
        PREFIX + "weight_variance": max(0.0, square - weighted * weighted) / n,
    }
