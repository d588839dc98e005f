"""Edges of the correction, the losses and the advantages: values by hand where a comparison or a default decides.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loss_cases import BYPASS, LOG2, inputs_of

from megatron_rl.advantage import AdvantageConfig, group_advantages, overlong_penalty
from megatron_rl.config.correction_rules import check_correction, check_loss
from megatron_rl.config.schema import Format
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.loss.policy_loss import LossConfig, LossInputs, policy_loss
from megatron_rl.rollout_correction import (
    CorrectionConfig,
    RejectRule,
    WeightConfig,
    apply_conditional_rules,
    keep_rows,
    rollout_correction,
)
from megatron_rl.rollout_correction.breakdown import breakdowns, mismatch_by_age, mismatch_by_format
from megatron_rl.rollout_correction.learner_reward import learner_reward
from megatron_rl.types import Batch


def inputs(shift: list[list[float]], advantages: list[float], anchor: float = -2.0, **changes: object) -> LossInputs:
    """A policy that moved by `shift` from the anchor; one token per row and column, each of weight 1."""
    anchor_BT = torch.full_like(torch.tensor(shift), anchor)
    mask_BT = torch.ones_like(anchor_BT).bool()
    pi_BT = (anchor_BT + torch.tensor(shift)).requires_grad_()
    weights = SimpleNamespace(weights_BT=mask_BT.float(), mask_BT=mask_BT, denominator_mask_BT=mask_BT)
    found = inputs_of(pi_BT, anchor_BT, anchor_BT, weights, torch.tensor(advantages))
    return replace(found, **changes)  # type: ignore[arg-type]


UP_AND_DOWN = [1.0, 1.0, 1.0, -1.0, -1.0, 0.0, 0.0, 0.0]  # three tokens above the band, two below, three inside
DOUBLED = [LOG2 * size for size in UP_AND_DOWN]  # a probability of 0.135 doubles or halves
NARROW = {"clip_low": 0.05, "clip_high": 0.05}


@pytest.mark.parametrize(
    ("names", "keys", "shift", "by_advantage"),
    [
        # bounds that only stop what gains, bounds on the ratio itself, and a trust region
        (("ppo", "gmpo"), {}, UP_AND_DOWN, {1.0: (0.375, 0.0), -1.0: (0.0, 0.25), 0.0: (0.0, 0.0)}),
        (("cispo", "rollout_is"), {}, UP_AND_DOWN, {1.0: (0.375, 0.25), -1.0: (0.375, 0.25)}),
        (("dppo",), NARROW, DOUBLED, {1.0: (0.375, 0.0), -1.0: (0.0, 0.25)}),
        # bounds that a ratio of one touches: it is clipped from outside the band, or from an open band's edge on
        (("cispo", "ppo"), {"clip_low": 0.0, "clip_high": 0.0}, [0.0], {1.0: (0.0, 0.0)}),
        (("rollout_is",), {"clip_low": 0.0, "clip_high": 0.5}, [0.0], {1.0: (0.0, 1.0)}),
        (("rollout_is",), {"clip_low": 0.5, "clip_high": 0.0}, [0.0], {1.0: (1.0, 0.0)}),
    ],
)
def test_clip_fractions(
    names: tuple[str, ...], keys: dict[str, float], shift: list[float], by_advantage: dict[float, tuple[float, float]]
) -> None:
    for name, (advantage, wanted) in itertools.product(names, by_advantage.items()):
        metrics = policy_loss(inputs([shift], [advantage]), LossConfig(name=name, **keys))[1]  # type: ignore[arg-type]
        found = tuple(float(metrics[f"loss/clip_fraction_{side}"]) for side in ("high", "low"))
        assert found == wanted, (name, advantage)


def test_dual_clip_fraction() -> None:
    """Ratio e^2 above c = 3 for one token of four, and for negative advantages only."""
    for advantage, fraction in ((-1.0, 0.25), (1.0, 0.0)):
        metrics = policy_loss(inputs([[2.0, 1.0, 0.0, -2.0]], [advantage]), LossConfig(dual_clip=3.0))[1]
        assert float(metrics["loss/dual_clip_fraction"]) == fraction


def test_a_binary_kl_of_certain_tokens() -> None:
    """From 1 to 0.5 it is log 2, from 0.5 to 1 without bound: both leave a region of 0.44."""
    region = {"name": "dppo", "trust_region": "binary_kl", "clip_low": 0.44, "clip_high": 0.44}
    certain = policy_loss(inputs([[-LOG2]], [-1.0], anchor=0.0), LossConfig(**region))[1]  # type: ignore[arg-type]
    assert float(certain["loss/clip_fraction_low"]) == 1.0
    becoming = policy_loss(inputs([[LOG2]], [1.0], anchor=-LOG2), LossConfig(**region))[1]  # type: ignore[arg-type]
    assert float(becoming["loss/clip_fraction_high"]) == 1.0


def test_an_empty_row_of_a_prompt_that_is_counted_nowhere() -> None:
    mask_BT = torch.tensor([[True], [False]])
    two = inputs([[0.0], [0.0]], [1.0, 1.0], mask_BT=mask_BT, denominator_mask_BT=mask_BT)
    two = replace(two, prompt_ids_B=torch.tensor([3, 9]))
    loss, _ = policy_loss(two, LossConfig(reduction="prompt_mean"))
    assert float(loss.detach()) == -1.0


def test_metrics_carry_no_gradient() -> None:
    config = LossConfig(kl_coef=0.1, entropy_coef=0.1)
    ones_BT = torch.ones(1, 2).requires_grad_()
    metrics = policy_loss(inputs([[0.1, 0.2]], [1.0], ref_logprobs_BT=-ones_BT, entropy_BT=ones_BT), config)[1]
    assert not any(value.requires_grad for value in metrics.values())


def test_the_loss_corrects_under_the_sampler_anchor_only() -> None:
    """A weight of 5, which a correction formed here would replace by 1 (pi is mu)."""
    one = inputs([[0.0]], [1.0], weights_BT=torch.full((1, 1), 5.0))
    config = LossConfig(name="reinforce")
    assert float(policy_loss(one, config, None, CorrectionConfig())[0].detach()) == 10.0
    bypass = replace(BYPASS, weight=WeightConfig())
    assert float(policy_loss(one, config, None, bypass)[0].detach()) == 2.0


def test_before_the_loss_of_the_sampler_anchor_faults_are_counted_and_rows_rejected() -> None:
    mu_BT = torch.tensor([[-1.0, -1.0], [-1.0, math.nan], [-1.0, -1.0]])
    mask_BT = torch.tensor([[1, 1], [1, 1], [0, 0]])
    found = rollout_correction(None, mu_BT, mask_BT, replace(BYPASS, non_finite="reject"))
    assert found.metrics == {"rollout_corr/non_finite_sampler": 1.0}
    assert found.rejected_B.tolist() == [False, True, False]


def test_metrics_are_plain_numbers() -> None:
    """They are written as JSON."""
    config = CorrectionConfig(
        weight=WeightConfig(target_ess=0.9), reject=[RejectRule(stat="ratio", reduce="max", high=3.0)]
    )
    p_BT, mu_BT = torch.tensor([[-1.0, math.nan], [-2.0, -1.5]]), torch.full((2, 2), -1.0)
    found = rollout_correction(p_BT, mu_BT, torch.ones(2, 2), config)
    metrics = apply_conditional_rules(found, torch.ones(2), config).metrics
    metrics |= learner_reward(torch.ones(2), p_BT, mu_BT, torch.ones(2, 2))
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "none"])
def test_advantages_are_float32(estimator: str) -> None:
    rewards_N = torch.tensor([1.0, 0.0], dtype=torch.float64)
    advantages_N, keep_N = group_advantages(rewards_N, torch.zeros(2), torch.ones(2), AdvantageConfig(estimator))
    assert (advantages_N.dtype, keep_N.dtype) == (torch.float32, torch.bool)


def test_maxrl_refuses_one_negative_reward_among_others() -> None:
    with pytest.raises(ValueError, match=r"the lowest is -1\.0"):
        group_advantages(torch.tensor([2.0, -1.0]), torch.zeros(2), torch.ones(2), AdvantageConfig("maxrl"))


def test_the_penalty_of_an_overlong_answer_is_one() -> None:
    assert overlong_penalty([100, 90], max_tokens=100, buffer=20).tolist() == [-1.0, -0.5]


def test_a_small_batch_selects_one_token() -> None:
    config = LossConfig(name="kl_cov", cov_fraction=1e-4)
    selected_BT = select_by_covariance(torch.tensor([[-1.0, -2.0]]), torch.ones(1), torch.ones(1, 2), config, seed=0)
    assert selected_BT is not None
    assert int(selected_BT.sum()) == 1


def test_a_row_newer_than_the_policy_is_not_stale() -> None:
    logprobs_BT = -torch.ones(2, 1)
    slices = breakdowns(
        logprobs_BT, logprobs_BT, torch.ones(2, 1), versions_BT=torch.tensor([[3], [5]]), policy_version=4
    )
    assert [(one.label, one.tokens) for one in slices if one.by == "staleness"] == [("0", 1), ("1", 1)]


def test_a_fleet_of_one_format_has_no_mismatch_by_format() -> None:
    logprobs_BT, zeros_B = -torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)
    one = Batch(
        tokens_BS=torch.zeros(2, 2, dtype=torch.int64),
        prompt_lengths_B=zeros_B + 1,
        response_lengths_B=zeros_B + 1,
        mask_BT=torch.ones(2, 1, dtype=torch.bool),
        sampler_logprobs_BT=logprobs_BT,
        rewards_B=torch.zeros(2),
        groups_B=zeros_B,
        versions_B=zeros_B,
    )
    int8 = list(Format).index(Format.int8)
    assert mismatch_by_format(logprobs_BT, one) == {}
    assert mismatch_by_format(logprobs_BT, replace(one, formats_B=zeros_B + int8)) == {}
    mixed = mismatch_by_format(logprobs_BT, replace(one, formats_B=torch.tensor([0, int8])))
    assert mixed["rollout_corr/int8/token_fraction"] == 0.5
    assert mismatch_by_age(logprobs_BT, one, version=0) == mismatch_by_age(None, one, version=1) == {}
    apart = mismatch_by_age(torch.tensor([[-1.0], [-0.9]]), replace(one, versions_B=torch.tensor([4, 2])), version=4)
    assert apart["rollout_corr/fresh/kl"] == 0
    assert apart["rollout_corr/stale/kl"] == pytest.approx(-0.1)
    assert apart["rollout_corr/stale/token_fraction"] == 0.5
    assert "rollout_corr/fresh/kl" not in mismatch_by_age(logprobs_BT, one, version=3)


@pytest.mark.parametrize(
    "weight",
    [
        WeightConfig(target_ess=1.0),
        WeightConfig(target_ess=0.9, high=None),
        WeightConfig(target_ess=0.9, high=1.0),
        WeightConfig(target_ess=0.9, low=0.5),
        WeightConfig(target_ess=0.9, low=1.0),
        WeightConfig(low=0.0),
    ],
)
def test_weights_at_the_edge_of_what_is_allowed(weight: WeightConfig) -> None:
    assert check_correction(CorrectionConfig(weight=weight)) == []


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (CorrectionConfig(weight=WeightConfig(outside="drop")), "correction.weight.outside is drop"),  # type: ignore[arg-type]
        (
            CorrectionConfig(reject=[RejectRule(stat="ratio", reduce="median", high=2.0)]),  # type: ignore[arg-type]
            "correction.reject[0].reduce is median",
        ),
        (
            CorrectionConfig(reject=[RejectRule(level="token", stat="m2", budget=0.0)]),
            "correction.reject[0].budget is 0.0",
        ),
        (CorrectionConfig(reject=[RejectRule(stat="k2", reduce="sum", high=0.0)]), "correction.reject[0].high is 0.0"),
    ],
)
def test_corrections_just_beyond_it(config: CorrectionConfig, path: str) -> None:
    (found,) = check_correction(config)
    assert found.startswith(path)


@pytest.mark.parametrize(
    "keys",
    [
        {"dual_clip": 1.1},
        {"cov_kl_coef": 0.0},
        {"cov_kl_coef": 0.5},
        {"cov_fraction": 1.0},
        {"clip_low": 1.0},
        {"clip_low": 0.0, "clip_high": 0.0, "kl_coef": 0.0},
        {"name": "cispo", "absolute": True, "clip_low": 2.0},
    ],
)
def test_losses_at_the_edge_of_what_is_allowed(keys: dict) -> None:
    assert check_loss(LossConfig(**keys)) == []


@pytest.mark.parametrize("keys", [{"dual_clip": 1.0}, {"tau_negative": 0.0}, {"cov_low": 5.0, "cov_high": 5.0}])
def test_losses_just_beyond_it(keys: dict) -> None:
    (found,) = check_loss(LossConfig(**keys))
    assert found.startswith(f"loss.{next(iter(keys))} is")


def test_a_cap_counts_tokens_that_weigh_one_whatever_it_is() -> None:
    """Ratios 8, 1/2 and one without a logprob: (1 + c + 1/2)^2 = 0.8 x 3 (1 + c^2 + 1/4) at c = 1.854."""
    mu_BT = torch.tensor([[0.0, 0.0, math.nan]])
    prox_BT = torch.tensor([[3 * LOG2, -LOG2, 0.0]])
    config = CorrectionConfig(weight=WeightConfig(target_ess=0.8, high=None), non_finite="one")
    metrics = rollout_correction(prox_BT, mu_BT, torch.ones(1, 3), config).metrics
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.8, abs=1e-4)
    assert metrics["rollout_corr/cap"] == pytest.approx(1.854, abs=1e-3)


def test_a_partly_masked_micro_batch_is_not_an_empty_one() -> None:
    some = inputs([[0.0, 0.0]], [1.0], mask_BT=torch.tensor([[True, False]]))
    assert float(policy_loss(some, LossConfig())[1]["loss/empty_microbatches"]) == 0.0


def test_the_reward_of_an_overwhelming_ratio() -> None:
    """A product of e^2000 leaves only its own row."""
    p_NT = torch.tensor([[0.0], [2000.0]])
    found = learner_reward(torch.tensor([1.0, 3.0]), p_NT, torch.zeros(2, 1), torch.ones(2, 1))
    assert found["reward/learner_estimate"] == pytest.approx(3.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_that_leave_later_do_not_move_the_solved_cap(level: str) -> None:
    """What the others weigh was decided with everybody present; with a cap of 8 again it would be more."""
    d_BT = torch.tensor([[2.0, 0.0], [0.1, -0.1], [1.5, 0.2], [0.0, 0.1]])
    config = CorrectionConfig(weight=WeightConfig(level=level, high=8.0, target_ess=0.95))
    found = rollout_correction(d_BT, torch.zeros_like(d_BT), torch.ones_like(d_BT), config)
    assert found.cap == found.metrics["rollout_corr/cap"] < 3.0
    fewer = keep_rows(found, torch.tensor([True, False, True, True]), config)
    assert torch.equal(fewer.weights_BT[[0, 2, 3]], found.weights_BT[[0, 2, 3]])
    assert fewer.metrics["rollout_corr/rollout_is_max"] == pytest.approx(found.cap)


ZEROS_BT, MASK_BT = torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("prox", "mu", "mask", "words"),
    [
        (slice(4), slice(4), slice(2), r"proximal logprobs are \[4, 3\] and the mask is \[2, 3\]"),
        (slice(4), slice(1), slice(4), r"sampler logprobs are \[1, 3\] and the mask is \[4, 3\]"),
        (slice(1), slice(4), slice(4), r"proximal logprobs are \[1, 3\]"),
        (None, slice(1), slice(4), r"sampler logprobs are \[1, 3\]"),
    ],
)
def test_every_position_needs_its_own_numbers(prox: slice | None, mu: slice, mask: slice, words: str) -> None:
    config = BYPASS if prox is None else CorrectionConfig()
    prox_BT = None if prox is None else ZEROS_BT[prox]
    with pytest.raises(ValueError, match=words):
        rollout_correction(prox_BT, ZEROS_BT[mu], MASK_BT[mask], config)


@pytest.mark.parametrize("shape", [(3,), (), (4, 1)])
def test_a_sampler_logprob_per_row_or_position_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one logprob and one mask entry"):
        rollout_correction(ZEROS_BT, torch.zeros(shape), MASK_BT, CorrectionConfig())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            CorrectionConfig(weight=WeightConfig(level="sentence")),
            "correction.weight.level is sentence: use one of none",
        ),
        (CorrectionConfig(weight=WeightConfig(aggregate="mean")), "correction.weight.aggregate is mean"),
        (CorrectionConfig(weight=WeightConfig(outside="mask")), "correction.weight.outside is mask"),
        (CorrectionConfig(non_finite="ignore"), "correction.non_finite is ignore"),
        (CorrectionConfig(anchor="rollout"), "correction.anchor is rollout"),
        (
            CorrectionConfig(reject=[RejectRule(level="row", stat="k1", high=1.0)]),
            r"correction.reject\[0\].level is row",
        ),
        (CorrectionConfig(reject=[RejectRule(stat="k4", high=1.0)]), r"reject\[0\].stat is k4"),
        (CorrectionConfig(reject=[RejectRule(stat="k1", reduce="median", high=1.0)]), "reduce is median"),
        (CorrectionConfig(reject=[RejectRule(stat="k1", reduce="sum", high=1.0, when="always")]), "when is always"),
    ],
)
def test_an_unknown_word_is_no_other_word(config: CorrectionConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rollout_correction(ZEROS_BT, ZEROS_BT, MASK_BT, config)
    bypass = replace(config, anchor="sampler") if config.anchor == "prox" else config
    with pytest.raises(ValueError, match=words):
        rollout_correction(None, ZEROS_BT, MASK_BT, bypass)
