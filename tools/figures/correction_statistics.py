"""Bias and variance of the corrections where both can be computed exactly, and the plot of the
documentation.

The policy is a table: token t depends on token t - 1 only, few enough tokens and steps that every
sequence can be listed. The sampler is the same table with noise on its logits. For each correction
this gives
- the expected gradient over all sequences, to compare with the true policy gradient,
- the variance of a gradient from one sequence,
- and what training with that expected gradient leads to.

    python tools/figures/correction_statistics.py figure.html

Shape legend: B all sequences, T positions, V tokens.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from megatron_rl.apps.reports.charts import PALETTE, add_line, layout
from megatron_rl.apps.reports.pages import PLOTLY
from megatron_rl.batch import Batch, UpdateInputs
from megatron_rl.config.schema import CorrectionConfig, LossConfig, WeightConfig
from megatron_rl.loss.policy_loss import count_totals, policy_loss
from megatron_rl.rollout_correction.correction import rollout_correction

VOCABULARY = 4
LENGTH = 4
REINFORCE = LossConfig(name="reinforce", reduction="seq_mean_token_sum")


@dataclass(frozen=True)
class Toy:
    """Logits of the learner, fixed noise that the sampler adds to them, a reward for every
    sequence.
    """

    logits_TVV: Tensor
    noise_TVV: Tensor
    sequences_BT: Tensor
    rewards_B: Tensor

    @property
    def previous_BT(self) -> Tensor:
        return torch.cat(
            [torch.zeros_like(self.sequences_BT[:, :1]), self.sequences_BT[:, :-1]], dim=1
        )

    def logprobs(self, logits_TVV: Tensor) -> Tensor:
        """log-probability of each token of each sequence."""
        steps_T = torch.arange(self.sequences_BT.shape[1])
        return logits_TVV.log_softmax(-1)[steps_T, self.previous_BT, self.sequences_BT]

    def scores(self) -> Tensor:
        """The gradient of each token's log-probability by the logits of its step: [B, T, V, V]."""
        count, length = self.sequences_BT.shape
        rows_B = torch.arange(count)
        previous_BT = self.previous_BT
        probs_TVV = self.logits_TVV.softmax(-1)
        found = torch.zeros(count, length, VOCABULARY, VOCABULARY, dtype=torch.float64)
        for t in range(length):
            score_BV = -probs_TVV[t, previous_BT[:, t]]
            score_BV[rows_B, self.sequences_BT[:, t]] += 1.0
            found[rows_B, t, previous_BT[:, t]] = score_BV
        return found

    @property
    def sampler_BT(self) -> Tensor:
        return self.logprobs(self.logits_TVV + self.noise_TVV)

    @property
    def sampler_prob_B(self) -> Tensor:
        return self.sampler_BT.sum(1).exp()

    def value(self) -> float:
        """The learner's expected reward."""
        return float((self.logprobs(self.logits_TVV).sum(1).exp() * self.rewards_B).sum())

    def true_gradient(self) -> Tensor:
        logits_TVV = self.logits_TVV.clone().requires_grad_()
        value = (self.logprobs(logits_TVV).sum(1).exp() * self.rewards_B).sum()
        return torch.autograd.grad(value, logits_TVV)[0]

    def moved(self, step_TVV: Tensor) -> Toy:
        return Toy(self.logits_TVV + step_TVV, self.noise_TVV, self.sequences_BT, self.rewards_B)


def make_toy(noise: float, seed: int = 0, length: int = LENGTH) -> Toy:
    generator = torch.Generator().manual_seed(seed)
    shape = (length, VOCABULARY, VOCABULARY)
    logits_TVV = 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)
    noise_TVV = noise * torch.randn(shape, generator=generator, dtype=torch.float64)
    sequences_BT = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=length)))
    rewards_B = torch.rand(len(sequences_BT), generator=generator, dtype=torch.float64)
    return Toy(logits_TVV, noise_TVV, sequences_BT, rewards_B.square())


def rows_of(sampler_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """Columns of responses to one empty prompt; each position is a token of one."""
    zeros_B = torch.zeros(len(mask_BT), dtype=torch.int64)
    return {
        "prompt_lengths_B": zeros_B,
        "response_lengths_B": zeros_B + mask_BT.shape[1],
        "groups_B": zeros_B,
        "mask_N": mask_BT.flatten(),
        "sampler_logprobs_N": sampler_BT.flatten(),
    }


def weights_of(
    prox_BT: Tensor,
    sampler_BT: Tensor,
    mask_BT: Tensor,
    weight: WeightConfig,
    turns_N: Tensor | None = None,
) -> Tensor:
    rows = rows_of(sampler_BT, mask_BT)
    batch = Batch(
        **rows,
        rewards_B=rows["groups_B"],
        versions_B=rows["groups_B"],
        tokens_P=torch.zeros(mask_BT.numel()),
        turns_N=turns_N,
    )
    found = rollout_correction(batch, prox_BT.flatten(), CorrectionConfig(weight=weight))
    return found.weights_N.view(prox_BT.shape)


def correct(toy: Toy, weight: WeightConfig) -> Tensor:
    """The weights of all sequences."""
    mask_BT = torch.ones_like(toy.sequences_BT, dtype=torch.bool)
    return weights_of(toy.logprobs(toy.logits_TVV), toy.sampler_BT, mask_BT, weight)


def loss_gradient(toy: Toy, weights_BT: Tensor, advantages_B: Tensor) -> Tensor:
    """The ascent direction of `policy_loss` for all sequences."""
    logits_TVV = toy.logits_TVV.clone().requires_grad_()
    logprobs_N = toy.logprobs(logits_TVV).flatten()
    rows = rows_of(toy.sampler_BT, torch.ones_like(weights_BT, dtype=torch.bool))
    targets = UpdateInputs(
        **rows,
        anchor_logprobs_N=logprobs_N.detach(),
        ref_logprobs_N=None,
        advantages_B=advantages_B,
        weights_N=weights_BT.flatten(),
        denominator_mask_N=rows["mask_N"],
    )
    totals = count_totals(targets.response_lengths_B, targets.groups_B, LENGTH)
    loss, _ = policy_loss(logprobs_N, targets, REINFORCE, totals)
    return -torch.autograd.grad(loss, logits_TVV)[0]


def mult_prob_error(toy: Toy) -> float:
    """The expected `rollout_corr/mult_prob_error` of a batch from the sampler."""
    d_BT = toy.logprobs(toy.logits_TVV) - toy.sampler_BT
    return float((toy.sampler_prob_B * d_BT.abs().exp().mean(dim=1)).sum())


def mean_reward(toy: Toy) -> float:
    """Mean reward of what the sampler draws: the baseline of the tables and of training."""
    return float((toy.sampler_prob_B * toy.rewards_B).sum())


def expected_gradient(toy: Toy, weight: WeightConfig, baseline: float = 0.0) -> Tensor:
    """The mean gradient over what the sampler would draw: every sequence, counted by its
    probability.
    """
    count = len(toy.sequences_BT)
    return loss_gradient(
        toy, correct(toy, weight), (toy.rewards_B - baseline) * toy.sampler_prob_B * count
    )


def gradient_moments(toy: Toy, weight: WeightConfig, baseline: float = 0.0) -> tuple[float, float]:
    """(squared bias, variance) of the gradient from one sampled sequence, summed over
    parameters.
    """
    coefficients_BT = correct(toy, weight).double() * (toy.rewards_B - baseline)[:, None]
    mean, variance = moments(toy.scores(), coefficients_BT, toy.sampler_prob_B)
    return float((mean - toy.true_gradient()).square().sum()), variance


def moments(scores: Tensor, coefficients_BT: Tensor, chances_B: Tensor) -> tuple[Tensor, float]:
    """Mean and variance of the gradient in which each token's score is multiplied by its
    coefficient.
    """
    return mean_and_variance(scores * coefficients_BT[:, :, None, None], chances_B)


def mean_and_variance(gradients: Tensor, chances_B: Tensor) -> tuple[Tensor, float]:
    """Mean, and variance summed over parameters, of the gradients of sequences."""
    chances = chances_B[:, None, None, None]
    mean = (gradients * chances).sum(0)
    return mean, float(((gradients - mean).square() * chances).sum())


def relative_bias(toy: Toy, weight: WeightConfig, baseline: float = 0.0) -> float:
    """|E[gradient] - true| / |true|."""
    true = toy.true_gradient()
    return float((expected_gradient(toy, weight, baseline) - true).norm() / true.norm())


def train(toy: Toy, weight: WeightConfig, steps: int, rate: float) -> list[float]:
    """The learner's value while it follows the expected gradient of a correction, with the mean as
    baseline.
    """
    values = [toy.value()]
    for _ in range(steps):
        toy = toy.moved(rate * expected_gradient(toy, weight, mean_reward(toy)))
        values.append(toy.value())
    return values


NONE = WeightConfig(level="none")
TOKEN = WeightConfig(level="token", high=None)
TOKEN_TIS = WeightConfig(level="token", high=2.0)
GEOMETRIC = WeightConfig(level="sequence", aggregate="geometric", high=None)
SEQUENCE = WeightConfig(level="sequence", high=None)
SEQUENCE_TIS = WeightConfig(level="sequence", high=5.0)
KINDS = {
    "no correction": NONE,
    "token": TOKEN,
    "token, cap 2": TOKEN_TIS,
    "sequence, geometric": GEOMETRIC,
    "sequence, product": SEQUENCE,
    "sequence, product, cap 5": SEQUENCE_TIS,
}
COLORS = {"no correction": "#b4443c", "token, cap 2": "#3b6fb6", "sequence, product": "#3d8c57"}
LENGTHS = (2, 3, 4, 5, 6)
CAPS = [1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0, 10.0, 16.0, 32.0, 64.0]


def table() -> str:
    """Relative bias, in percent, by size of the noise: what docs/concepts/rollout-correction.md shows."""
    noises = (0.02, 0.1, 0.3, 1.0)
    lines = [
        "| weight | " + " | ".join(f"noise {noise}" for noise in noises) + " |",
        "|---" * 5 + "|",
    ]
    errors = (f"{mult_prob_error(make_toy(noise)):.2f}" for noise in noises)
    lines.append("| *`mult_prob_error` at this noise* | " + " | ".join(errors) + " |")
    for name, weight in KINDS.items():
        cells = []
        for noise in noises:
            toy = make_toy(noise)
            cells.append(f"{100 * relative_bias(toy, weight, mean_reward(toy)):.1f} %")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_length() -> str:
    """The bias of token weights and of none as responses get longer, mean of a few toys."""
    lines = ["| steps | " + " | ".join(map(str, LENGTHS)) + " |", "|---" * (len(LENGTHS) + 1) + "|"]
    for name in ("no correction", "token"):
        cells = []
        for length in LENGTHS:
            toys = [make_toy(0.1, seed, length) for seed in range(4)]
            cells.append(
                f"{25 * sum(relative_bias(toy, KINDS[name], mean_reward(toy)) for toy in toys):.0f} "
                "%"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def best_caps() -> str:
    """The cap on the product with the smallest squared bias plus variance, for several batch
    sizes.
    """
    toy = make_toy(1.0)
    moments = [
        gradient_moments(toy, WeightConfig(level="sequence", high=cap), mean_reward(toy))
        for cap in CAPS
    ]

    def best(batch: int) -> float:
        return min(
            (bias + variance / batch, cap)
            for cap, (bias, variance) in zip(CAPS, moments, strict=True)
        )[1]

    return "best cap: " + ", ".join(
        f"{best(batch):g} at batch {batch}" for batch in (256, 1024, 4096, 16384)
    )


BATCH = 256
UPDATES = 100


def figure() -> go.Figure:
    """Two charts: bias against deviation as the cap rises, and the value reached in training."""
    toy = make_toy(1.0)
    scale = float(toy.true_gradient().norm())
    moments = [
        gradient_moments(toy, WeightConfig(level="sequence", high=cap), mean_reward(toy))
        for cap in CAPS
    ]
    titles = (
        "Sequence weights: error of the gradient, relative",
        "Expected reward of the learner while it trains",
    )
    drawn = make_subplots(cols=2, subplot_titles=titles)
    bias = [math.sqrt(square) / scale for square, _ in moments]
    deviation = [math.sqrt(variance / BATCH) / scale for _, variance in moments]
    add_line(
        drawn,
        CAPS,
        bias,
        PALETTE[4],
        name="bias",
        row=1,
        col=1,
    )
    add_line(
        drawn,
        CAPS,
        deviation,
        PALETTE[0],
        name=f"deviation at batch {BATCH}",
        row=1,
        col=1,
    )
    start = make_toy(1.0, seed=1)
    for name, color in COLORS.items():
        values = train(start, KINDS[name], UPDATES, rate=4.0)
        add_line(
            drawn,
            range(UPDATES + 1),
            values,
            color,
            name=name,
            row=1,
            col=2,
        )
    layout(drawn, x_title="update", legend=True)
    drawn.update_xaxes(type="log", title_text="cap on the product (log scale)", col=1)
    return drawn.update_layout(height=320, margin_t=70, legend_y=1.12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "output", type=Path, nargs="?", help="a page with the figure; without it, the tables alone"
    )
    output = parser.parse_args().output
    torch.set_num_threads(1)
    print(table(), by_length(), best_caps(), sep="\n\n")
    if output:
        output.write_text(figure().to_html(config=PLOTLY), encoding="utf-8")


if __name__ == "__main__":
    main()
