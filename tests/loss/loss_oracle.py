"""Values and gradients of every policy loss, derived by hand, one token at a time, in plain Python.

Each formula returns (loss, d loss / d pi) of a token from pi, the anchor a, the advantage A, the
weight w and values of its row; `expected` reduces them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from matrices import LossInputs

from megatron_rl.config.schema import LossConfig


@dataclass(frozen=True)
class Row:
    """Kept tokens of a token's row."""

    shifts: Sequence[float]
    weights: Sequence[float]
    turns: Sequence[int] = ()


@dataclass(frozen=True)
class Token:
    pi: float
    anchor: float
    advantage: float
    weight: float
    selected: bool
    row: Row
    place: int = 0  # among the kept ones of its row

    def shared(self, config: LossConfig) -> float:
        """The log of what is clipped: of this token's sequence, turn or prefix."""
        shifts = self.row.shifts
        turns = self.row.turns
        part = {
            "token": [self.x],
            "sequence": list(shifts),
            "turn": [x for x, turn in zip(shifts, turns, strict=True) if turn == turns[self.place]],
            "prefix": list(shifts[: self.place + 1]),
        }[str(config.level)]
        return sum(part) / (len(part) if config.aggregate == "geometric" else 1)

    @property
    def x(self) -> float:
        return self.pi - self.anchor

    @property
    def r(self) -> float:
        return math.exp(self.x)


Pair = tuple[float, float]


def bounds(config: LossConfig) -> Pair:
    return 1 - config.clip_low, 1 + config.clip_high


def surrogate(r: float, token: Token, config: LossConfig) -> Pair:
    advantage = token.advantage
    low, high = bounds(config)
    plain = -advantage * r
    clipped = -advantage * min(max(r, low), high)
    value, slope = (plain, -advantage * r) if plain >= clipped else (clipped, 0.0)
    dual_clip = config.params["dual_clip"]
    if dual_clip is not None and advantage < 0 and value > -dual_clip * advantage:
        value = -dual_clip * advantage
        slope = 0.0
    return value, slope


def ppo(token: Token, config: LossConfig) -> Pair:
    value, slope = surrogate(math.exp(token.shared(config)), token, config)
    return value * token.weight, slope * token.weight


def gspo(token: Token, config: LossConfig) -> Pair:
    mean = sum(token.row.shifts) / len(token.row.shifts)
    value, slope = surrogate(math.exp(min(mean, 10.0)), token, config)
    return value * token.weight, slope * token.weight


def cispo(token: Token, config: LossConfig) -> Pair:
    if config.params["absolute"]:
        c = min(token.r, config.clip_high)
    else:
        low, high = bounds(config)
        c = min(max(math.exp(token.shared(config)), low), high)
    scale = -c * token.advantage * token.weight
    return scale * token.pi, scale


def sapo(token: Token, config: LossConfig) -> Pair:
    tau = config.params["tau_positive"] if token.advantage > 0 else config.params["tau_negative"]
    s = 1 / (1 + math.exp(-tau * (token.r - 1)))
    scale = -token.advantage * token.weight
    return scale * s * 4 / tau, scale * 4 * s * (1 - s) * token.r


def gmpo(token: Token, config: LossConfig) -> Pair:
    sign = (token.advantage > 0) - (token.advantage < 0)

    def bounded(x: float) -> float:
        return sign * min(sign * x, sign * min(max(x, -config.clip_low), config.clip_high))

    n = len(token.row.shifts)
    mean = sum(bounded(x) for x in token.row.shifts) / n
    weight = (
        0.0 if 0.0 in token.row.weights else math.exp(sum(map(math.log, token.row.weights)) / n)
    )
    value = -token.advantage * math.exp(mean) * weight
    # the row's loss sits at each of its n tokens, and each depends on this token's pi: n times 1 /
    # n
    free = bounded(token.x) == token.x
    return value, value * free


def dppo(token: Token, config: LossConfig) -> Pair:
    q = math.exp(token.pi)
    p = math.exp(token.anchor)
    if config.params["trust_region"] == "total_variation":
        if token.advantage > 0:
            inside = q - p <= config.clip_high
        else:
            inside = q - p >= -config.clip_low
    else:
        kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        leaving = (
            kl > config.clip_high and q > p
            if token.advantage > 0
            else kl > config.clip_low and q < p
        )
        inside = not leaving
    value = -token.advantage * token.r * inside * token.weight
    return value, value


def clip_cov(token: Token, config: LossConfig) -> Pair:
    value, slope = ppo(token, config)
    return value, 0.0 if token.selected else slope


def kl_cov(token: Token, config: LossConfig) -> Pair:
    value, slope = ppo(token, config)
    if token.selected:
        value += config.params["cov_kl_coef"] * abs(token.x) * token.weight
        slope += config.params["cov_kl_coef"] * math.copysign(1.0, token.x) * token.weight
    return value, slope


def reinforce(token: Token, config: LossConfig) -> Pair:
    scale = -token.advantage * token.weight
    return scale * token.pi, scale


def vespo(token: Token, config: LossConfig) -> Pair:
    power, rate = (
        config.params["gamma_positive"] if token.advantage >= 0 else config.params["gamma_negative"]
    )
    w = math.exp(sum(token.row.shifts))
    scale = -(w**power) * math.exp(rate - rate * w) * token.advantage * token.weight
    return scale * token.pi, scale


def rollout_is(token: Token, config: LossConfig) -> Pair:
    inside = 1 - config.clip_low < token.r < 1 + config.clip_high
    scale = -token.r * inside * token.advantage * token.weight
    return scale * token.pi, scale


def cross_entropy(token: Token, config: LossConfig) -> Pair:
    return -token.pi * token.weight, -token.weight


FORMULAS: dict[str, Callable[[Token, LossConfig], Pair]] = {
    formula.__name__: formula
    for formula in (
        ppo,
        gspo,
        cispo,
        sapo,
        gmpo,
        dppo,
        clip_cov,
        kl_cov,
        vespo,
        reinforce,
        rollout_is,
        cross_entropy,
    )
}


def kl_term(kind: str, x: float) -> Pair:
    """KL of pi against the reference, x = pi - ref."""
    return {
        "k1": (x, 1.0),
        "k2": (x * x / 2, x),
        "k3": (math.exp(-x) - 1 + x, 1 - math.exp(-x)),
        "abs": (abs(x), math.copysign(1.0, x)),
    }[kind]


def coefficients(inputs: LossInputs, reduction: str, horizon: int) -> list[float]:
    """Factor of each row's tokens."""
    counts = inputs.denominator_mask_BT.sum(1).tolist()
    prompts = inputs.prompt_ids_B.tolist()
    filled = [i for i, n in enumerate(counts) if n]
    total = max(1, sum(counts))
    rows = max(1, len(filled))
    per_prompt = {
        p: sum(counts[i] for i in filled if prompts[i] == p) for p in {prompts[i] for i in filled}
    }
    found = []
    for i, n in enumerate(counts):
        if not n:
            found.append(0.0)
            continue
        found.append(
            {
                "token_mean": 1 / total,
                "seq_mean_token_mean": 1 / n / rows,
                "seq_mean_token_sum": 1 / rows,
                "seq_mean_token_sum_norm": 1 / rows / horizon,
                "prompt_mean": 1 / per_prompt[prompts[i]] / max(1, len(per_prompt)),
            }[reduction]
        )
    return found


def expected(
    inputs: LossInputs, config: LossConfig, reduction: str, horizon: int
) -> tuple[float, torch.Tensor]:
    """The loss and its gradient in logprobs_BT (for the entropy, -coef x coefficient)."""
    pi = inputs.logprobs_BT.detach().double()
    anchor = inputs.anchor_logprobs_BT.double()
    gradient = torch.zeros_like(pi)
    total = 0.0
    for i, scale in enumerate(coefficients(inputs, reduction, horizon)):
        places = inputs.mask_BT[i].nonzero().flatten().tolist()
        shifts = [float(pi[i, t] - anchor[i, t]) for t in places]
        turns = [0 if inputs.turns_BT is None else int(inputs.turns_BT[i, t]) for t in places]
        row = Row(
            shifts,
            [float(inputs.weights_BT[i, t]) for t in places],
            turns,
        )
        for place, t in enumerate(places):
            selected = inputs.selected_BT is not None and bool(inputs.selected_BT[i, t])
            token = Token(
                float(pi[i, t]),
                float(anchor[i, t]),
                float(inputs.advantages_B[i]),
                float(inputs.weights_BT[i, t]),
                selected,
                row,
                place,
            )
            value, slope = FORMULAS[str(config.name)](token, config)
            if config.kl_coef:
                kl, kl_slope = kl_term(
                    str(config.kl_estimator), token.pi - float(inputs.ref_logprobs_BT[i, t])
                )
                value = value + config.kl_coef * kl
                slope = slope + config.kl_coef * kl_slope
            if config.entropy_coef:
                value -= config.entropy_coef * float(inputs.entropy_BT.detach()[i, t])
            total += scale * value
            gradient[i, t] += scale * slope
    return total, gradient
