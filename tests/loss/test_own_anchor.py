"""Without an anchor the only update on a batch does what it does with one: to the last bit,
micro-batch by micro-batch.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from matrices import LossInputs, batch_of
from test_loss import CONFIGS, example

from megatron_rl.batch import Batch, Share
from megatron_rl.config.correction_rules import check_objective
from megatron_rl.config.schema import (
    AdvantageConfig,
    Config,
    CorrectionConfig,
    Estimator,
    LearnerSection,
    LossConfig,
    NonFinite,
    RejectRule,
    WeightConfig,
)
from megatron_rl.loss.policy_loss import count_totals, policy_loss
from megatron_rl.loss.prox_pass import prox_readers
from megatron_rl.loss.table import LOSSES
from megatron_rl.rollout_correction.correction import correct
from megatron_rl.step import CorrectedBatch

RULES = [
    RejectRule(stat="ratio", reduce="mean", low=0.9, high=1.1),
    RejectRule(level="token", stat="k3", high=0.02),
    RejectRule(stat="ratio", reduce="min", low=0.85, when="negative_advantage"),
]
LOCAL = {"rebaseline": False, "renormalize": False}
CORRECTIONS = {
    "none": CorrectionConfig(weight=WeightConfig(level="none")),
    "tis": CorrectionConfig(weight=WeightConfig(high=1.05)),
    "mask": CorrectionConfig(weight=WeightConfig(low=0.9, high=1.1, outside="zero")),
    "sequence": CorrectionConfig(weight=WeightConfig(level="sequence", high=1.2)),
    "geometric": CorrectionConfig(
        weight=WeightConfig(level="sequence", aggregate="geometric", high=1.05)
    ),
    "rules": CorrectionConfig(reject=RULES, **LOCAL),
    "a rule for the losers": CorrectionConfig(reject=RULES[2:], rebaseline=True, renormalize=False),
    **{
        f"non-finite {how}": CorrectionConfig(non_finite=how)
        for how in NonFinite
        if how != NonFinite.raise_
    },
}
ADVANTAGES = [
    AdvantageConfig(estimator=name)
    for name in (Estimator.grpo, Estimator.rloo, Estimator.reinforce_pp)
]
LEARNER = LearnerSection()
CASES = [
    (loss, correction)
    for loss, correction in itertools.product(CONFIGS, CORRECTIONS)
    if not prox_readers(CORRECTIONS[correction], CONFIGS[loss], LEARNER)
    and not check_objective(CORRECTIONS[correction], CONFIGS[loss])
]


def scored(inputs: LossInputs, seed: int) -> Batch:
    """Responses without score, tokens without sampler logprob, a group with one survivor."""
    random = torch.Generator().manual_seed(seed)
    rows, columns = inputs.mask_BT.shape
    sampler_BT = inputs.logprobs_BT.detach() + 0.1 * torch.randn(rows, columns, generator=random)
    sampler_BT[torch.rand(rows, columns, generator=random) < 0.05] = math.nan
    rewards_B = torch.rand(rows, generator=random)
    rewards_B[[1, 3]] = math.nan
    rest = {"groups_B": inputs.prompt_ids_B, "turns_BT": inputs.turns_BT}
    return batch_of(inputs.mask_BT, sampler_BT, rewards_B=rewards_B, **rest)


def update(
    config: Config, batch: Batch, pi_BT: torch.Tensor, anchored: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float], dict[str, float]]:
    """Loss, gradient and metrics of a step in two micro-batches, and of its correction."""
    anchor_N = pi_BT.detach().flatten() if anchored else None
    step = CorrectedBatch.corrected(config, Share.alone(batch), 0, anchor_N)
    targets = step.targets(None)
    counts_B = batch.responses.count(targets.denominator_mask_N)
    totals = count_totals(counts_B, batch.groups_B, pi_BT.shape[1])
    parts = [
        policy_loss(
            pi_BT[rows].flatten(), targets.rows(rows), config.loss, totals, config.correction
        )
        for rows in (torch.arange(half, len(batch), 2) for half in (0, 1))
    ]
    total = parts[0][0] + parts[1][0]
    (gradient,) = torch.autograd.grad(total, pi_BT)
    metrics = {name: float(parts[0][1][name] + parts[1][1][name]) for name in parts[0][1]}
    if not anchored:
        seen_B1 = targets.mask_N.view(pi_BT.shape).any(dim=1, keepdim=True)
        step = step.completed(pi_BT.detach().masked_fill(~seen_B1, math.nan).flatten())
    return total.detach(), gradient, metrics, step.correction.metrics


@pytest.mark.parametrize(("loss", "correction"), CASES)
def test_the_same_update(loss: str, correction: str) -> None:
    moved = False
    for seed, advantage in enumerate(ADVANTAGES):
        inputs = example(seed, torch.float32)
        batch = scored(inputs, seed)
        pi_BT = inputs.logprobs_BT
        config = Config(loss=CONFIGS[loss], correction=CORRECTIONS[correction], advantage=advantage)
        value, gradient, metrics, _ = update(config, batch, pi_BT, True)
        own_value, own_gradient, own_metrics, measured = update(config, batch, pi_BT, False)
        assert torch.equal(value, own_value)
        assert torch.equal(gradient, own_gradient)
        assert own_metrics == metrics
        moved |= bool(gradient.any())
        # rows that nothing is trained on (no score, a lone survivor) are not seen by the update
        given = config.correction, advantage
        mask_N = correct(Share.alone(batch), None, *given)[0].mask_N
        seen_B = mask_N.view(pi_BT.shape).any(dim=1)
        if not seen_B.any():
            continue
        seen_N = batch.mask_N & batch.responses.at_tokens(seen_B)
        seen = Share.alone(replace(batch, mask_N=seen_N))
        assert measured == correct(seen, pi_BT.detach().flatten(), *given)[0].metrics
    assert moved


def test_there_are_cases_of_every_kind() -> None:
    assert {correction for _, correction in CASES} == set(CORRECTIONS)
    assert {CONFIGS[loss].name for loss, _ in CASES} == {
        config.name
        for config in CONFIGS.values()
        if not (LOSSES[config.name].selects or LOSSES[config.name].against_sampler)
    }


@pytest.mark.parametrize(
    ("key", "correction"),
    {
        "correction.weight.target_ess": CorrectionConfig(weight=WeightConfig(target_ess=0.9)),
        "correction.weight.normalize": CorrectionConfig(weight=WeightConfig(normalize=True)),
        "correction.reject[0].budget": CorrectionConfig(
            reject=[RejectRule(stat="k2", reduce="mean", budget=0.1)], **LOCAL
        ),
        "correction.reject[0]": CorrectionConfig(
            reject=RULES[:1], rebaseline=True, renormalize=False
        ),
        "correction.reject[2]": CorrectionConfig(reject=RULES, rebaseline=False, renormalize=True),
    }.items(),
)
def test_what_looks_at_the_whole_batch_reads_the_proximal_logprobs(
    key: str, correction: CorrectionConfig
) -> None:
    assert key in prox_readers(correction, LossConfig(), LEARNER)


def test_what_else_reads_them() -> None:
    plain = CorrectionConfig()
    assert prox_readers(plain, LossConfig(), LearnerSection(n_minibatches=2)) == [
        "learner.n_minibatches"
    ]
    assert prox_readers(plain, LossConfig(name="kl_cov"), LEARNER) == ["loss.name"]
    dropout = LearnerSection(megatron={"attention_dropout": 0.1, "hidden_dropout": 0.0})
    assert prox_readers(plain, LossConfig(), dropout) == ["learner.megatron.attention_dropout"]
