"""Divergences over the sampler's top tokens and the tail, against those over the vocabulary.

Shape legend: N response tokens, V words, E top tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import batch_of
from torch import Tensor

from megatron_rl.batch import Batch, Share
from megatron_rl.config.correction_rules import check_correction
from megatron_rl.config.rules import top_logprobs
from megatron_rl.config.schema import (
    TOP_STATS,
    CorrectionConfig,
    LearnerSection,
    LossConfig,
    RejectRule,
    RolloutSection,
)
from megatron_rl.loss.prox_pass import prox_readers
from megatron_rl.rollout_correction.breakdown import breakdowns, mismatch_by_age, pooled
from megatron_rl.rollout_correction.correction import Correction, rollout_correction
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.tracking.metrics import unknown

B = 3
T = 4
ROUNDING = 2e-6


def policies(seed: int, words: int, spread: float, sharpness: float) -> tuple[Tensor, Tensor]:
    """[N, V]: logprobs of the sampler and of the learner."""
    random = torch.Generator().manual_seed(seed)
    logits_NV = sharpness * torch.randn(B * T, words, generator=random, dtype=torch.float64)
    other_NV = logits_NV + spread * torch.randn(B * T, words, generator=random, dtype=torch.float64)
    return logits_NV.log_softmax(1), other_NV.log_softmax(1)


def top_of(sampler_NV: Tensor, learner_NV: Tensor, size: int) -> TopLogprobs:
    ids_NM = sampler_NV.topk(size, dim=1).indices
    counts_N = torch.full((len(sampler_NV),), size)
    parts = (one.gather(1, ids_NM).flatten() for one in (sampler_NV, learner_NV))
    return TopLogprobs.of(counts_N, *parts)


def exact(sampler_NV: Tensor, learner_NV: Tensor) -> dict[str, Tensor]:
    q_NV = sampler_NV.exp()
    p_NV = learner_NV.exp()
    return {
        "top_kl": (q_NV * (sampler_NV - learner_NV)).sum(1),
        "top_reverse_kl": (p_NV * (learner_NV - sampler_NV)).sum(1),
        "top_tv": (q_NV - p_NV).abs().sum(1) / 2,
    }


def measured(top: TopLogprobs) -> dict[str, Tensor]:
    return dict(zip(TOP_STATS, (top.kl_N, top.reverse_kl_N, top.total_variation_N), strict=True))


@settings(max_examples=200, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(2, 40),
    st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    st.sampled_from([0.3, 2.0, 8.0]),
    st.integers(1, 40),
)
def test_they_are_never_above_the_exact_ones(
    seed: int, words: int, spread: float, sharpness: float, size: int
) -> None:
    sampler_NV, learner_NV = policies(seed, words, spread, sharpness)
    found = measured(top_of(sampler_NV, learner_NV, min(size, words)))
    for name, exact_N in exact(sampler_NV, learner_NV).items():
        assert (found[name] <= exact_N + 1e-12).all(), name
        assert (found[name] >= -ROUNDING).all(), name


def test_with_the_whole_vocabulary_they_are_exact() -> None:
    sampler_NV, learner_NV = policies(1, 9, 0.5, 1.0)
    found = measured(top_of(sampler_NV, learner_NV, 9))
    for name, exact_N in exact(sampler_NV, learner_NV).items():
        torch.testing.assert_close(found[name], exact_N, rtol=1e-6, atol=1e-7)
    # nearly, where the set holds nearly all
    sampler_NV, learner_NV = policies(2, 300, 0.2, 4.0)
    found = measured(top_of(sampler_NV, learner_NV, 32))
    for name, exact_N in exact(sampler_NV, learner_NV).items():
        assert float(found[name].sum() / exact_N.sum()) > 0.9, name


def recorded(**changes: Any) -> tuple[Batch, Tensor, TopLogprobs]:
    """A batch, the learner's logprobs of its tokens, and its top tokens."""
    sampler_NV, learner_NV = policies(3, 12, 0.4, 1.5)
    top = top_of(sampler_NV, learner_NV, 5)
    counts_N = torch.full((B * T,), 5, dtype=torch.int16)
    columns = {
        "top_counts_N": counts_N,
        "top_ids_E": torch.zeros(5 * B * T, dtype=torch.int32),
        "top_logprobs_E": top.sampler_E.float(),
    }
    mask_BT = torch.ones(B, T, dtype=torch.bool)
    batch = batch_of(mask_BT, sampler_NV[:, 0].float().view(B, T), **columns | changes)
    return batch, learner_NV[:, 0].float(), top


def corrected(rule: RejectRule | None, **changes: Any) -> tuple[Correction, dict[str, Tensor]]:
    batch, learner_N, top = recorded(**changes)
    config = CorrectionConfig(reject=[] if rule is None else [rule])
    found = rollout_correction(batch, learner_N, config, top_prox_E=top.learner_E.float())
    return found, measured(top)


@pytest.mark.parametrize("stat", TOP_STATS)
def test_rules(stat: str) -> None:
    values_N = corrected(None)[1][stat]
    middle = float(values_N.median())
    found, _ = corrected(RejectRule(level="token", stat=stat, high=middle * 1.001))
    assert torch.equal(found.mask_N, values_N <= middle * 1.001)
    worst_B = values_N.view(B, T).amax(1)
    bound = float(worst_B.median()) * 1.001
    found, _ = corrected(RejectRule(level="sequence", stat=stat, reduce="max", high=bound))
    assert torch.equal(found.mask_N, (worst_B <= bound).repeat_interleave(T))
    assert 0 < int(found.mask_N.sum()) < B * T


def test_metrics() -> None:
    found, values = corrected(None)
    for name, value_N in values.items():
        assert found.metrics[f"rollout_corr/{name}"] == pytest.approx(float(value_N.mean()), 1e-4)
    broken_E = torch.zeros(5 * B * T)
    broken_E[0] = math.nan  # the first token's set is not used
    found, _ = corrected(None, top_logprobs_E=broken_E)
    assert math.isfinite(found.metrics["rollout_corr/top_kl"])


def test_breakdowns() -> None:
    batch, learner_N, top = recorded(versions_B=torch.tensor([2] + [3] * (B - 1)))
    top_E = top.learner_E.float()
    slices = breakdowns(learner_N, batch, top_prox_E=top_E)
    halves = [
        breakdowns(
            learner_N.view(B, T)[rows].flatten(),
            batch.rows(rows),
            policy_version=3,
            top_prox_E=top_E.view(B, -1)[rows].flatten(),
        )
        for rows in torch.arange(B).split(2)
    ]
    for name, value_N in measured(top).items():
        for parts in (slices, pooled(part for half in halves for part in half)):
            ages = {one.label: one for one in parts if one.by == "staleness"}
            assert {age: one.top_tokens for age, one in ages.items()} == {"0": T * B - T, "1": T}
            assert getattr(ages["1"], name) == pytest.approx(float(value_N[:T].mean()), 1e-4)
            assert getattr(ages["0"], name) == pytest.approx(float(value_N[T:].mean()), 1e-4)
    of_ages = mismatch_by_age(learner_N, Share.alone(batch), 3, top_E)
    kl_N = measured(top)["top_kl"]
    assert of_ages["rollout_corr/stale/top_kl"] == pytest.approx(float(kl_N[:T].mean()), 1e-4)
    assert not unknown(of_ages)
    assert all(one.top_tokens == 0 for one in breakdowns(learner_N, batch))


def test_what_a_rule_on_them_needs() -> None:
    rule = RejectRule(level="sequence", stat="top_kl", reduce="max", high=0.05)
    config = CorrectionConfig(reject=[rule], renormalize=False, rebaseline=False)
    assert not check_correction(config)
    assert "correction.reject[0].stat" in prox_readers(config, LossConfig(), LearnerSection())
    (problem,) = top_logprobs(RolloutSection(), config)
    assert problem.startswith("correction.reject[0].stat: top_kl")
    (problem,) = check_correction(replace(config, reject=[replace(rule, high=-0.1)]))
    assert problem.startswith("correction.reject[0].high")
