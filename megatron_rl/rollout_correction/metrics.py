"""Metrics under `rollout_corr/`: the mismatch of sampler and learner, and the weights applied.

Sums are collected part by part and replica by replica, in float64 across them. Tokens outside the
mask hold 0 in every tensor that is summed here.

Shape legend: N response tokens, B rows.
"""

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

from megatron_rl.batch import Replicas
from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT, LogRatio, bounded_exp, ends_of
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.types import Metrics

PREFIX = "rollout_corr/"
MASKED_FRACTION = PREFIX + "rollout_rs_masked_fraction"
OUTSIDE_SUPPORT = PREFIX + "outside_support"
KEPT_LOG_MASS = PREFIX + "kept_log_mass"
HIGHEST_LOGPROB = -1e-7  # whose log-odds float32 can hold
CONFIDENCE_EDGES = (0.5, 0.9, 0.99, 0.999)
CONFIDENCE_BINS = tuple(f"{low}_to_{high}" for low, high in pairwise((0, *CONFIDENCE_EDGES, 1)))
TOP_DIVERGENCES = ("top_kl", "top_reverse_kl", "top_tv")
TOP_TOKENS = "top_tokens"
SMALLEST_SPREAD = 1e-12  # product of two deviations of probabilities; below it is rounding


def _ratio(numerator: float, denominator: float) -> float:
    if denominator:
        return numerator / denominator
    return 0.0


class Sums:
    """Named sums, and named largest values, over a replica's tokens; then over all replicas'."""

    def __init__(self) -> None:
        self._sums: Metrics = {}
        self._largest: Metrics = {}

    def add(self, **values: Tensor | float) -> None:
        numbers = [torch.as_tensor(value, dtype=torch.float64) for value in values.values()]
        for name, number in zip(values, torch.stack(numbers).tolist(), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + number

    def add_moments(
        self, values: Mapping[str, Tensor], mask: Tensor, *pairs: tuple[str, str]
    ) -> None:
        """Sums of values, 0 outside the mask, and of products of pairs. Deviations from the mean
        are multiplied: a float32 sum of squares loses a variance that is small beside the mean. The
        values are used up.
        """
        n, *sums = torch.stack([mask.sum(), *(one.sum() for one in values.values())]).tolist()
        means = dict.fromkeys(values, 0.0)
        for (name, one), total in zip(values.items(), sums, strict=True):
            if n:
                means[name] = total / n
                one.add_(mask, alpha=-means[name])
            self.add(**{name: total})
        products = [torch.dot(values[one], values[other]) for one, other in pairs]
        for (first, second), product in zip(pairs, torch.stack(products).tolist(), strict=True):
            product += n * means[first] * means[second]
            self.add(**{f"{first} {second}": product})

    def add_largest(self, **values: float) -> None:
        for name, value in values.items():
            self._largest[name] = max(self._largest.get(name, -math.inf), value)

    def reduced(self, replicas: Replicas) -> Metrics:
        """Every sum and every largest value, of all replicas. They have the same names."""
        sums = replicas.sum(torch.tensor([*self._sums.values()], dtype=torch.float64)).tolist()
        largest = []
        if self._largest:
            named = torch.tensor([*self._largest.values()], dtype=torch.float64)
            largest = replicas.largest(named).tolist()
        return dict(zip([*self._sums, *self._largest], sums + largest, strict=True))


def extremes(values_N: Tensor, mask_float_N: Tensor) -> tuple[float, float]:
    """Smallest and largest value inside; (inf, -inf) where there is none."""
    if values_N.numel() == 0:
        return math.inf, -math.inf
    outside_N = mask_float_N == 0
    low = values_N.masked_fill(outside_N, math.inf).amin()
    high = values_N.masked_fill(outside_N, -math.inf).amax()
    return float(low), float(high)


def token_sums(ratio: LogRatio) -> dict[str, Tensor]:
    """Sums over tokens with a ratio, on the device; additive over micro-batches."""
    d_N = ratio.d_N
    excess_N = ratio.bounded_d_N.expm1()
    counted_N = ratio.counted_float_N
    error_N = torch.maximum(ratio.rho_N, ratio.inverse_N)
    prob_N, sampler_prob_N = ratio.probabilities()
    values = {
        "kl": -d_N,
        "logp_diff_mean": d_N,
        "k3_kl": excess_N - d_N,
        "chi2_token": excess_N * (excess_N + 2.0),
        "rho_mean": ratio.rho_N * counted_N,
        "mult_prob_error": error_N * counted_N,
        "logp_abs_diff_mean": d_N.abs(),
        "probs_diff_mean": (prob_N - sampler_prob_N).abs(),
    }
    return {PREFIX + name: value_N.sum(dtype=torch.float64) for name, value_N in values.items()}


def divergences_N(top: TopLogprobs) -> tuple[Tensor, ...]:
    """TOP_DIVERGENCES at each token; 0 where the distributions are not known."""
    return top.kl_N, top.reverse_kl_N, top.total_variation_N


def divergences(top: TopLogprobs, counted_N: Tensor) -> dict[str, Tensor]:
    """Sums over counted tokens with known distributions, and their number."""
    measured_N = counted_N & top.usable_N
    found = {
        name: value_N.masked_fill(~measured_N, 0.0).sum(dtype=torch.float64)
        for name, value_N in zip(TOP_DIVERGENCES, divergences_N(top), strict=True)
    }
    return found | {TOP_TOKENS: measured_N.sum()}


class MismatchSums(Sums):
    """Sums that describe p against mu, for any choice of weights."""

    def count(self, ratio: LogRatio) -> None:
        self._count_tokens(ratio)
        self._count_rows(ratio)
        if ratio.top is not None:
            self.add(**divergences(ratio.top, ratio.counted_N))
        self.add(sampler_faults=ratio.sampler_faults, learner_faults=ratio.learner_faults)

    def _count_tokens(self, ratio: LogRatio) -> None:
        low, high = extremes(ratio.d_N, ratio.counted_float_N)
        error_N = torch.maximum(ratio.rho_N, ratio.inverse_N).sub_(1.0)  # exp|d| - 1
        prob_N, sampler_prob_N = ratio.probabilities()
        gap_N = (prob_N - sampler_prob_N).abs()
        self.add_largest(minus_low=-low, high=high, gap_largest=ends_of(gap_N)[1])
        measured = {
            "absolute": ratio.d_N.abs(),
            "excess": ratio.bounded_d_N.expm1(),  # rho - 1, exact where rho is near 1
            "gap": gap_N,
            "prob": prob_N,
            "sampler_prob": sampler_prob_N,
        }
        squares = ((name, name) for name in measured)
        self.add(d=ratio.d_N.sum(), error=error_N.sum())
        self.add_moments(measured, ratio.counted_float_N, *squares, ("prob", "sampler_prob"))

    def _count_rows(self, ratio: LogRatio) -> None:
        counts_B = ratio.counts_B.double()
        sums_B = ratio.sums_B.double()
        filled_B = counts_B > 0
        prox_B = ratio.rows.sum(ratio.prox_N).double() / counts_B.clamp(min=1)
        d_B = sums_B / counts_B.clamp(min=1)
        of_rows = {
            "training_ppl": bounded_exp(-prox_B),
            "rollout_ppl": bounded_exp(d_B - prox_B),
            "log_ppl_diff": -d_B,
            "log_ppl_abs_diff": d_B.abs(),
            "ppl_ratio": bounded_exp(-d_B),
            "chi2_seq": bounded_exp(sums_B).square(),
        }
        self.add(
            tokens=counts_B.sum(),
            rows=filled_B.sum(),
            row_d_squared=sums_B.square().sum(),
            row_tokens_squared=counts_B.square().sum(),
            row_d_tokens=torch.dot(sums_B, counts_B),
            **{name: (values_B * filled_B).sum() for name, values_B in of_rows.items()},
        )

    def metrics(self, replicas: Replicas) -> Metrics:
        found = self.reduced(replicas)
        n = found["tokens"]
        rows = found["rows"]

        def mean(name: str) -> float:
            return _ratio(found[name], n)

        def covariance(one: str, other: str) -> float:
            return _ratio(found[f"{one} {other}"], n) - mean(one) * mean(other)

        def deviation(name: str) -> float:
            return math.sqrt(max(0.0, covariance(name, name)))

        d = mean("d")
        spread = deviation("prob") * deviation("sampler_prob")
        correlation = 0.0
        if spread > SMALLEST_SPREAD:
            correlation = covariance("prob", "sampler_prob") / spread
        # of the mean of d, whose tokens are not independent: rows are
        error = (
            found["row_d_squared"]
            - 2.0 * d * found["row_d_tokens"]
            + d * d * found["row_tokens_squared"]
        )
        metrics = {
            "kl": -d,
            "logp_diff_mean": d,
            "logp_diff_stderr": _ratio(math.sqrt(max(0.0, error)), n),
            "k3_kl": mean("excess") - d,
            "chi2_token": mean("excess excess") + 2.0 * mean("excess"),
            "rho_mean": 1.0 + mean("excess") if n else 0.0,
            "rho_std": deviation("excess"),
            "rho_min": _bounded(-found["minus_low"]) if n else 0.0,
            "rho_max": _bounded(found["high"]) if n else 0.0,
            "logp_abs_diff_mean": mean("absolute"),
            "logp_abs_diff_max": max(abs(found["minus_low"]), abs(found["high"])) if n else 0.0,
            "logp_abs_diff_std": deviation("absolute"),
            "mult_prob_error": 1.0 + mean("error") if n else 0.0,
            "probs_diff_mean": mean("gap"),
            "probs_diff_max": max(0.0, found["gap_largest"]),
            "probs_diff_std": deviation("gap"),
            "probs_pearson_corr": max(-1.0, min(1.0, correlation)),
            "non_finite_sampler": found["sampler_faults"],
            "non_finite_learner": found["learner_faults"],
        }
        for name in (
            "training_ppl",
            "rollout_ppl",
            "log_ppl_diff",
            "log_ppl_abs_diff",
            "ppl_ratio",
        ):
            metrics[name] = _ratio(found[name], rows)
        for name in TOP_DIVERGENCES:
            if name in found:
                metrics[name] = _ratio(found[name], found[TOP_TOKENS])
        metrics["chi2_seq"] = _ratio(found["chi2_seq"], rows) - (1.0 if rows else 0.0)
        return {PREFIX + name: value for name, value in metrics.items()}


def _bounded(exponent: float) -> float:
    return math.exp(max(-EXPONENT_LIMIT, min(EXPONENT_LIMIT, exponent)))


def log_odds_differences(ratio: LogRatio) -> dict[str, Tensor]:
    """Sum of |logit p - logit q| and number of tokens, by bins of p."""
    p_N = ratio.prox_N.clamp(max=HIGHEST_LOGPROB)
    q_N = (ratio.prox_N - ratio.d_N).clamp(max=HIGHEST_LOGPROB)
    odds_N = (p_N - q_N) - (log_rest(p_N) - log_rest(q_N))
    edges = torch.tensor(CONFIDENCE_EDGES, device=p_N.device)
    bin_N = torch.bucketize(p_N.exp(), edges)
    found = {}
    for number, name in enumerate(CONFIDENCE_BINS):
        inside_N = (bin_N == number) & ratio.counted_N
        found[f"odds {name}"] = odds_N.abs().masked_fill(~inside_N, 0.0).sum()
        found[f"odds {name} tokens"] = inside_N.sum()
    return found


def log_rest(logprobs_N: Tensor) -> Tensor:
    """log(1 - probability)."""
    return (-logprobs_N.expm1()).log()


class WeightSums(Sums):
    """Sums of applied weights at kept tokens; with `level: none` of raw ratios, for the ESS."""

    def count_weights(self, values_N: Tensor, mask_float_N: Tensor) -> None:
        """Values are 0 outside the mask."""
        low, high = extremes(values_N, mask_float_N)
        self.add_largest(minus_low=-low, high=high)
        self.add(n=mask_float_N.sum())
        self.add_moments({"weight": values_N.clone()}, mask_float_N, ("weight", "weight"))

    def count_units(
        self,
        raw: Tensor,
        bounded: Tensor,
        kept_float: Tensor,
        low: float | Tensor,
        high: float | Tensor,
    ) -> None:
        """Raw ratios of kept tokens, turns or rows outside the bounds, and the bounded ones that the
        normalisation acts on.
        """
        # a comparison written as float32 is summed without converting bools
        beyond = torch.empty_like(raw)
        above = torch.dot(torch.gt(raw, high, out=beyond), kept_float)
        below = torch.dot(torch.lt(raw, low, out=beyond), kept_float)
        unit_total = torch.dot(bounded, kept_float)
        self.add(units=kept_float.sum(), unit_total=unit_total, above=above, below=below)

    def count_rows(self, before_B: Tensor, kept_B: Tensor) -> None:
        """Tokens per row before and after the rules."""
        self.add(
            kept_tokens=kept_B.sum(),
            before_tokens=before_B.sum(),
            before_rows=(before_B > 0).sum(),
            touched_rows=(kept_B < before_B).sum(),
        )

    def count_returns(
        self, weights_B: Tensor, squares_B: Tensor, raw_B: Tensor, advantages_B: Tensor
    ) -> None:
        """Products with advantages: of each row's sum of weights, of squared weights, and of kept
        tokens' raw ratios.
        """
        advantages = advantages_B.double()
        self.add(
            returns=torch.dot(weights_B.double(), advantages),
            squared_returns=torch.dot(squares_B.double(), advantages.square()),
            raw_returns=torch.dot(raw_B.double(), advantages),
        )

    @staticmethod
    def metrics(found: Metrics, scale: float) -> Metrics:
        """Metrics of reduced sums; `scale`: what the weights were multiplied by after that."""
        n = found["n"]
        mean = _ratio(found["weight"], n)
        variance = max(0.0, _ratio(found["weight weight"], n) - mean * mean)
        metrics = {
            "rollout_is_mean": scale * mean,
            "rollout_is_std": scale * math.sqrt(variance),
            "rollout_is_min": scale * -found["minus_low"] if n else 0.0,
            "rollout_is_max": scale * found["high"] if n else 0.0,
            "rollout_is_eff_sample_size": min(1.0, _ratio(n * mean * mean, found["weight weight"])),
            "rollout_is_ratio_fraction_high": _ratio(found["above"], found["units"]),
            "rollout_is_ratio_fraction_low": _ratio(found["below"], found["units"]),
            "rollout_rs_masked_fraction": _ratio(
                found["before_tokens"] - found["kept_tokens"], found["before_tokens"]
            ),
            "rollout_rs_seq_masked_fraction": _ratio(found["touched_rows"], found["before_rows"]),
        }
        metrics |= _cost_of_bounds(found, scale)
        for name in CONFIDENCE_BINS:
            if tokens := found.get(f"odds {name} tokens"):
                metrics[f"log_odds_abs_diff/{name}"] = found[f"odds {name}"] / tokens
        return {PREFIX + name: value for name, value in metrics.items()}


def _cost_of_bounds(found: Metrics, scale: float) -> Metrics:
    """Shift of mean(w A) by bounding the weights, and the variance of that mean."""
    n = max(1.0, found["kept_tokens"])
    weighted = scale * found["returns"] / n
    square = scale * scale * found["squared_returns"] / n
    return {
        "weight_bias": weighted - found["raw_returns"] / n,
        "weight_variance": max(0.0, square - weighted * weighted) / n,
    }
