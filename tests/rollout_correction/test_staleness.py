"""Rules on staleness: they judge the ages of tokens, come first, and what they reject counts
nowhere.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from matrices import batch_of

from megatron_rl.batch import Batch, Share
from megatron_rl.config.schema import (
    AdvantageConfig,
    CorrectionConfig,
    Estimator,
    RejectRule,
    Stat,
    WeightConfig,
)
from megatron_rl.loss.prox_pass import whole_batch_terms
from megatron_rl.rollout_correction.correction import correct, without_stale


def mask(rows: str) -> torch.Tensor:
    return torch.tensor([digit == "1" for digit in rows.replace(" ", "")])


# the learner's version is 5: a row that two updates came into, a fresh one, an old one, one with a
# hole and padding
VERSIONS_BT = torch.tensor(
    [
        [3, 3, 4, 5],
        [5, 5, 5, 5],
        [3, 3, 3, 3],
        [4, 4, 6, 0],
    ]
)
MASK_N = mask("1111 1111 1111 0110")
MASKED = "rollout_corr/stale_masked_fraction"


def aged(seed: int = 0) -> Batch:
    mu_BT = -torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))
    rewards_B = torch.tensor([1.0, 0.0, 0.0, 1.0])
    return batch_of(
        MASK_N.view(4, 4),
        mu_BT,
        rewards_B=rewards_B,
        versions_B=VERSIONS_BT[:, 0],
        versions_BT=VERSIONS_BT,
    )


def stale(level: str = "token", reduce: str | None = None, **bounds: float) -> CorrectionConfig:
    return CorrectionConfig(
        reject=[RejectRule(level=level, stat="staleness", reduce=reduce, **bounds)]
    )


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (stale(high=0), "0001 1111 0000 0010"),
        (stale(high=1), "0011 1111 0000 0110"),
        (stale(high=2), "1111 1111 1111 0110"),
        (stale("sequence", "max", high=1), "0000 1111 0000 0110"),
        (stale("sequence", "mean", high=1.25), "1111 1111 0000 0110"),
        (CorrectionConfig(), "1111 1111 1111 0110"),
    ],
)
def test_which_tokens_are_too_old(config: CorrectionConfig, kept: str) -> None:
    batch, metrics = without_stale(aged(), config, version=5)
    assert torch.equal(batch.mask_N, mask(kept))
    share = 1 - float(batch.mask_N.sum() / MASK_N.sum())
    assert metrics == ({MASKED: pytest.approx(share)} if config.reject else {})


def test_an_age_for_each_row_where_no_update_came_between_tokens() -> None:
    batch, _ = without_stale(
        replace(aged(), versions_N=None),
        stale(high=1),
        version=5,
    )
    assert batch.mask_N.view(4, 4).any(dim=1).tolist() == [False, True, False, True]


@pytest.mark.parametrize("renormalize", [True, False])
def test_a_stale_token_is_in_no_row_s_statistic_and_no_denominator(renormalize: bool) -> None:
    """The correction is that of the same batch with a shorter mask."""
    others = [
        RejectRule(stat="ratio", reduce="mean", low=0.9, high=1.1),
        RejectRule(stat="k2", reduce="max", high=0.1),
    ]
    weight = WeightConfig(level="sequence", high=5.0, normalize=True)
    plain = CorrectionConfig(weight=weight, reject=others, renormalize=renormalize)
    ruled = replace(plain, reject=[*stale(high=0).reject, *others])
    advantage = AdvantageConfig(Estimator.dr_grpo)
    for seed in range(8):
        whole = aged(seed)
        noise_N = 0.15 * torch.randn(16, generator=torch.Generator().manual_seed(seed + 50))
        prox_N = whole.sampler_logprobs_N + noise_N
        young, _ = without_stale(whole, ruled, version=5)
        fresh = replace(whole, mask_N=MASK_N & (VERSIONS_BT.flatten() >= 5))
        found, advantages_B, _ = correct(Share.alone(young), prox_N, ruled, advantage)
        same, same_B, _ = correct(Share.alone(fresh), prox_N, plain, advantage)
        assert torch.equal(found.weights_N, same.weights_N)
        assert torch.equal(found.denominator_mask_N, same.denominator_mask_N)
        assert torch.equal(advantages_B, same_B)
        assert found.metrics == same.metrics
        assert not found.denominator_mask_N[8:12].any(), "a row that is old as a whole"


def test_an_age_is_known_before_the_learner_has_scored_anything() -> None:
    assert not list(whole_batch_terms(stale(high=0)))
    assert list(
        whole_batch_terms(
            CorrectionConfig(reject=[RejectRule(stat=Stat.k1, reduce="mean", high=0.1)])
        )
    )
