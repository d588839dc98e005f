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
from loss_cases import batch_of, rows_of
from test_loss import CONFIGS, example

from megatron_rl.batch import Batch
from megatron_rl.config.correction_rules import check_objective
from megatron_rl.config.prox_pass import prox_readers
from megatron_rl.config.schema import (
    AdvantageConfig,
    CorrectionConfig,
    Estimator,
    LearnerSection,
    LossConfig,
    NonFinite,
    RejectRule,
    WeightConfig,
)
from megatron_rl.loss.policy_loss import LossInputs, count_totals, policy_loss
from megatron_rl.rollout_correction.correction import completed, correct

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
    return batch_of(inputs.mask_BT, sampler_BT, rewards_B=rewards_B, groups_B=inputs.prompt_ids_B)


def update(
    batch: Batch,
    pi_BT: torch.Tensor,
    anchor_BT: torch.Tensor | None,
    loss: LossConfig,
    correction: CorrectionConfig,
    advantage: AdvantageConfig,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float], dict[str, float]]:
    """Loss, gradient and metrics of a step in two micro-batches, and of its correction."""
    found, advantages_B = correct(anchor_BT, batch, correction, advantage)
    everything = replace(
        example(),
        logprobs_BT=pi_BT,
        anchor_logprobs_BT=anchor_BT,
        sampler_logprobs_BT=batch.sampler_logprobs_BT,
        advantages_B=advantages_B,
        weights_BT=found.weights_BT,
        mask_BT=found.mask_BT,
        denominator_mask_BT=found.denominator_mask_BT,
        selected_BT=None,
        ref_logprobs_BT=None,
        entropy_BT=None,
    )
    totals = count_totals(
        found.denominator_mask_BT, batch.groups_B, pi_BT.shape[1], found.weights_BT
    )
    parts = [
        policy_loss(
            rows_of(everything, [row for row in range(len(batch)) if row % 2 == half]),
            loss,
            totals,
            correction,
        )
        for half in (0, 1)
    ]
    total = parts[0][0] + parts[1][0]
    (gradient,) = torch.autograd.grad(total, pi_BT)
    metrics = {name: float(parts[0][1][name] + parts[1][1][name]) for name in parts[0][1]}
    if anchor_BT is None:
        seen_B1 = found.mask_BT.any(dim=1, keepdim=True)
        found = completed(
            found, pi_BT.detach().masked_fill(~seen_B1, math.nan), batch, correction, advantage
        )
    return total.detach(), gradient, metrics, found.metrics


@pytest.mark.parametrize(("loss", "correction"), CASES)
def test_the_same_update(loss: str, correction: str) -> None:
    moved = False
    for seed, advantage in enumerate(ADVANTAGES):
        inputs = example(seed, torch.float32)
        batch = scored(inputs, seed)
        pi_BT = inputs.logprobs_BT
        given = (CONFIGS[loss], CORRECTIONS[correction], advantage)
        value, gradient, metrics, _ = update(batch, pi_BT, pi_BT.detach(), *given)
        own_value, own_gradient, own_metrics, measured = update(batch, pi_BT, None, *given)
        assert torch.equal(value, own_value)
        assert torch.equal(gradient, own_gradient)
        assert own_metrics == metrics
        moved |= bool(gradient.any())
        # rows that nothing is trained on (no score, a lone survivor) are not seen by the update
        seen_B1 = correct(None, batch, *given[1:])[0].mask_BT.any(dim=1, keepdim=True)
        if not seen_B1.any():
            continue
        seen = batch.with_matrices(mask_BT=batch.mask_BT & seen_B1)
        assert measured == correct(pi_BT.detach(), seen, *given[1:])[0].metrics
    assert moved


def test_there_are_cases_of_every_kind() -> None:
    assert {correction for _, correction in CASES} == set(CORRECTIONS)
    assert {CONFIGS[loss].name for loss, _ in CASES} == {
        config.name
        for config in CONFIGS.values()
        if config.name not in ("clip_cov", "kl_cov", "vespo", "rollout_is")
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
    inputs = example()
    with pytest.raises(ValueError, match="logprobs of the whole"):
        correct(None, scored(inputs, 0), correction, AdvantageConfig())


def test_what_else_reads_them() -> None:
    plain = CorrectionConfig()
    assert prox_readers(plain, LossConfig(), LearnerSection(n_minibatches=2)) == [
        "learner.n_minibatches"
    ]
    assert prox_readers(plain, LossConfig(name="kl_cov"), LEARNER) == ["loss.name"]
    dropout = LearnerSection(megatron={"attention_dropout": 0.1, "hidden_dropout": 0.0})
    assert prox_readers(plain, LossConfig(), dropout) == ["learner.megatron.attention_dropout"]
