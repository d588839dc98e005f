"""Whole distributions of sampler, proximal policy and policy, for tests of score centering; and the
definition of the centered gradient, one token at a time.

Shape legend: B sequences, T response positions, N response tokens, V words, E top tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from loss_oracle import FORMULAS, Row, Token
from torch import Tensor

from megatron_rl.batch import Batch, UpdateInputs
from megatron_rl.config.schema import CorrectionConfig, LossConfig, RejectRule
from megatron_rl.loss.policy_loss import count_totals, policy_loss
from megatron_rl.rollout_correction.correction import rollout_correction

B = 4
T = 5
WORDS = 8


@dataclass(frozen=True)
class Example:
    """Log-probabilities of every word at every token."""

    sampler_NV: Tensor
    prox_NV: Tensor
    logits_NV: Tensor  # of the policy
    labels_N: Tensor
    advantages_B: Tensor
    mask_N: Tensor

    @property
    def rows(self) -> int:
        return len(self.advantages_B)

    @property
    def length(self) -> int:
        return len(self.labels_N) // self.rows

    @cached_property
    def tables(self) -> dict[str, list[list[float]]]:
        """Log-probabilities as plain numbers."""
        policy_NV = self.logits_NV.log_softmax(dim=1)
        named = {"sampler": self.sampler_NV, "prox": self.prox_NV, "policy": policy_NV}
        return {name: values_NV.tolist() for name, values_NV in named.items()}


def example(
    seed: int,
    rows: int = B,
    length: int = T,
    words: int = WORDS,
    sharpness: float = 1.0,
    moved: float = 0.4,
) -> Example:
    """`moved`: how far the policy has left the proximal one."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    logits_NV = sharpness * normal(rows * length, words)
    sampler_NV = (logits_NV + 0.5 * normal(rows * length, words)).log_softmax(dim=1)
    policy_NV = logits_NV + moved * normal(rows * length, words)
    labels_N = torch.multinomial(sampler_NV.exp(), 1, generator=random).flatten()
    mask_N = torch.ones(rows * length, dtype=torch.bool)
    if len(mask_N) > 3:
        mask_N[2] = False  # text of a tool
    return Example(
        sampler_NV, logits_NV.log_softmax(dim=1), policy_NV, labels_N, normal(rows), mask_N
    )


def top_ids(one: Example, size: int) -> Tensor:
    """[N, size]: the sampler's most likely words, most likely first."""
    return one.sampler_NV.topk(size, dim=1).indices


def batch_of(one: Example, size: int) -> Batch:
    ids_NM = top_ids(one, size)
    counts_N = torch.full_like(one.labels_N, size) * one.mask_N
    kept_NM = one.mask_N[:, None].expand_as(ids_NM)
    zeros_B = torch.zeros(one.rows, dtype=torch.int64)
    return Batch(
        prompt_lengths_B=zeros_B + 1,
        response_lengths_B=zeros_B + one.length,
        tokens_P=torch.nn.functional.pad(one.labels_N.view(one.rows, -1), (1, 0)).flatten().int(),
        rewards_B=torch.zeros(one.rows),
        groups_B=zeros_B,
        versions_B=zeros_B,
        mask_N=one.mask_N,
        sampler_logprobs_N=at_labels(one, one.sampler_NV),
        top_counts_N=counts_N.short(),
        top_ids_E=ids_NM[kept_NM].int(),
        top_logprobs_E=one.sampler_NV.gather(1, ids_NM)[kept_NM],
    )


def at_labels(one: Example, logprobs_NV: Tensor) -> Tensor:
    return logprobs_NV.gather(1, one.labels_N[:, None]).flatten()


def at_top(one: Example, logprobs_NV: Tensor, size: int) -> Tensor:
    return logprobs_NV.gather(1, top_ids(one, size))[one.mask_N].flatten()


def inputs_of(
    one: Example, correction: CorrectionConfig, size: int, prox_pass: bool = True
) -> UpdateInputs:
    """A loss's inputs after the correction."""
    batch = batch_of(one, size)
    prox_N = top_prox_E = None
    if prox_pass and correction.anchor == "prox":
        prox_N = at_labels(one, one.prox_NV)
        top_prox_E = at_top(one, one.prox_NV, size)

    def judge(counted_B: Tensor) -> tuple[Tensor, Tensor]:
        return one.advantages_B, torch.ones_like(counted_B)

    found = rollout_correction(batch, prox_N, correction, None, judge, top_prox_E)
    anchor_N = prox_N if correction.anchor == "prox" else batch.sampler_logprobs_N
    return UpdateInputs(
        prompt_lengths_B=batch.prompt_lengths_B,
        response_lengths_B=batch.response_lengths_B,
        groups_B=batch.groups_B,
        sampler_logprobs_N=batch.sampler_logprobs_N,
        anchor_logprobs_N=anchor_N,
        ref_logprobs_N=None,
        advantages_B=one.advantages_B,
        weights_N=found.weights_N,
        mask_N=found.mask_N,
        denominator_mask_N=found.denominator_mask_N,
        top_counts_N=batch.top_counts_N,
        top_logprobs_E=batch.top_logprobs_E,
        top_sampled_E=batch.top_sampled_E,
        top_anchor_E=top_prox_E,
        top_weights_E=found.top_weights_E,
        tail_weights_N=found.tail_weights_N,
    )


def gradient(
    one: Example,
    targets: UpdateInputs,
    loss: LossConfig,
    correction: CorrectionConfig,
    size: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[N, V]: the gradient of `policy_loss` by the policy's logits; metrics."""
    logits_NV = one.logits_NV.clone().requires_grad_()
    policy_NV = logits_NV.log_softmax(dim=1)
    counts_B = targets.responses.count(targets.denominator_mask_N)
    value, metrics = policy_loss(
        at_labels(one, policy_NV),
        targets,
        loss,
        count_totals(counts_B, targets.groups_B, one.length),
        correction,
        None,
        at_top(one, policy_NV, size),
    )
    return torch.autograd.grad(value, logits_NV)[0], metrics


def definition(one: Example, loss: LossConfig, correction: CorrectionConfig) -> Tensor:
    """[N, V]: the gradient of the centered loss, the sum over the whole vocabulary taken as it
    stands. Rejected tokens count in the denominators.
    """
    logits_NV = one.logits_NV.clone().requires_grad_()
    policy_NV = logits_NV.log_softmax(dim=1)
    total = policy_NV.sum() * 0.0
    for row in range(one.rows):
        places = [row * one.length + place for place in range(one.length)]
        places = [place for place in places if one.mask_N[place]]
        for index, place in enumerate(places):
            label = int(one.labels_N[place])
            own = _slope(one, row, places, index, label, loss, correction)
            total = total + own * policy_NV[place, label]
            centered = _without_clips_by_sign(loss)
            words = [
                _slope(one, row, places, index, word, centered, correction)
                for word in range(one.sampler_NV.shape[1])
            ]
            slopes_V = torch.tensor(words, dtype=torch.float64)
            if not _row_kept(one, row, places, correction):
                continue
            expected_V = one.sampler_NV[place].exp() * slopes_V
            total = total - (expected_V * policy_NV[place]).sum()
    return torch.autograd.grad(total / int(one.mask_N.sum()), logits_NV)[0]


def _without_clips_by_sign(loss: LossConfig) -> LossConfig:
    if loss.name not in ("ppo", "sapo", "dppo"):
        return loss
    return LossConfig(name="ppo", clip_low=1.0, clip_high=math.inf)


def _slope(
    one: Example,
    row: int,
    places: Sequence[int],
    index: int,
    word: int,
    loss: LossConfig,
    correction: CorrectionConfig,
) -> float:
    """The loss's derivative by log pi of a word, as if it had been sampled at this place."""
    sampled = [_difference(one, place, int(one.labels_N[place]), correction) for place in places]
    place = places[index]
    own = _difference(one, place, word, correction)
    advantage = float(one.advantages_B[row])
    for rule in correction.reject:
        if rule.when is not None and advantage >= 0:
            continue
        if rule.level in ("token", "prefix"):
            judged = [*sampled[:index], own] if rule.level == "prefix" else [own]
        else:
            judged = sampled
        if not _inside(rule, judged):
            return 0.0
    weight = _weight(correction, sampled, index, own, math.exp(one.tables["prox"][place][word]))
    policy = one.tables["policy"][place][word]
    anchor = one.tables["sampler" if correction.anchor == "sampler" else "prox"][place][word]
    token = Token(policy, anchor, advantage, weight, False, Row([], []))
    return FORMULAS[str(loss.name)](token, loss)[1]


def _row_kept(one: Example, row: int, places: Sequence[int], correction: CorrectionConfig) -> bool:
    sampled = [_difference(one, place, int(one.labels_N[place]), correction) for place in places]
    return all(
        _inside(rule, sampled)
        for rule in correction.reject
        if rule.level == "sequence" and (rule.when is None or one.advantages_B[row] < 0)
    )


def _difference(one: Example, place: int, word: int, correction: CorrectionConfig) -> float:
    learner = one.tables["policy" if correction.anchor == "sampler" else "prox"]
    return learner[place][word] - one.tables["sampler"][place][word]


def _inside(rule: RejectRule, d: Sequence[float]) -> bool:
    values = {
        "ratio": [math.exp(x) for x in d],
        "k3": [math.exp(x) - 1 - x for x in d],
    }[str(rule.stat)]
    found = values[0]
    if rule.reduce in ("max", "min"):
        found = max(values) if rule.reduce == "max" else min(values)
    elif rule.reduce is not None:
        n = len(d) if rule.reduce == "mean" else 1
        found = math.exp(sum(d) / n) if rule.stat == "ratio" else sum(values) / n
    return (rule.low is None or found >= rule.low) and (rule.high is None or found <= rule.high)


def _weight(
    correction: CorrectionConfig, sampled: Sequence[float], index: int, own: float, prob: float
) -> float:
    """`prob`: the learner's, before the updates."""
    weight = correction.weight
    if weight.level == "none":
        return 1.0
    d = {
        "token": [own],
        "prefix": [*sampled[:index], own],
        "sequence": list(sampled),
    }[str(weight.level)]
    ratio = math.exp(sum(d) / (len(d) if weight.aggregate == "geometric" else 1))
    low = weight.low or 0.0
    high = math.inf if weight.high is None else weight.high
    if weight.cap.confidence is not None:
        high = 1.0 + weight.cap.confidence * max(1.0 - prob, weight.cap.floor)
    if weight.outside == "zero":
        return ratio if low <= ratio <= high else 0.0
    return min(max(ratio, low), high)


def centered(**changes: Any) -> CorrectionConfig:
    """A centered correction whose denominators count rejected tokens."""
    config = CorrectionConfig(center="top_logprobs", renormalize=False, rebaseline=False)
    return replace(config, **changes)
