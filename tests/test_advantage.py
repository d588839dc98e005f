"""Advantages worked by hand, who counts in a baseline, and DAPO's filters."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.advantage import (
    AdvantageConfig,
    group_advantages,
    has_spread,
    overlong_penalty,
    session_advantages,
    turn_advantages,
)
from megatron_rl.batch import Batch
from megatron_rl.config.schema import CorrectionConfig, Credit, Estimator, RejectRule, WeightConfig
from megatron_rl.rollout_correction.correction import correct

REWARDS = torch.tensor([1.0, 0.0, 0.0, 3.0, 0.5, 2.5, 2.0, 9.0])
GROUPS = torch.tensor([5, 5, 2, 5, 2, 2, 2, 8])
EVERYONE = torch.ones(8, dtype=torch.bool)


def members(group: int) -> list[int]:
    return [i for i, g in enumerate(GROUPS.tolist()) if g == group]


def by_hand(estimator: str, rewards: list[float], own: float) -> float:
    mean = statistics.mean(rewards)
    return {
        "grpo": (own - mean) / (statistics.stdev(rewards) + 1e-6),
        "dr_grpo": own - mean,
        "rloo": own - (sum(rewards) - own) / (len(rewards) - 1),
        "maxrl": (own - mean) / (mean + 1e-6),
    }[estimator]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_groups_by_hand(estimator: str) -> None:
    advantages_N, keep_N = group_advantages(REWARDS, GROUPS, EVERYONE, AdvantageConfig(estimator))
    for group in (5, 2):
        rewards = [float(REWARDS[i]) for i in members(group)]
        for i in members(group):
            assert float(advantages_N[i]) == pytest.approx(
                by_hand(estimator, rewards, float(REWARDS[i])), abs=1e-6
            )
    assert keep_N.tolist() == [True] * 7 + [False]  # an answer without siblings has no baseline
    assert float(advantages_N[7]) == 0.0


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_rejected_rows_leave_the_baseline(estimator: str) -> None:
    keep_N = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1]).bool()
    advantages_N, kept_N = group_advantages(REWARDS, GROUPS, keep_N, AdvantageConfig(estimator))
    survivors = [i for i in members(2) if keep_N[i]]
    rewards = [float(REWARDS[i]) for i in survivors]
    for i in survivors:
        assert float(advantages_N[i]) == pytest.approx(
            by_hand(estimator, rewards, float(REWARDS[i])), abs=1e-6
        )
    assert not advantages_N[~kept_N].any()
    # whatever a rejected row earned is without influence
    other = torch.where(keep_N, REWARDS, torch.tensor(math.nan))
    again_N, _ = group_advantages(other, GROUPS, keep_N, AdvantageConfig(estimator))
    assert torch.equal(again_N, advantages_N)


def test_a_group_with_one_survivor_is_dropped() -> None:
    keep_N = torch.tensor([1, 0, 1, 0, 1, 1, 1, 1]).bool()
    for estimator in ("grpo", "dr_grpo", "rloo", "maxrl"):
        advantages_N, kept_N = group_advantages(REWARDS, GROUPS, keep_N, AdvantageConfig(estimator))
        assert kept_N.tolist() == [False, False, True, False, True, True, True, False]
        assert float(advantages_N[0]) == 0.0
    for estimator in ("reinforce_pp", "none"):
        _, kept_N = group_advantages(REWARDS, GROUPS, keep_N, AdvantageConfig(estimator))
        assert torch.equal(kept_N, keep_N)


def test_reinforce_pp_whitens_the_survivors_of_the_batch() -> None:
    keep_N = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1]).bool()
    rewards_N = REWARDS.where(keep_N, math.nan)
    advantages_N, _ = group_advantages(rewards_N, GROUPS, keep_N, AdvantageConfig("reinforce_pp"))
    kept = advantages_N[keep_N]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(kept.std()) == pytest.approx(1.0, abs=1e-5)
    assert not advantages_N[~keep_N].any()
    alone, _ = group_advantages(
        REWARDS, GROUPS, EVERYONE & (GROUPS == 8), AdvantageConfig("reinforce_pp")
    )
    assert not alone.any()


def test_none_is_one_for_survivors() -> None:
    keep_N = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1]).bool()
    advantages_N, _ = group_advantages(REWARDS, GROUPS, keep_N, AdvantageConfig("none"))
    assert torch.equal(advantages_N, keep_N.float())


def test_equal_rewards_are_exactly_zero() -> None:
    """0.1 three times has a float32 mean a hair off, which grpo would blow up by a million."""
    rewards = torch.full((3,), 0.1)
    groups = torch.zeros(3, dtype=torch.int64)
    advantages_N, _ = group_advantages(rewards, groups, torch.ones(3), AdvantageConfig("grpo"))
    assert float(advantages_N.abs().max()) < 1e-8


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"maxrl needs rewards >= 0, the lowest is -1\.0"):
        group_advantages(
            torch.tensor([2.0, -1.0]), torch.zeros(2), torch.ones(2), AdvantageConfig("maxrl")
        )
    with pytest.raises(ValueError, match="no finite reward"):
        group_advantages(
            torch.tensor([math.nan, 1.0]), torch.zeros(2), torch.ones(2), AdvantageConfig()
        )
    with pytest.raises(ValueError, match=r"advantage\.estimator is 'gae'"):
        group_advantages(torch.ones(2), torch.zeros(2), torch.ones(2), AdvantageConfig("gae"))  # type: ignore[arg-type]


def test_row_order_does_not_matter() -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    for estimator in ("grpo", "rloo", "maxrl", "reinforce_pp", "dr_grpo"):
        plain_N, _ = group_advantages(REWARDS, GROUPS, EVERYONE, AdvantageConfig(estimator))
        moved_N, _ = group_advantages(
            REWARDS[order], GROUPS[order], EVERYONE, AdvantageConfig(estimator)
        )
        torch.testing.assert_close(moved_N, plain_N[order])


def test_has_spread() -> None:
    assert has_spread([1.0, 0.0]) and has_spread([0.5, 0.5, 0.6])
    assert not any(map(has_spread, ([], [1.0], [0.3, 0.3], [0.1, 0.1 + 1e-9])))


def test_overlong_penalty() -> None:
    found = overlong_penalty([10, 80, 85, 90, 100, 120], max_tokens=100, buffer=20)
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    assert overlong_penalty([100, 90], max_tokens=100, buffer=20).tolist() == [-1.0, -0.5]
    assert not overlong_penalty([100], max_tokens=100, buffer=0).any()


def session_batch(
    rewards: list[float], rows: list[int], credit: list[list[float]] | None = None
) -> Batch:
    """One group: `rows` branches of each session, three tokens each."""
    samples = [sample for sample, count in enumerate(rows) for _ in range(count)]
    turns = torch.zeros(len(samples), 3)
    return Batch.of_matrices(
        tokens_BS=turns.long(),
        prompt_lengths_B=turns[:, 0].long(),
        response_lengths_B=turns[:, 0].long() + 3,
        mask_BT=turns == 0,
        sampler_logprobs_BT=turns,
        rewards_B=torch.tensor([rewards[one] for one in samples]),
        groups_B=torch.zeros(len(samples), dtype=torch.int64),
        versions_B=turns[:, 0],
        samples_B=torch.tensor(samples),
        credit_BT=None if credit is None else torch.tensor([credit[one] for one in samples]),
    )


def kept(batch: Batch) -> torch.Tensor:
    return torch.ones(len(batch), dtype=torch.bool)


def of(batch: Batch, estimator: Estimator) -> torch.Tensor:
    config = AdvantageConfig(estimator)
    return session_advantages(
        batch.rewards_B, batch.groups_B, batch.samples_B, kept(batch), config
    )[0]


@pytest.mark.parametrize("estimator", list(Estimator))
@given(
    st.lists(st.floats(0.1, 4), min_size=2, max_size=6),
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
)
def test_a_session_counts_once_in_its_groups_baseline(estimator, rewards, rows):
    rows = rows[: len(rewards)]
    whole = session_batch(rewards, [1] * len(rewards))
    forked = session_batch(rewards, rows)
    each = of(whole, estimator)
    assert torch.allclose(
        of(forked, estimator), each.repeat_interleave(torch.tensor(rows)), atol=1e-5
    )


@pytest.mark.parametrize("estimator", list(Estimator))
@given(st.lists(st.floats(0.1, 4), min_size=2, max_size=6))
def test_turns_that_earn_it_all_at_the_end_have_their_sessions_advantage(estimator, rewards):
    batch = session_batch(rewards, [2] * len(rewards), [[0.0] * 3] * len(rewards))
    advantages = of(batch, estimator)
    found = turn_advantages(
        batch, advantages, kept(batch), AdvantageConfig(estimator), Credit.turns
    )
    assert torch.equal(found, advantages[:, None].expand(-1, 3))
    assert (
        turn_advantages(batch, advantages, kept(batch), AdvantageConfig(estimator), Credit.outcome)
        is None
    )


@pytest.mark.parametrize(
    "estimator", [Estimator.grpo, Estimator.rloo, Estimator.dr_grpo, Estimator.maxrl]
)
def test_a_turns_return_takes_the_place_of_its_sessions_reward(estimator):
    """What an estimator makes of the reward 3 it makes of a turn's return of 3, in the same
    group.
    """
    rewards = [1.0, 2.0, 4.0, 3.0]
    batch = session_batch(
        rewards, [1] * 4, [[0.0, 1.0, 0.0], [0.0] * 3, [-1.0, 0.0, 0.0], [0.0] * 3]
    )
    advantages = of(batch, estimator)
    found = turn_advantages(
        batch, advantages, kept(batch), AdvantageConfig(estimator), Credit.turns
    )
    assert found[2, 0] == pytest.approx(float(advantages[3]), abs=1e-5)  # 4 - 1
    assert found[0, 1] == pytest.approx(float(advantages[1]), abs=1e-5)  # 1 + 1
    alike = session_batch([1.0] * 4, [1] * 4, [[0.5] * 3] * 4)  # no spread: nothing to scale by
    if estimator == Estimator.grpo:
        given = alike, of(alike, estimator), kept(alike)
        assert not turn_advantages(*given, AdvantageConfig(estimator), Credit.turns).any()


@pytest.mark.parametrize("rebaseline", [True, False])
def test_a_turn_is_scaled_as_its_group_whatever_rules_take(rebaseline):
    batch = session_batch([0.0, 1.0, 1.0, 20.0], [1] * 4, [[0.5, 0.5, 0.5]] * 4)
    d_BT = torch.zeros_like(batch.sampler_logprobs_BT)
    d_BT[3] = 3.0
    rule = RejectRule(level="sequence", stat="ratio", reduce="mean", high=1.5)
    config = CorrectionConfig(
        weight=WeightConfig(level="none"), reject=[rule], rebaseline=rebaseline
    )
    correction, advantages = correct(
        batch.sampler_logprobs_BT + d_BT, batch, config, AdvantageConfig()
    )
    keep = correction.baseline_keep_B(config)
    found = turn_advantages(batch, advantages, keep, AdvantageConfig(), Credit.turns)
    assert not correction.mask_BT[3].any()
    torch.testing.assert_close(
        found[:3, 0] - advantages[:3], torch.full((3,), 0.5) / batch.rewards_B[keep].std()
    )
