"""What score centering and calibrated weights are worth where everything can be computed exactly.

Of one step: bias and deviation of the gradient, and the drift that centering removes, over the tables
of correction_statistics.py. Of training: a small network learns from a sampler that follows it, by
the expected gradient or from drawn responses; by several clipped updates a batch too.

    python tools/figures/centering_statistics.py [--seeds 32] [--steps 400]

Shape legend: S seeds, B all sequences, T positions, V words: first the previous one, then the next.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from correction_statistics import (
    LENGTH,
    NONE,
    TOKEN_TIS,
    VOCABULARY,
    Toy,
    correct,
    make_toy,
    mean_and_variance,
    mean_reward,
    weights_of,
)
from torch import Tensor

from megatron_rl.config.schema import ConfidenceCap, Level, LossConfig, WeightConfig

BATCH = 256
HIDDEN = 12
RATE = 0.005
DRAWN = 64  # responses of a step
UPDATES = 4  # of a batch, where the loss clips
PPO = LossConfig(name="ppo", clip_low=0.2, clip_high=0.28)


@dataclass(frozen=True)
class Choice:
    weight: WeightConfig
    center: bool = False
    clip: bool = False  # by the sign of the advantage, as ppo does
    centered_clip: bool = False  # what is subtracted is clipped too


CALIBRATED = WeightConfig(high=None, cap=ConfidenceCap(confidence=2.3, floor=0.005))
CHOICES = {
    "none": Choice(NONE),
    "tis": Choice(TOKEN_TIS),
    "calibrated": Choice(CALIBRATED),
    "icepop": Choice(WeightConfig(low=0.5, high=5.0, outside="zero")),
    "prefix_tis": Choice(WeightConfig(level="prefix", high=2.0)),
    "center": Choice(NONE, center=True),
    "center_tis": Choice(TOKEN_TIS, center=True),
    "center, calibrated": Choice(CALIBRATED, center=True),
}
CLIPPED = {
    "none": Choice(NONE, clip=True),
    "center": Choice(NONE, center=True, clip=True),
    "center, with clips": Choice(NONE, center=True, clip=True, centered_clip=True),
    "tis": Choice(TOKEN_TIS, clip=True),
    "center_tis": Choice(TOKEN_TIS, center=True, clip=True),
    "center_tis, with clips": Choice(TOKEN_TIS, center=True, clip=True, centered_clip=True),
    "no clip": Choice(NONE),
}


def word_weights(weight: WeightConfig, learner_TVV: Tensor, sampler_TVV: Tensor) -> Tensor:
    """The weight of each word after each word, had it been sampled. Of level none or token."""
    one = (-1, 1)
    mask = torch.ones_like(learner_TVV, dtype=torch.bool).view(one)
    found = weights_of(learner_TVV.reshape(one), sampler_TVV.reshape(one), mask, weight)
    return found.view(learner_TVV.shape).double()


# one step


def expected_slopes(toy: Toy, weight: WeightConfig) -> Tensor:
    """E_q[c grad log p] by the logits of each step and previous word: what centering subtracts, less
    the advantage.
    """
    learner_TVV = toy.logits_TVV.log_softmax(-1)
    sampler_TVV = (toy.logits_TVV + toy.noise_TVV).log_softmax(-1)
    share_TVV = sampler_TVV.exp() * word_weights(weight, learner_TVV, sampler_TVV)
    return share_TVV - learner_TVV.exp() * share_TVV.sum(-1, keepdim=True)


def gradients(toy: Toy, choice: Choice) -> Tensor:
    """The gradient of each sequence by the logits, [B, T, V, V], with the mean reward as baseline."""
    found = toy.scores() * correct(toy, choice.weight).double()[:, :, None, None]
    if choice.center:
        found = found - visited(toy) * expected_slopes(toy, choice.weight)
    advantages_B = toy.rewards_B - mean_reward(toy)
    return found * advantages_B[:, None, None, None]


def visited(toy: Toy) -> Tensor:
    """[B, T, V, 1]: 1 at each step's previous word."""
    return torch.nn.functional.one_hot(toy.previous_BT, VOCABULARY)[..., None].double()


def drift(toy: Toy, weight: WeightConfig) -> Tensor:
    """What centering removes from the expected gradient."""
    chances_B = toy.sampler_prob_B * (toy.rewards_B - mean_reward(toy))
    advantage_TV1 = (visited(toy) * chances_B[:, None, None, None]).sum(0)
    return advantage_TV1 * expected_slopes(toy, weight)


@dataclass(frozen=True)
class OneStep:
    """Relative to the norm of the true gradient."""

    bias: float
    deviation: float


def one_step(toy: Toy, choice: Choice) -> OneStep:
    mean, variance = mean_and_variance(gradients(toy, choice), toy.sampler_prob_B)
    true = toy.true_gradient()
    size = float(true.norm())
    return OneStep(float((mean - true).norm()) / size, math.sqrt(variance / BATCH) / size)


def step_table(noises: tuple[float, ...] = (0.1, 0.3, 1.0), draws: int = 16) -> str:
    lines = ["| correction | " + " | ".join(f"noise {noise}" for noise in noises) + " |"]
    lines.append("|---" * (len(noises) + 1) + "|")
    for name, choice in CHOICES.items():
        cells = []
        for noise in noises:
            found = [one_step(make_toy(noise, seed), choice) for seed in range(draws)]
            bias = 100 * sum(one.bias for one in found) / draws
            deviation = 100 * sum(one.deviation for one in found) / draws
            cells.append(f"{bias:.1f} / {deviation:.1f} %")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for name in ("none", "tis"):
        cells = []
        for noise in noises:
            sizes = []
            for seed in range(draws):
                toy = make_toy(noise, seed)
                size = drift(toy, CHOICES[name].weight).norm() / toy.true_gradient().norm()
                sizes.append(float(size))
            cells.append(f"{100 * sum(sizes) / draws:.1f} %")
        lines.append(f"| *drift of {name}* | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# training, of all seeds at once


class Networks(torch.nn.Module):
    """Of each seed, the logits of each step after each word. `outlier` scales one hidden channel and
    unscales the weights that read it: the same function, hard on a row's scale.
    """

    def __init__(self, seeds: int, outlier: float = 1.0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)

        def weights(rows: int, size: float) -> torch.nn.Parameter:
            drawn = torch.randn(seeds, rows, HIDDEN, generator=random, dtype=torch.float64)
            return torch.nn.Parameter(size * drawn)

        self.words = weights(VOCABULARY, 1.0)
        self.steps = weights(LENGTH, 1.0)
        self.inner = weights(HIDDEN, 1.5 / math.sqrt(HIDDEN))
        self.outer = weights(VOCABULARY, 1.2 / math.sqrt(HIDDEN))
        self.factors = torch.ones(HIDDEN, dtype=torch.float64)
        self.factors[0] = outlier
        self.inner.data /= self.factors

    def logits(self, bits: int | None = None) -> Tensor:
        """[S, T, V, V]; with `bits`, of weights that are rounded by rows."""
        hidden = torch.tanh(self.words[:, None] + self.steps[:, :, None])
        inner = rounded(self.inner, bits)[:, None]
        hidden = torch.tanh((hidden * self.factors) @ inner.mT)
        return hidden @ rounded(self.outer, bits)[:, None].mT


def rounded(weights: Tensor, bits: int | None) -> Tensor:
    if bits is None:
        return weights
    scale = weights.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weights / scale).round() * scale


@dataclass(frozen=True)
class Sampler:
    """`logits`: of networks, noise that is drawn once, and noise of this sync."""

    logits: Callable[[Networks, Tensor, Tensor], Tensor]
    outlier: float = 1.0
    every: int = 1


SAMPLERS = {
    "INT8, outliers": Sampler(lambda net, fixed, fresh: net.logits(8), outlier=40.0),
    "INT4": Sampler(lambda net, fixed, fresh: net.logits(4)),
    "INT2": Sampler(lambda net, fixed, fresh: net.logits(2)),
    "logits in steps of 2": Sampler(lambda net, fixed, fresh: 2 * (net.logits() / 2).round()),
    "fixed noise 1.5": Sampler(lambda net, fixed, fresh: net.logits() + 1.5 * fixed),
    "fresh noise 1.5": Sampler(lambda net, fixed, fresh: net.logits() + 1.5 * fresh),
    "flatter, logits / 2": Sampler(lambda net, fixed, fresh: net.logits() / 2),
    "sharper, logits * 2": Sampler(lambda net, fixed, fresh: net.logits() * 2),
    "16 updates old": Sampler(lambda net, fixed, fresh: net.logits(), every=16),
}


@dataclass(frozen=True)
class Trained:
    """Of each seed, by step."""

    learner: Tensor  # expected reward
    sampler: Tensor
    kl: Tensor  # KL(learner || sampler) of a response


@dataclass(frozen=True)
class Game:
    """All sequences, and of each seed their rewards."""

    toy: Toy
    rewards_SB: Tensor

    @classmethod
    def of(cls, seeds: int) -> Game:
        toys = [make_toy(0.0, seed) for seed in range(seeds)]
        return cls(toys[0], torch.stack([toy.rewards_B for toy in toys]))

    def at_tokens(self, values_STVV: Tensor) -> Tensor:
        """[S, B, T]"""
        places_T = torch.arange(LENGTH)
        return values_STVV[:, places_T, self.toy.previous_BT, self.toy.sequences_BT]

    def objective(
        self,
        choice: Choice,
        prox_STVV: Tensor,
        learner_STVV: Tensor,
        sampler_STVV: Tensor,
        positive: bool,
    ) -> Tensor:
        """[S, B, T]: what an advantage of that sign multiplies."""
        ratio_STVV = (learner_STVV.detach() - prox_STVV).exp()
        if choice.weight.level == Level.prefix:
            prox = self.at_tokens(prox_STVV).flatten(0, 1)
            mask = torch.ones_like(prox, dtype=torch.bool)
            sampler = self.at_tokens(sampler_STVV).flatten(0, 1)
            weights = weights_of(prox, sampler, mask, choice.weight)
            terms_SBT = self.at_tokens(ratio_STVV * learner_STVV)
            return weights.view(terms_SBT.shape) * terms_SBT
        factors_STVV = word_weights(choice.weight, prox_STVV, sampler_STVV) * ratio_STVV
        clipped_STVV = factors_STVV
        if choice.clip:
            beyond = ratio_STVV > 1 + PPO.clip_high if positive else ratio_STVV < 1 - PPO.clip_low
            clipped_STVV = factors_STVV.masked_fill(beyond, 0.0)
        terms_SBT = self.at_tokens(clipped_STVV * learner_STVV)
        if choice.center:
            centered_STVV = clipped_STVV if choice.centered_clip else factors_STVV
            expected_STV = (sampler_STVV.exp() * centered_STVV * learner_STVV).sum(-1)
            terms_SBT = terms_SBT - expected_STV[:, torch.arange(LENGTH), self.toy.previous_BT]
        return terms_SBT


def train(
    sampler: Sampler,
    choice: Choice,
    seeds: int,
    steps: int,
    drawn: int | None = None,
    updates: int = 1,
    rate: float = RATE,
) -> Trained:
    """`drawn`: responses of each step; None: the expected gradient. `updates`: steps between two
    syncs, which fix the proximal policy.
    """
    game = Game.of(seeds)
    random = torch.Generator().manual_seed(1)
    net = Networks(seeds, sampler.outlier)
    optimizer = torch.optim.Adam(net.parameters(), rate)
    shape = net.logits().shape
    fixed = torch.randn(shape, generator=random, dtype=torch.float64)
    history = []
    for step in range(steps + 1):
        learner_STVV = net.logits().log_softmax(-1)
        if step % updates == 0:
            prox_STVV = learner_STVV.detach()
        if step % max(updates, sampler.every) == 0:
            fresh = torch.randn(shape, generator=random, dtype=torch.float64)
            with torch.no_grad():
                sampler_STVV = sampler.logits(net, fixed, fresh).log_softmax(-1)
        learner_SB = game.at_tokens(learner_STVV.detach()).sum(-1)
        sampler_SB = game.at_tokens(sampler_STVV).sum(-1)
        chances_SB = sampler_SB.exp()
        history.append(
            (
                (learner_SB.exp() * game.rewards_SB).sum(-1),
                (chances_SB * game.rewards_SB).sum(-1),
                (learner_SB.exp() * (learner_SB - sampler_SB)).sum(-1),
            )
        )
        if drawn is not None:
            picked = torch.multinomial(chances_SB, drawn, replacement=True, generator=random)
            once = torch.full_like(picked, 1 / drawn, dtype=torch.float64)
            chances_SB = torch.zeros_like(chances_SB).scatter_add(1, picked, once)
        baseline_S1 = (chances_SB * game.rewards_SB).sum(-1, keepdim=True)
        pulls_SB = chances_SB * (game.rewards_SB - baseline_S1)
        optimizer.zero_grad()
        for positive, part_SB in ((True, pulls_SB.clamp(min=0)), (False, pulls_SB.clamp(max=0))):
            policies = (prox_STVV, learner_STVV, sampler_STVV)
            terms_SBT = game.objective(choice, *policies, positive)
            (-part_SB[..., None] * terms_SBT).sum().backward(retain_graph=positive)
        optimizer.step()
    return Trained(*(torch.stack(values) for values in zip(*history, strict=True)))


def training_table(seeds: int, steps: int, drawn: int | None) -> str:
    """*area* is the mean over the steps of the learner's reward; its differences are paired by seed,
    with their standard errors.
    """
    lines = [
        "| sampler | correction | at the end | sampler's | KL | area less that of none |",
        "|---" * 6 + "|",
    ]
    for name, sampler in SAMPLERS.items():
        none_S: Tensor | None = None
        for label, choice in CHOICES.items():
            found = train(sampler, choice, seeds, steps, drawn)
            area_S = found.learner.mean(0)
            none_S = area_S if none_S is None else none_S
            ends = [float(values[-1].mean()) for values in (found.learner, found.sampler)]
            lines.append(
                f"| {name} | {label} | {ends[0]:.3f} | {ends[1]:.3f} | "
                f"{float(found.kl[-steps // 4 :].mean()):.1e} | {difference(area_S, none_S)} |"
            )
    return "\n".join(lines)


def clipped_table(seeds: int, steps: int, rates: tuple[float, ...] = (0.03, 0.1)) -> str:
    """Of ppo, by rate, where the policy moves far from the proximal one: area less that of none."""
    names = ("INT8, outliers", "INT4", "16 updates old")
    columns = [(name, rate) for name in names for rate in rates]
    lines = ["| correction | " + " | ".join(f"{name}, {rate}" for name, rate in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    none: dict[tuple[str, float], Tensor] = {}
    for label, choice in CLIPPED.items():
        cells = []
        for name, rate in columns:
            found = train(SAMPLERS[name], choice, seeds, steps, DRAWN, UPDATES, rate)
            area_S = found.learner.mean(0)
            cells.append(difference(area_S, none.setdefault((name, rate), area_S)))
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(area_S: Tensor, none_S: Tensor) -> str:
    """The mean and its standard error."""
    gap_S = area_S - none_S
    return f"{float(gap_S.mean()):+.4f} ({float(gap_S.std()) / math.sqrt(len(gap_S)):.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("Bias / deviation at a batch of 256 of one step:\n", step_table(), sep="\n", flush=True)
    for drawn in (None, DRAWN):
        how = "the expected gradient" if drawn is None else f"{drawn} responses a step"
        table = training_table(given.seeds, given.steps, drawn)
        print(f"\nTraining with {how}:\n", table, sep="\n", flush=True)
    clipped = clipped_table(given.seeds, given.steps)
    print(f"\nTraining with ppo, {UPDATES} updates a batch:\n", clipped, sep="\n", flush=True)


if __name__ == "__main__":
    main()
