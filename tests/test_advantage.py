"""Advantages worked by hand, who counts in a baseline, and DAPO's filters."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrices import batch_of

from megatron_rl.advantage import (
    AdvantageConfig,
    group_advantages,
    has_variance,
    overlong_penalty,
    session_advantages,
    turn_advantages,
)
from megatron_rl.batch import Batch, Share
from megatron_rl.config.schema import CorrectionConfig, Credit, Estimator, RejectRule, WeightConfig
from megatron_rl.rollout_correction.correction import correct

REWARDS = torch.tensor([1.0, 0.0, 0.0, 3.0, 0.5, 2.5, 2.0, 9.0])
GROUPS = torch.tensor([5, 5, 2, 5, 2, 2, 2, 8])
EVERYONE = torch.ones(8, dtype=torch.bool)
SURVIVORS = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1]).bool()
GROUPED = [Estimator.grpo, Estimator.dr_grpo, Estimator.rloo, Estimator.maxrl]


def by_hand(estimator: str, rewards: list[float], own: float) -> float:
    mean = statistics.mean(rewards)
    return {
        "grpo": (own - mean) / (statistics.stdev(rewards) + 1e-6),
        "dr_grpo": own - mean,
        "rloo": own - (sum(rewards) - own) / (len(rewards) - 1),
        "maxrl": (own - mean) / (mean + 1e-6),
    }[estimator]


@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("keep_N", [EVERYONE, SURVIVORS], ids=["all", "survivors"])
def test_groups_by_hand(estimator: Estimator, keep_N: torch.Tensor) -> None:
    """The reward of a rejected row has no influence."""
    expected = [0.0] * 8
    for group in (5, 2):
        members = ((group == GROUPS) & keep_N).nonzero().flatten()
        rewards = REWARDS[members].tolist()
        for i, own in zip(members, rewards, strict=True):
            expected[i] = by_hand(estimator, rewards, own)
    for rewards_N in (REWARDS, REWARDS.where(keep_N, math.nan)):
        advantages_N, kept_N = group_advantages(
            rewards_N, GROUPS, keep_N, AdvantageConfig(estimator)
        )
        assert advantages_N.tolist() == pytest.approx(expected, abs=1e-6)
        # a response without siblings has no baseline
        assert kept_N.tolist() == [*keep_N[:7].tolist(), False]


def test_a_group_with_one_survivor_is_dropped() -> None:
    keep_N = torch.tensor([1, 0, 1, 0, 1, 1, 1, 1]).bool()
    for estimator in GROUPED:
        advantages_N, kept_N = group_advantages(REWARDS, GROUPS, keep_N, AdvantageConfig(estimator))
        assert kept_N.tolist() == [False, False, True, False, True, True, True, False]
        assert float(advantages_N[0]) == 0.0
    for estimator in ("reinforce_pp", "none"):
        _, kept_N = group_advantages(REWARDS, GROUPS, keep_N, AdvantageConfig(estimator))
        assert torch.equal(kept_N, keep_N)


def test_reinforce_pp_whitens_the_survivors_of_the_batch() -> None:
    config = AdvantageConfig("reinforce_pp")
    rewards_N = REWARDS.where(SURVIVORS, math.nan)
    advantages_N, _ = group_advantages(rewards_N, GROUPS, SURVIVORS, config)
    kept_N = advantages_N[SURVIVORS]
    assert float(kept_N.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(kept_N.std()) == pytest.approx(1.0, abs=1e-5)
    assert not advantages_N[~SURVIVORS].any()
    alone, _ = group_advantages(REWARDS, GROUPS, GROUPS == 8, config)
    assert not alone.any()


def test_none_is_one_for_survivors() -> None:
    advantages_N, _ = group_advantages(REWARDS, GROUPS, SURVIVORS, AdvantageConfig("none"))
    assert torch.equal(advantages_N, SURVIVORS.float())


def test_equal_rewards_are_exactly_zero() -> None:
    """0.1 three times has a float32 mean a hair off, which grpo would blow up by a million."""
    rewards = torch.full((3,), 0.1)
    groups = torch.zeros(3, dtype=torch.int64)
    advantages_N, _ = group_advantages(rewards, groups, torch.ones(3), AdvantageConfig("grpo"))
    assert float(advantages_N.abs().max()) < 1e-8


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"lowest is -1\.0"):
        group_advantages(
            torch.tensor([2.0, -1.0]), torch.zeros(2), torch.ones(2), AdvantageConfig("maxrl")
        )


@pytest.mark.parametrize("estimator", list(Estimator))
def test_row_order_and_the_width_of_rewards_do_not_matter(estimator: Estimator) -> None:
    config = AdvantageConfig(estimator)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    plain_N, _ = group_advantages(REWARDS, GROUPS, EVERYONE, config)
    moved_N, keep_N = group_advantages(REWARDS[order].double(), GROUPS[order], EVERYONE, config)
    torch.testing.assert_close(moved_N, plain_N[order])
    assert (moved_N.dtype, keep_N.dtype) == (torch.float32, torch.bool)


def test_has_spread() -> None:
    assert has_variance([1.0, 0.0]) and has_variance([0.5, 0.5, 0.6])
    assert not any(map(has_variance, ([], [1.0], [0.3, 0.3], [0.1, 0.1 + 1e-9])))


def test_overlong_penalty() -> None:
    found = overlong_penalty(
        [10, 80, 85, 90, 100, 120],
        max_tokens=100,
        buffer=20,
    )
    assert found.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    assert overlong_penalty(
        [100, 90],
        max_tokens=100,
        buffer=20,
    ).tolist() == [-1.0, -0.5]
    assert not overlong_penalty([100], max_tokens=100, buffer=0).any()


def session_batch(
    rewards: list[float], rows: list[int], credit: list[list[float]] | None = None
) -> Batch:
    """Return one group: `rows` branches of each session, three tokens each."""
    samples = [sample for sample, count in enumerate(rows) for _ in range(count)]
    return batch_of(
        torch.ones(len(samples), 3),
        torch.zeros(len(samples), 3),
        rewards_B=torch.tensor([rewards[one] for one in samples]),
        samples_B=torch.tensor(samples),
        credit_BT=None if credit is None else torch.tensor([credit[one] for one in samples]),
    )


def advantages(batch: Batch, estimator: Estimator) -> torch.Tensor:
    everyone = torch.ones(len(batch), dtype=torch.bool)
    config = AdvantageConfig(estimator)
    return session_advantages(batch.rewards_B, batch.groups_B, batch.samples_B, everyone, config)[0]


def by_turn(
    batch: Batch, estimator: Estimator, credit: Credit = Credit.turns
) -> torch.Tensor | None:
    everyone = torch.ones(len(batch), dtype=torch.bool)
    of_rows = advantages(batch, estimator)
    share = Share.alone(batch)
    return turn_advantages(share, of_rows, everyone, AdvantageConfig(estimator), credit)


@pytest.mark.parametrize("estimator", list(Estimator))
@given(
    st.lists(st.floats(0.1, 4), min_size=2, max_size=6),
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
)
def test_a_session_counts_once_in_its_groups_baseline(estimator, rewards, rows):
    rows = rows[: len(rewards)]
    each = advantages(session_batch(rewards, [1] * len(rewards)), estimator)
    forked = advantages(session_batch(rewards, rows), estimator)
    assert torch.allclose(forked, each.repeat_interleave(torch.tensor(rows)), atol=1e-5)


@pytest.mark.parametrize("estimator", list(Estimator))
@given(st.lists(st.floats(0.1, 4), min_size=2, max_size=6))
def test_turns_that_earn_it_all_at_the_end_have_their_sessions_advantage(estimator, rewards):
    batch = session_batch(
        rewards,
        [2] * len(rewards),
        [[0.0] * 3] * len(rewards),
    )
    expected = advantages(batch, estimator).repeat_interleave(3)
    assert torch.equal(by_turn(batch, estimator), expected)
    assert by_turn(batch, estimator, Credit.outcome) is None


@pytest.mark.parametrize("estimator", GROUPED)
def test_a_turns_return_takes_the_place_of_its_sessions_reward(estimator):
    """The advantage of a turn's return of 3 is that of a reward of 3 in the same group."""
    credit = [
        [0.0, 1.0, 0.0],
        [0.0] * 3,
        [-1.0, 0.0, 0.0],
        [0.0] * 3,
    ]
    batch = session_batch([1.0, 2.0, 4.0, 3.0], [1] * 4, credit)
    of_rows = advantages(batch, estimator)
    found = by_turn(batch, estimator).view(4, 3)
    assert found[2, 0] == pytest.approx(float(of_rows[3]), abs=1e-5)  # 4 - 1
    assert found[0, 1] == pytest.approx(float(of_rows[1]), abs=1e-5)  # 1 + 1


def test_turns_of_equal_rewards_have_nothing_to_be_scaled_by():
    alike = session_batch([1.0] * 4, [1] * 4, [[0.5] * 3] * 4)
    assert not by_turn(alike, Estimator.grpo).any()


@pytest.mark.parametrize("rebaseline", [True, False])
def test_a_turn_is_scaled_as_its_group_under_any_rules(rebaseline):
    batch = session_batch(
        [0.0, 1.0, 1.0, 20.0],
        [1] * 4,
        [[0.5, 0.5, 0.5]] * 4,
    )
    d_BT = torch.zeros(4, 3)
    d_BT[3] = 3.0
    rule = RejectRule(level="sequence", stat="ratio", reduce="mean", high=1.5)
    config = CorrectionConfig(
        weight=WeightConfig(level="none"), reject=[rule], rebaseline=rebaseline
    )
    share = Share.alone(batch)
    correction, of_rows, keep = correct(share, d_BT.flatten(), config, AdvantageConfig())
    found = turn_advantages(share, of_rows, keep, AdvantageConfig(), Credit.turns)
    assert not correction.mask_N[9:].any()
    torch.testing.assert_close(
        found[:9:3] - of_rows[:3], torch.full((3,), 0.5) / batch.rewards_B[keep].std()
    )
