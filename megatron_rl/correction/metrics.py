"""What `rollout_corr/` logs about the mismatch and about the weights that were applied.

Shape legend: B sequences, T response positions. Sums are collected slice by slice, in float64 across
slices, and turned into metrics once. Masked positions hold 0 in every tensor that is summed here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.correction.ratio import EXPONENT_LIMIT, LogRatio, bounded_exp

PREFIX = "rollout_corr/"
SMALLEST_SPREAD = 1e-12  # product of two deviations of probabilities; below it is rounding


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _deviation(mean: float, mean_square: float) -> float:
    return math.sqrt(max(0.0, mean_square - mean * mean))


def outside_penalty(mask_float_BT: Tensor) -> Tensor:
    """0 inside the mask and infinite outside: added, it keeps padding out of a minimum."""
    return mask_float_BT.reciprocal().sub_(1.0)


def extremes(values_BT: Tensor, penalty_BT: Tensor) -> tuple[float, float]:
    """Smallest and largest value inside; (inf, -inf) where there is none. `values_BT` is finite throughout."""
    if values_BT.numel() == 0:
        return math.inf, -math.inf
    return float((values_BT + penalty_BT).amin()), float((values_BT - penalty_BT).amax())


class MismatchSums:
    """Everything that describes p against mu, whatever weights are chosen."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.sums: Tensor | None = None
        # of |d|, rho - 1, |gap| and both probabilities: their means in the first slice that holds a token
        self.pivots: list[float] = []
        self.low, self.high = math.inf, -math.inf
        self.prob_high = 0.0
        self.d_B = torch.zeros(rows, device=device)
        self.prox_B = torch.zeros(rows, device=device)
        self.counted_B = torch.zeros(rows, device=device)
        self.sampler_faults = 0
        self.learner_faults = 0

    def add(self, rows: slice, ratio: LogRatio, prox_logprobs_BT: Tensor) -> None:
        self.sampler_faults += ratio.sampler_faults
        self.learner_faults += ratio.learner_faults
        mask_BT = ratio.counted_float_BT
        prox_BT = prox_logprobs_BT.float().nan_to_num(0.0, 0.0, 0.0).mul_(mask_BT)
        self.counted_B[rows] = ratio.counts_B1[:, 0]
        self.d_B[rows] = ratio.sums_B1[:, 0]
        self.prox_B[rows] = prox_BT.sum(dim=1)

        low, high = extremes(ratio.d_BT, outside_penalty(mask_BT))
        self.low, self.high = min(self.low, low), max(self.high, high)

        d = ratio.d_BT.reshape(-1)
        absolute = d.abs()
        excess = d.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).expm1_()  # rho - 1, exact where rho is near 1
        rho = ratio.rho_BT.reshape(-1)
        inverse = rho.reciprocal()
        error = torch.maximum(rho, inverse).sub_(1.0)  # exp|d| - 1
        prob = bounded_prob(prox_BT, mask_BT)
        # exp(mu) comes from p and d, which are defined wherever p is; without a second exp where rho is not clamped
        clamped = max(-low, high) > EXPONENT_LIMIT
        sampler_prob = bounded_prob(prox_BT - ratio.d_BT, mask_BT) if clamped else prob * inverse
        absolute_gap = (prob - sampler_prob).abs_()
        self.prob_high = max(self.prob_high, float(absolute_gap.amax()) if absolute_gap.numel() else 0.0)
        measured = (absolute, excess, absolute_gap, prob, sampler_prob)
        totals = [values.sum() for values in measured]
        mask = mask_BT.reshape(-1)
        if not self.pivots:
            tokens = float(mask.sum())
            if tokens == 0.0:
                return
            self.pivots = (torch.stack(totals) / tokens).tolist()
        # squares about the mean: a spread that is small beside it would be lost in a plain sum of squares
        centred = [values.add_(mask, alpha=-pivot) for values, pivot in zip(measured, self.pivots, strict=True)]
        squares = [torch.dot(values, values) for values in centred]
        sums = torch.stack([d.sum(), error.sum(), *totals, *squares, torch.dot(centred[3], centred[4])]).double()
        self.sums = sums if self.sums is None else self.sums + sums

    def metrics(self) -> dict[str, float]:
        n = float(self.counted_B.sum())
        sums = [0.0] * 13 if self.sums is None else self.sums.tolist()
        d, error, absolute, excess, gap, prob, sampler_prob, *squares, both = (_ratio(x, n) for x in sums)
        means = (absolute, excess, gap, prob, sampler_prob)
        shifts = [mean - pivot for mean, pivot in zip(means, self.pivots or means, strict=True)]
        deviations = [_deviation(shift, square) for shift, square in zip(shifts, squares, strict=True)]
        any_token = n > 0
        spread = deviations[3] * deviations[4]
        correlation = (both - shifts[3] * shifts[4]) / spread if spread > SMALLEST_SPREAD else 0.0
        found = {
            "kl": -d,
            "k3_kl": excess - d,
            "chi2_token": deviations[1] ** 2 + excess * excess + 2.0 * excess,
            "rho_mean": 1.0 + excess if any_token else 0.0,
            "rho_std": deviations[1],
            "rho_min": math.exp(max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, self.low))) if any_token else 0.0,
            "rho_max": math.exp(max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, self.high))) if any_token else 0.0,
            "logp_abs_diff_mean": absolute,
            "logp_abs_diff_max": max(abs(self.low), abs(self.high)) if any_token else 0.0,
            "logp_abs_diff_std": deviations[0],
            "mult_prob_error": 1.0 + error if any_token else 0.0,
            "probs_diff_mean": gap,
            "probs_diff_max": self.prob_high,
            "probs_diff_std": deviations[2],
            "probs_pearson_corr": max(-1.0, min(1.0, correlation)),
            "non_finite_sampler": float(self.sampler_faults),
            "non_finite_learner": float(self.learner_faults),
        }
        return {PREFIX + name: value for name, value in (found | self._row_metrics()).items()}

    def _row_metrics(self) -> dict[str, float]:
        """Perplexities and the product ratio, averaged over rows that hold a token."""
        filled_B = self.counted_B > 0
        rows = float(filled_B.sum())
        n_B = self.counted_B.clamp(min=1)
        prox_B = self.prox_B / n_B
        d_B = self.d_B / n_B

        def mean(values_B: Tensor) -> float:
            return _ratio(float((values_B * filled_B).sum(dtype=torch.float64)), rows)

        return {
            "training_ppl": mean(bounded_exp(-prox_B)),
            "rollout_ppl": mean(bounded_exp(d_B - prox_B)),
            "log_ppl_diff": mean(-d_B),
            "log_ppl_abs_diff": mean(d_B.abs()),
            "ppl_ratio": mean(bounded_exp(-d_B)),
            "chi2_seq": mean(bounded_exp(self.d_B).square()) - (1.0 if rows else 0.0),
        }


def bounded_prob(logprobs_BT: Tensor, mask_float_BT: Tensor) -> Tensor:
    """Probabilities as a flat tensor, 0 outside the mask. Only their upper end needs a bound."""
    return logprobs_BT.clamp(max=EXPONENT_LIMIT).exp_().mul_(mask_float_BT).reshape(-1)


class WeightSums:
    """What was applied, at kept tokens; with `level: none`, the raw ratio, so that the ESS still speaks."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.pivot: float | None = None
        self.low, self.high = math.inf, -math.inf
        self.units = self.above = self.below = 0.0
        self.unit_total = 0.0
        self.kept_tokens = self.before_tokens = self.before_rows = self.touched_rows = 0.0
        self.kept = 0

    def add(self, weights_BT: Tensor, kept_float_BT: Tensor) -> None:
        """`weights_BT` is 0 where `kept_float_BT` is."""
        kept = int(kept_float_BT.sum(dtype=torch.float64))
        if kept == 0:
            return
        self.kept += kept
        low, high = extremes(weights_BT, outside_penalty(kept_float_BT))
        self.low, self.high = min(self.low, low), max(self.high, high)
        flat = weights_BT.reshape(-1)
        total = flat.sum()
        if self.pivot is None:
            self.pivot = float(total) / kept
        centred = torch.add(flat, kept_float_BT.reshape(-1), alpha=-self.pivot)
        sums = torch.stack([total, torch.dot(flat, flat), torch.dot(centred, centred)]).double()
        self.sums = sums if self.sums is None else self.sums + sums

    @property
    def token_mean(self) -> float:
        return 0.0 if self.sums is None else _ratio(float(self.sums[0]), self.kept)

    @property
    def unit_mean(self) -> float:
        return _ratio(self.unit_total, self.units)

    def add_units(self, raw: Tensor, bounded: Tensor, kept_float: Tensor, low: float, high: float) -> None:
        """Tokens or, for sequence weights, rows: what the bounds and the normalisation act on."""
        raw, kept = raw.reshape(-1), kept_float.reshape(-1)
        self.units += float(kept.sum())
        self.unit_total += float(torch.dot(bounded.reshape(-1), kept))
        # a comparison written as float32 is summed without converting bools
        beyond = torch.empty_like(raw)
        self.above += float(torch.dot(torch.gt(raw, high, out=beyond), kept))
        self.below += float(torch.dot(torch.lt(raw, low, out=beyond), kept))

    def add_rejections(self, before_B: Tensor, kept_B: Tensor) -> None:
        """Tokens per row before and after the rules."""
        self.kept_tokens += float(kept_B.sum(dtype=torch.float64))
        self.before_tokens += float(before_B.sum(dtype=torch.float64))
        self.before_rows += float((before_B > 0).sum())
        self.touched_rows += float((kept_B < before_B).sum())

    def metrics(self, scale: float = 1.0) -> dict[str, float]:
        """`scale`: what the weights were multiplied by after the sums were taken."""
        total, square, centred = [0.0] * 3 if self.sums is None else self.sums.tolist()
        n = self.kept
        shift = _ratio(total, n) - (self.pivot or 0.0)
        found = {
            "rollout_is_mean": scale * _ratio(total, n),
            "rollout_is_std": scale * _deviation(shift, _ratio(centred, n)),
            "rollout_is_min": scale * self.low if n else 0.0,
            "rollout_is_max": scale * self.high if n else 0.0,
            "rollout_is_eff_sample_size": min(1.0, _ratio(total * total, n * square)),
            "rollout_is_ratio_fraction_high": _ratio(self.above, self.units),
            "rollout_is_ratio_fraction_low": _ratio(self.below, self.units),
            "rollout_rs_masked_fraction": 1.0 - self.kept_tokens / self.before_tokens if self.before_tokens else 0.0,
            "rollout_rs_seq_masked_fraction": _ratio(self.touched_rows, self.before_rows),
        }
        return {PREFIX + name: value for name, value in found.items()}
