"""The correction written once more, slowly: float64, one token at a time, straight from the
formulas.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from megatron_rl.config.schema import CorrectionConfig, RejectRule

SEGMENT_TOKENS = 64


def exp(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


TOKEN_STATS = {
    "ratio": exp,
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: exp(d) - 1 - d,
    "m2": lambda d: d * d,
    "abs": lambda d: exp(abs(d)),
}


def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs)


def coin(p: float, q: float) -> float:
    """KL of two coins, in nats."""
    faces = [(p, q), (1 - p, 1 - q)]
    return sum(0.0 if x == 0 else math.inf if y == 0 else x * math.log(x / y) for x, y in faces)


COIN_STATS: dict[str, Any] = {
    "tv": lambda p, mu: abs(p - mu),
    "binary_kl": lambda p, mu: coin(mu, p),
    "binary_kl_max": lambda p, mu: max(coin(mu, p), coin(p, mu)),
}


def token_stat(stat: str, d: float, p: float) -> float:
    """`p`: the learner's logprob."""
    return (
        COIN_STATS[stat](math.exp(p), math.exp(p - d))
        if stat in COIN_STATS
        else TOKEN_STATS[stat](d)
    )


REDUCERS: dict[str, Any] = {"sum": sum, "mean": mean, "max": max, "min": min}


def row_stat(rule: RejectRule, ds: list[tuple[float, float]]) -> float:
    """`ds`: each token's d and p."""
    if rule.stat == "ratio" and rule.reduce in ("sum", "mean"):
        return exp(REDUCERS[str(rule.reduce)]([d for d, _ in ds]))
    return REDUCERS[str(rule.reduce)]([token_stat(str(rule.stat), d, p) for d, p in ds])


def inside(rule: RejectRule, value: float, cutoff: float | None) -> bool:
    if cutoff is not None:
        return value < cutoff
    return (rule.low is None or value >= rule.low) and (rule.high is None or value <= rule.high)


def cutoff_of(values: list[float], budget: float) -> float:
    ordered = sorted(values)
    survivors = 0
    for count in range(1, len(ordered) + 1):
        if sum(ordered[:count]) / count <= budget:
            survivors = count
    return ordered[survivors] if survivors < len(ordered) else math.inf


def correct(
    prox: torch.Tensor,
    mu: torch.Tensor,
    mask: torch.Tensor,
    config: CorrectionConfig,
    advantages: torch.Tensor | None = None,
    turns: torch.Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weights, mask, denominator mask); with `advantages`, conditional rules included."""
    turn_of = {
        place: 0 if turns is None else int(turns[place]) for place in np.ndindex(*prox.shape)
    }
    p = prox.double().numpy()
    m = mu.double().numpy()
    rows, columns = p.shape
    d: dict[tuple[int, int], float] = {}
    ones = set()
    zeros = set()
    stays = np.zeros((rows, columns), dtype=bool)
    for i in range(rows):
        faulty = any(bool(mask[i, t]) and not math.isfinite(m[i, t]) for t in range(columns))
        for t in range(columns):
            if not mask[i, t] or not math.isfinite(p[i, t]):
                continue
            if math.isfinite(m[i, t]):
                if faulty and config.non_finite == "reject":
                    continue
                d[i, t] = p[i, t] - m[i, t]
            elif config.non_finite == "one":
                d[i, t] = 0.0
                ones.add((i, t))
            elif config.non_finite == "zero":
                zeros.add((i, t))
            else:
                continue
            stays[i, t] = True

    def group(level: str, i: int, t: int) -> Any:
        """Key of the tokens that share a statistic: a row's, a turn's, a segment's, or its own."""
        earlier = int(stays[i, :t].sum())
        return {
            "sequence": i,
            "turn": (i, "turn", turn_of[i, t]),
            "segment": (i, "segment", earlier // SEGMENT_TOKENS),
        }.get(level, (i, t))

    def members(level: str, i: int, t: int) -> list[tuple[float, float]]:
        """d and p of a token's row or turn, or of its row up to it."""
        if level == "prefix":
            return [(d[i, s], p[i, s]) for s in range(t + 1) if (i, s) in d]
        same = [
            s for s in range(columns) if (i, s) in d and group(level, i, s) == group(level, i, t)
        ]
        return [(d[i, s], p[i, s]) for s in same]

    kept = stays.copy()
    for rule in config.reject:
        if rule.when is not None and advantages is None:
            continue
        level = str(rule.level)
        if level == "token":
            values: dict[Any, float] = {
                place: token_stat(str(rule.stat), x, p[place]) for place, x in d.items()
            }
        else:
            values = {group(level, i, t): row_stat(rule, members(level, i, t)) for i, t in d}
        cutoff = None if rule.budget is None else cutoff_of(list(values.values()), rule.budget)
        for i, t in np.ndindex(rows, columns):
            value = values.get(group(level, i, t))
            if value is None:
                continue
            if rule.when is not None and advantages[i] >= 0:
                continue
            kept[i, t] &= inside(rule, value, cutoff)

    weights = np.zeros((rows, columns))
    w = config.weight
    for i in range(rows):
        for t in range(columns):
            if not kept[i, t]:
                continue
            if (i, t) in zeros:
                continue
            if w.level == "none" or (i, t) in ones:
                weights[i, t] = 1.0
                continue
            exponent = d[i, t]
            ds = [x for x, _ in members(str(w.level), i, t)]
            if w.level != "token":
                exponent = sum(ds) / (len(ds) if w.aggregate == "geometric" else 1)
            raw = exp(exponent)
            outside = (w.low is not None and raw < w.low) or (w.high is not None and raw > w.high)
            if outside and w.outside == "zero":
                continue
            weights[i, t] = min(max(raw, w.low or 0.0), math.inf if w.high is None else w.high)
    if w.normalize:
        per_unit = list(
            {
                group(str(w.level), i, t): weights[i, t]
                for i, t in zip(*kept.nonzero(), strict=True)
            }.values()
        )
        mean = float(np.mean(per_unit)) if len(per_unit) else 0.0
        weights = weights / mean if mean else weights
    return weights, kept, kept if config.renormalize else stays
