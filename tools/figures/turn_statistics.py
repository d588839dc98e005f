"""Bias and deviation of corrections over sessions of several turns, computed exactly: every session
is listed.

A session has at most three turns of two tokens; a turn that ends with the token 0 is the last one.
Policy and sampler are the tables of correction_statistics.py, so that the expected gradient of each
correction, and its variance, are sums and no samples. Prints the tables of docs/concepts/rollout-correction.md,
with what baselines by the number of the turn do.

    python tools/figures/turn_statistics.py

Shape legend: B all sessions, T positions, K turns, V tokens.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

import torch
from correction_statistics import Toy, make_toy, moments, weights_of
from torch import Tensor

from megatron_rl.config.schema import WeightConfig

TURN = 2
TURNS = 3
STOP = 0
BATCH = 256
DEVIATION = 0.037  # of a token's d: mult_prob_error 1.03, the reported run's is 1.024
NOISES = (0.02, 0.1, 0.3, 1.0)
KINDS = {
    "none": WeightConfig(level="none"),
    "token": WeightConfig(level="token", high=None),
    "turn, geometric": WeightConfig(level="turn", aggregate="geometric", high=None),
    "turn": WeightConfig(level="turn", high=None),
    "prefix": WeightConfig(level="prefix", high=None),
    "sequence, geometric": WeightConfig(level="sequence", aggregate="geometric", high=None),
    "sequence": WeightConfig(level="sequence", high=None),
    "token, cap 2": WeightConfig(level="token", high=2.0),
    "turn, cap 2": WeightConfig(level="turn", high=2.0),
    "prefix, cap 2": WeightConfig(level="prefix", high=2.0),
    "sequence, cap 2": WeightConfig(level="sequence", high=2.0),
}


@dataclass(frozen=True)
class Sessions:
    """Each session once: after its end it has no tokens."""

    toy: Toy
    mask_BT: Tensor

    @property
    def turns_BT(self) -> Tensor:
        turns_T = torch.arange(self.mask_BT.shape[1]) // TURN
        return turns_T.expand_as(self.mask_BT).where(self.mask_BT, torch.tensor(-1))

    def logprobs(self, noise: bool) -> Tensor:
        logits_TVV = self.toy.logits_TVV + self.toy.noise_TVV * noise
        return self.toy.logprobs(logits_TVV) * self.mask_BT

    def chances(self, noise: bool) -> Tensor:
        return self.logprobs(noise).sum(dim=1).exp()

    def weights(self, weight: WeightConfig) -> Tensor:
        logprobs = self.logprobs(False), self.logprobs(True)
        return weights_of(*logprobs, self.mask_BT, weight, turns_N=self.turns_BT.flatten())


def make_sessions(noise: float, seed: int = 0) -> Sessions:
    toy = make_toy(noise, seed, TURN * TURNS)
    ends_BK = toy.sequences_BT[:, TURN - 1 :: TURN] == STOP
    over_BK = torch.cat(
        [torch.zeros_like(ends_BK[:, :1]), ends_BK[:, :-1].cumsum(dim=1) > 0], dim=1
    )
    mask_BT = ~over_BK.repeat_interleave(TURN, dim=1)
    once_B = (toy.sequences_BT * ~mask_BT).sum(dim=1) == 0
    listed = Toy(
        toy.logits_TVV,
        toy.noise_TVV,
        toy.sequences_BT[once_B],
        toy.rewards_B[once_B],
    )
    return Sessions(listed, mask_BT[once_B])


@dataclass(frozen=True)
class Quality:
    bias: float  # of the expected gradient, as a share of the true one
    deviation: float  # of the mean of BATCH sessions, likewise
    cosine: float  # of the expected gradient and the true one


def quality(sessions: Sessions, coefficients_BT: Tensor, noise: bool = True) -> Quality:
    """Quality of the gradient in which each token's score is multiplied by these coefficients."""
    scores = sessions.toy.scores() * sessions.mask_BT[:, :, None, None]
    rewards_BT = sessions.toy.rewards_B[:, None].expand_as(coefficients_BT)
    true, _ = moments(scores, rewards_BT, sessions.chances(False))
    mean, variance = moments(scores, coefficients_BT, sessions.chances(noise))
    size = float(true.norm())
    cosine = float((mean * true).sum() / (mean.norm() * size))
    return Quality(
        float((mean - true).norm()) / size,
        math.sqrt(variance / BATCH) / size,
        cosine,
    )


def of_weight(sessions: Sessions, weight: WeightConfig) -> Quality:
    """With the mean reward of what the sampler draws as baseline."""
    chances_B = sessions.chances(True)
    rewards_B = sessions.toy.rewards_B
    advantages_B = rewards_B - float((chances_B * rewards_B).sum())
    return quality(sessions, sessions.weights(weight).double() * advantages_B[:, None])


def by_turn(sessions: Sessions, siblings: int, *, alone: bool, scaled: bool) -> Quality:
    """On policy, rewards compared among the sessions of a group that have come as far: the expected
    gradient.

    `alone`: a session is not part of its own mean; `scaled`: divided by the turn's own deviation of
    rewards.
    """
    chances_B = sessions.chances(False)
    rewards_B = sessions.toy.rewards_B
    coefficients_BT = torch.zeros_like(sessions.logprobs(False))
    for turn in range(TURNS):
        here_B = sessions.mask_BT[:, turn * TURN]
        reach = float((chances_B * here_B).sum())
        mean = float((chances_B * rewards_B * here_B).sum()) / reach
        spread = float((chances_B * here_B * (rewards_B - mean).square()).sum()) / reach
        # n others are there, by chance: with itself in the mean, 1 - 1 / (n + 1) of its advantage
        # is left
        left = sum(
            math.comb(siblings - 1, n)
            * reach**n
            * (1 - reach) ** (siblings - 1 - n)
            * (1 if alone else n / (n + 1))
            for n in range(1, siblings)
        )
        factor = left / (math.sqrt(spread) if scaled else 1.0)
        coefficients_BT[:, turn * TURN : (turn + 1) * TURN] = (
            (rewards_B - mean) * factor * here_B
        )[:, None]
    return quality(sessions, coefficients_BT, noise=False)


def long_sessions(deviation: float, rows: int = 256) -> dict[str, float]:
    """The mean weight of each kind, capped at 2, in sessions of 40 to 60 turns of 180 tokens.

    As in the run that NVIDIA-NeMo/RL's pull request 2269 reports, where sequences weighed 0.0596
    and tokens 0.9999.
    """
    generator = torch.Generator().manual_seed(0)
    shape = rows, 60 * 180
    turns_BT = (torch.arange(shape[1]) // 180).expand(shape)
    lengths_B1 = torch.randint(40, 61, (rows, 1), generator=generator)
    mask_BT = turns_BT < lengths_B1
    noise_BT = (
        deviation * torch.randn(shape, generator=generator) - deviation**2 / 2 + math.log(0.9999)
    )
    logprobs = noise_BT - 1.0, torch.full(shape, -1.0)
    found = {}
    for name in ("token", "turn", "turn, geometric", "prefix", "sequence, geometric", "sequence"):
        weight = replace(KINDS[name], high=2.0)
        weights_BT = weights_of(*logprobs, mask_BT, weight, turns_N=turns_BT.flatten())
        found[name] = float(weights_BT[mask_BT].mean())
    return found


def table() -> str:
    lines = [
        "| weight | " + " | ".join(f"noise {noise}" for noise in NOISES) + " |",
        "|---" * (len(NOISES) + 1) + "|",
    ]
    for name, weight in KINDS.items():
        found = [of_weight(make_sessions(noise), weight) for noise in NOISES]
        cells = (f"{100 * one.bias:.1f} % / {100 * one.deviation:.0f} %" for one in found)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def baselines() -> str:
    lines = [
        "| rewards compared by turn, groups of 8 | bias | of its direction alone |",
        "|---|---|---|",
    ]
    for name, alone, scaled in (
        ("the others' mean", True, False),
        ("the mean with itself", False, False),
        ("the others' mean, over the turn's deviation", True, True),
    ):
        one = by_turn(make_sessions(0.0), 8, alone=alone, scaled=scaled)
        turned = math.sqrt(max(0.0, 1 - one.cosine**2))
        lines.append(f"| {name} | {100 * one.bias:.2f} % | {100 * turned:.2f} % |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    long = ", ".join(f"{name} {weight:.4f}" for name, weight in long_sessions(DEVIATION).items())
    print(table(), baselines(), f"mean weight in sessions of 40 to 60 turns: {long}", sep="\n\n")


if __name__ == "__main__":
    main()
