"""Metrics under `rollout_corr/`: the mismatch of sampler and learner, and the weights applied,
summed slice by slice.

Shape legend: B sequences, T response positions. Sums are collected slice by slice, in float64
across slices. Masked positions hold 0 in every tensor that is summed here.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT, LogRatio, bounded_exp, ends_of

PREFIX = "rollout_corr/"
MASKED_FRACTION = PREFIX + "rollout_rs_masked_fraction"
OUTSIDE_SUPPORT = PREFIX + "outside_support"
KEPT_LOG_MASS = PREFIX + "kept_log_mass"
# whose products MismatchSums needs: each quantity with itself, and the two probabilities
PAIRS = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (3, 4))
SMALLEST_SPREAD = 1e-12  # product of two deviations of probabilities; below it is rounding


def _ratio(numerator: float, denominator: float) -> float:
    if denominator:
        return numerator / denominator
    return 0.0


class Moments:
    """Means and products of deviations, merged slice by slice so that nothing large cancels.

    A plain float32 sum of squares loses a variance that is small beside the mean.
    """

    def __init__(self, quantities: int) -> None:
        self.n = 0.0
        self.means = [0.0] * quantities
        self.products: defaultdict[tuple[int, int], float] = defaultdict(float)

    def merge(
        self, n: float, means: Sequence[float], products: Mapping[tuple[int, int], float]
    ) -> None:
        share = n / (self.n + n)
        gaps = [new - old for new, old in zip(means, self.means, strict=True)]
        for (i, j), value in products.items():
            self.products[i, j] += value + self.n * share * gaps[i] * gaps[j]
        self.means = [old + share * gap for old, gap in zip(self.means, gaps, strict=True)]
        self.n += n

    def covariance(self, i: int, j: int) -> float:
        return _ratio(self.products[i, j], self.n)

    def deviation(self, i: int) -> float:
        return math.sqrt(self.covariance(i, i))


def extremes(
    values_BT: Tensor, mask_float_BT: Tensor, ends: tuple[float, float]
) -> tuple[float, float]:
    """Smallest and largest value inside; (inf, -inf) where there is none. `values_BT` is finite,
    and 0 outside.

    `ends`: the smallest and largest of all.
    """
    if values_BT.numel() == 0:
        return math.inf, -math.inf
    low, high = ends
    # an extreme on its own side of 0 is none of the zeros outside; the other kind is looked for
    # again with a penalty that is 0 inside and infinite outside
    if low >= 0.0:
        low = float(mask_float_BT.reciprocal().sub_(1.0).add_(values_BT).amin())
    if high <= 0.0:
        high = float(mask_float_BT.reciprocal().sub_(1.0).sub_(values_BT).amin().neg())
    return low, high


def token_sums(ratio: LogRatio) -> dict[str, Tensor]:
    """Sums over tokens with a ratio, on the device; additive over micro-batches."""
    d_BT = ratio.d_BT
    excess_BT = ratio.bounded_d_BT.expm1()
    counted_BT = ratio.counted_float_BT
    error_BT = torch.maximum(ratio.rho_BT, ratio.inverse_BT)
    prob_BT, sampler_prob_BT = ratio.probabilities()
    values = {
        "kl": -d_BT,
        "logp_diff_mean": d_BT,
        "k3_kl": excess_BT - d_BT,
        "chi2_token": excess_BT * (excess_BT + 2.0),
        "rho_mean": ratio.rho_BT * counted_BT,
        "mult_prob_error": error_BT * counted_BT,
        "logp_abs_diff_mean": d_BT.abs(),
        "probs_diff_mean": (prob_BT - sampler_prob_BT).abs(),
    }
    return {PREFIX + name: value_BT.sum(dtype=torch.float64) for name, value_BT in values.items()}


class MismatchSums:
    """Sums that describe p against mu, for any choice of weights."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.d = self.error = 0.0
        self.moments = Moments(5)  # |d|, rho - 1, |p gap|, p of the learner, p of the sampler
        self.low = math.inf
        self.high = -math.inf
        self.prob_high = 0.0
        self.d_B = torch.zeros(rows, device=device)
        self.prox_B = torch.zeros(rows, device=device)
        self.counted_B = torch.zeros(rows, device=device)
        self.sampler_faults = self.learner_faults = 0

    def add(self, rows: slice, ratio: LogRatio) -> None:
        self.sampler_faults += int(ratio.sampler_faults)
        self.learner_faults += int(ratio.learner_faults)
        mask_BT = ratio.counted_float_BT
        self.counted_B[rows] = ratio.counts_B1[:, 0]
        self.d_B[rows] = ratio.sums_B1[:, 0]
        self.prox_B[rows] = ratio.prox_BT.sum(dim=1)

        low, high = extremes(ratio.d_BT, mask_BT, ratio.ends)
        self.low, self.high = min(self.low, low), max(self.high, high)

        d = ratio.d_BT.reshape(-1)
        rho = ratio.rho_BT.reshape(-1)
        absolute = d.abs()
        excess = ratio.bounded_d_BT.reshape(-1).expm1()  # rho - 1, exact where rho is near 1
        error = torch.maximum(rho, ratio.inverse_BT.reshape(-1)).sub_(1.0)  # exp|d| - 1
        prob, sampler_prob = (prob_BT.reshape(-1) for prob_BT in ratio.probabilities())
        absolute_gap = (prob - sampler_prob).abs_()
        self.prob_high = max(
            self.prob_high, float(absolute_gap.amax()) if absolute_gap.numel() else 0.0
        )
        measured = (absolute, excess, absolute_gap, prob, sampler_prob)
        mask = mask_BT.reshape(-1)
        sums = [
            mask.sum(),
            d.sum(),
            error.sum(),
            *(values.sum() for values in measured),
        ]
        n, d_sum, error_sum, *totals = torch.stack(sums).tolist()
        if n == 0.0:
            return
        self.d += d_sum
        self.error += error_sum
        means = [total / n for total in totals]
        centred = [
            values.add_(mask, alpha=-mean) for values, mean in zip(measured, means, strict=True)
        ]
        products = torch.stack([torch.dot(centred[i], centred[j]) for i, j in PAIRS]).tolist()
        self.moments.merge(n, means, dict(zip(PAIRS, products, strict=True)))

    def metrics(self) -> dict[str, float]:
        n = self.moments.n
        d = _ratio(self.d, n)
        error = _ratio(self.error, n)
        absolute, excess, gap, _, _ = self.moments.means
        any_token = n > 0
        spread = self.moments.deviation(3) * self.moments.deviation(4)
        if spread > SMALLEST_SPREAD:
            correlation = self.moments.covariance(3, 4) / spread
        else:
            correlation = 0.0
        found = {
            "kl": -d,
            "logp_diff_mean": d,
            "logp_diff_stderr": self._stderr(d, n),
            "k3_kl": excess - d,
            "chi2_token": self.moments.covariance(1, 1) + excess * excess + 2.0 * excess,
            "rho_mean": 1.0 + excess if any_token else 0.0,
            "rho_std": self.moments.deviation(1),
            "rho_min": math.exp(max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, self.low)))
            if any_token
            else 0.0,
            "rho_max": math.exp(max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, self.high)))
            if any_token
            else 0.0,
            "logp_abs_diff_mean": absolute,
            "logp_abs_diff_max": max(abs(self.low), abs(self.high)) if any_token else 0.0,
            "logp_abs_diff_std": self.moments.deviation(0),
            "mult_prob_error": 1.0 + error if any_token else 0.0,
            "probs_diff_mean": gap,
            "probs_diff_max": self.prob_high,
            "probs_diff_std": self.moments.deviation(2),
            "probs_pearson_corr": max(-1.0, min(1.0, correlation)),
            "non_finite_sampler": float(self.sampler_faults),
            "non_finite_learner": float(self.learner_faults),
        }
        return {PREFIX + name: value for name, value in (found | self._row_metrics()).items()}

    def _stderr(self, mean: float, n: float) -> float:
        """Standard error of the mean of d, whose tokens are not independent: rows are."""
        if n:
            return math.sqrt(float((self.d_B - mean * self.counted_B).double().square().sum())) / n
        return 0.0

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


class WeightSums:
    """Sums of applied weights at kept tokens; with `level: none` of raw ratios, for the ESS."""

    def __init__(self) -> None:
        self.square = 0.0
        self.moments = Moments(1)
        self.low = math.inf
        self.high = -math.inf
        self.units = self.above = self.below = 0.0
        self.unit_total = 0.0
        self.kept_tokens = self.before_tokens = self.before_rows = self.touched_rows = 0.0

    def add(self, weights_BT: Tensor, kept_float_BT: Tensor) -> None:
        """`weights_BT` is 0 where `kept_float_BT` is."""
        flat = weights_BT.reshape(-1)
        kept = kept_float_BT.reshape(-1)
        n, total, square = torch.stack([kept.sum(), flat.sum(), torch.dot(flat, flat)]).tolist()
        if n == 0.0:
            return
        low, high = extremes(weights_BT, kept_float_BT, ends_of(weights_BT))
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.square += square
        centred = torch.add(flat, kept, alpha=-total / n)
        self.moments.merge(
            n,
            [total / n],
            {(0, 0): float(torch.dot(centred, centred))},
        )

    @property
    def token_mean(self) -> float:
        return self.moments.means[0]

    @property
    def unit_mean(self) -> float:
        return _ratio(self.unit_total, self.units)

    def add_units(
        self, raw: Tensor, bounded: Tensor, kept_float: Tensor, low: float, high: float
    ) -> None:
        """Tokens or, for sequence and turn weights, rows and turns: what the bounds and the
        normalisation act on.
        """
        raw = raw.reshape(-1)
        kept = kept_float.reshape(-1)
        self.units += float(kept.sum())
        self.unit_total += float(torch.dot(bounded.reshape(-1), kept))
        # a comparison written as float32 is summed without converting bools
        beyond = torch.empty_like(raw)
        self.above += float(torch.dot(torch.gt(raw, high, out=beyond), kept))
        self.below += float(torch.dot(torch.lt(raw, low, out=beyond), kept))

    def add_rows(self, before_B1: Tensor, kept_B1: Tensor) -> None:
        """Tokens per row before and after the rules."""
        self.kept_tokens += float(kept_B1.sum(dtype=torch.float64))
        self.before_tokens += float(before_B1.sum(dtype=torch.float64))
        self.before_rows += float((before_B1 > 0).sum())
        self.touched_rows += float((kept_B1 < before_B1).sum())

    def of_weights(self, scale: float) -> dict[str, float]:
        """`scale`: what the weights were multiplied by after the sums were taken."""
        n = self.moments.n
        mean = self.token_mean
        found = {
            "rollout_is_mean": scale * mean,
            "rollout_is_std": scale * self.moments.deviation(0),
            "rollout_is_min": scale * self.low if n else 0.0,
            "rollout_is_max": scale * self.high if n else 0.0,
            "rollout_is_eff_sample_size": min(1.0, _ratio(n * mean * mean, self.square)),
        }
        return {PREFIX + name: value for name, value in found.items()}

    def metrics(self, scale: float) -> dict[str, float]:
        found = {
            "rollout_is_ratio_fraction_high": _ratio(self.above, self.units),
            "rollout_is_ratio_fraction_low": _ratio(self.below, self.units),
            "rollout_rs_masked_fraction": 1.0 - self.kept_tokens / self.before_tokens
            if self.before_tokens
            else 0.0,
            "rollout_rs_seq_masked_fraction": _ratio(self.touched_rows, self.before_rows),
        }
        return self.of_weights(scale) | {PREFIX + name: value for name, value in found.items()}
