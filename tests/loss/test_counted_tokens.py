"""Counted but untrained tokens: their KL and entropy, and the means of `anchor: sampler`.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import BYPASS, inputs_of, rows_of
from matrices import Corrected, LossInputs, count_totals, policy_loss, rollout_correction

from megatron_rl.config.schema import CorrectionConfig, LossConfig, NonFinite, Reduction, RejectRule
from megatron_rl.loss.policy_loss import seen_tokens

B = 6
T = 5
ADVANTAGES_B = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -2.0])
MASK_BT = torch.arange(T)[None] < torch.tensor([T, 3, 1, 4, T, 2])[:, None]
COUNTED = LossConfig(kl_coef=0.3, entropy_coef=0.2, kl_on="counted")


def random_BT(seed: int) -> torch.Tensor:
    return torch.randn(
        B,
        T,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )


PROX_BT = -random_BT(0).abs() - 0.1
PI_BT = PROX_BT + 0.2 * random_BT(1)
MU_BT = PROX_BT + 0.3 * random_BT(2)


def inputs(
    found: Corrected, mu_BT: torch.Tensor = MU_BT, pi_BT: torch.Tensor = PI_BT
) -> LossInputs:
    some = inputs_of(
        pi_BT.clone().requires_grad_(),
        PROX_BT,
        mu_BT,
        found,
        ADVANTAGES_B.double(),
    )
    rest = {"ref_logprobs_BT": PROX_BT + 0.4 * random_BT(3), "entropy_BT": random_BT(4).abs()}
    return replace(some, **rest, prompt_ids_B=torch.arange(B) // 2)


def rejecting(**keys: Any) -> Corrected:
    rules = [
        RejectRule(stat="ratio", reduce="mean", low=0.9, high=1.1),
        RejectRule(stat="k1", reduce="mean", high=0.05, when="negative_advantage"),
    ]
    config = CorrectionConfig(reject=rules, rebaseline=False, **{"renormalize": False, **keys})
    return rollout_correction(
        PROX_BT, MU_BT, MASK_BT, config, judge=lambda counted_B: (ADVANTAGES_B, counted_B)
    )


def test_kl_and_entropy_count_rejected_tokens_and_the_policy_loss_does_not() -> None:
    """k3 and entropy are means over all response tokens, rejected ones included."""
    some = inputs(rejecting())
    assert 0 < int(some.mask_BT.sum()) < int(MASK_BT.sum())
    loss, metrics = policy_loss(some, COUNTED)
    s_BT = PI_BT - some.ref_logprobs_BT
    kl_BT = (-s_BT).exp() - 1 + s_BT
    n = int(MASK_BT.sum())
    assert float(metrics["loss/kl"]) == pytest.approx(float(kl_BT[MASK_BT].sum()) / n)
    assert float(metrics["loss/entropy"]) == pytest.approx(
        float(some.entropy_BT[MASK_BT].sum()) / n
    )
    trained = policy_loss(some, replace(COUNTED, kl_on="trained"))[1]
    assert metrics["loss/policy"] == trained["loss/policy"]
    assert trained["loss/kl"] < metrics["loss/kl"]
    (gradient,) = torch.autograd.grad(loss, some.logprobs_BT)
    alone_BT = MASK_BT & ~some.mask_BT
    torch.testing.assert_close(gradient[alone_BT], (0.3 * (1 - (-s_BT).exp()) / n)[alone_BT])
    assert not gradient[~MASK_BT].any()


@pytest.mark.parametrize("reduction", list(Reduction))
def test_counted_is_the_kl_of_a_batch_without_rejection(reduction: Reduction) -> None:
    config = replace(COUNTED, reduction=reduction)
    some = inputs(rejecting())
    all_of_it = policy_loss(replace(some, mask_BT=MASK_BT), replace(config, kl_on="trained"))[1]
    metrics = policy_loss(some, config)[1]
    totals = count_totals(some.denominator_mask_BT, some.prompt_ids_B, T)
    parts = [
        policy_loss(rows_of(some, rows), config, totals)[1] for rows in ([0, 3], [1, 2, 5], [4])
    ]
    for name in ("loss/kl", "loss/entropy"):
        assert metrics[name] == all_of_it[name]
        if reduction != Reduction.seq_mean_token_sum_norm:
            assert float(sum(part[name] for part in parts)) == pytest.approx(float(metrics[name]))


def test_where_rejected_tokens_leave_the_denominators_both_are_the_same() -> None:
    some = inputs(rejecting(renormalize=True))
    losses = [policy_loss(some, replace(COUNTED, kl_on=on))[0] for on in ("trained", "counted")]
    assert losses[0] == losses[1]


def test_a_counted_token_without_a_logprob_of_the_policy_is_no_nan() -> None:
    found = rejecting()
    place = (MASK_BT & ~found.mask_BT).nonzero()[0]
    pi_BT = PI_BT.clone()
    pi_BT[tuple(place)] = math.nan
    some = inputs(found, pi_BT=pi_BT)
    loss, _ = policy_loss(some, COUNTED)
    (gradient,) = torch.autograd.grad(loss, some.logprobs_BT)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_rows_are_seen_only_where_a_term_looks_at_them() -> None:
    found = rejecting()
    masks = (found.mask_BT, found.denominator_mask_BT)
    for config in (LossConfig(kl_on="counted"), LossConfig(kl_coef=0.1, entropy_coef=0.1)):
        assert torch.equal(seen_tokens(config, *masks), found.mask_BT)
    assert torch.equal(seen_tokens(COUNTED, *masks), MASK_BT)
    assert torch.equal(seen_tokens(replace(COUNTED, kl_coef=0.0), *masks), MASK_BT)


RULE = RejectRule(stat="ratio", reduce="max", high=1.6)


def mismatch(
    policy: NonFinite, parts: list[list[int]], mu_BT: torch.Tensor, pi_BT: torch.Tensor
) -> dict[str, float]:
    bypass = replace(BYPASS, reject=[RULE], non_finite=policy)
    found = rollout_correction(None, mu_BT, MASK_BT, bypass)
    whole = inputs(found, mu_BT, pi_BT)
    totals = count_totals(whole.denominator_mask_BT, whole.prompt_ids_B, T, whole.weights_BT)
    metrics = [
        policy_loss(
            rows_of(whole, rows),
            LossConfig(),
            totals,
            bypass,
        )[1]
        for rows in parts
    ]
    names = [name for name in metrics[0] if name.startswith("rollout_corr/")]
    return {name: float(sum(part[name] for part in metrics)) for name in names}


@pytest.mark.parametrize(
    "policy", [NonFinite.drop, NonFinite.one, NonFinite.zero, NonFinite.reject]
)
def test_what_the_sampler_anchor_logs_does_not_depend_on_micro_batches(policy: NonFinite) -> None:
    """Tokens without a ratio are in the mask under `zero`, and in no mean over ratios; nor is a
    fault of the policy.
    """
    mu_BT = MU_BT.clone()
    pi_BT = PI_BT.clone()
    mu_BT[0, 1] = mu_BT[1, 0] = math.nan
    pi_BT[4, 2] = -math.inf
    whole = mismatch(policy, [[*range(B)]], mu_BT, pi_BT)
    for parts in ([[0, 1], [2, 3], [4, 5]], [[i] for i in range(B)]):
        assert mismatch(policy, parts, mu_BT, pi_BT) == pytest.approx(whole, abs=1e-6)


def test_what_the_sampler_anchor_logs_is_the_mean_over_tokens_with_a_ratio() -> None:
    mu_BT = MU_BT.clone()
    mu_BT[0, 1] = mu_BT[1, 0] = math.nan
    found = mismatch(
        NonFinite.zero,
        [[0], [1, 2], [3, 4, 5]],
        mu_BT,
        PI_BT,
    )
    config = CorrectionConfig(reject=[RULE], non_finite=NonFinite.zero)
    direct = rollout_correction(PI_BT, mu_BT, MASK_BT, config).metrics
    assert found == pytest.approx({name: direct[name] for name in found}, abs=1e-6)
    assert found["rollout_corr/rollout_rs_masked_fraction"] > 0
