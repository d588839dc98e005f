"""avg@k, pass@k, maj@k against their definitions, by brute force."""

import random
from itertools import combinations
from statistics import fmean, pstdev

import pytest

from megatron_rl.evaluation import majority, mean_and_error, pass_at


@pytest.mark.parametrize(
    ("n", "right"), [(n, right) for n in (1, 2, 5, 8) for right in range(n + 1)]
)
def test_pass_at_k_is_the_mean_over_all_choices(n: int, right: int) -> None:
    verdicts = [True] * right + [False] * (n - right)
    for k in range(1, n + 1):
        chosen = fmean(any(some) for some in combinations(verdicts, k))
        assert pass_at(k, n, right) == pytest.approx(chosen, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_majority_is_the_answer_that_a_draw_among_the_most_frequent_gives(seed: int) -> None:
    rng = random.Random(seed)
    answers = [rng.choice(["a", "b", "c", None]) for _ in range(rng.randrange(1, 9))]
    right = [answer == "a" for answer in answers]
    given = [answer for answer in answers if answer is not None]
    most = max((given.count(answer) for answer in given), default=0)
    leaders = sorted({answer for answer in given if given.count(answer) == most})
    expected = fmean(answer == "a" for answer in leaders) if leaders else 0.0
    assert majority(answers, right) == expected


def test_of_equal_texts_with_different_verdicts_the_share_of_right_ones_counts() -> None:
    assert majority(["x", "x", "y"], [True, False, True]) == 0.5


def test_the_error_of_prompts_that_differ_is_larger_than_that_of_as_many_single_answers() -> None:
    """Eight answers to each of 4 prompts, of which two are always solved: 4 values, not 32."""
    rates = [1.0, 1.0, 0.0, 0.0]
    mean, error = mean_and_error(rates)
    assert (mean, error) == (0.5, pytest.approx((pstdev(rates) ** 2 * 4 / 3 / 4) ** 0.5))
    assert error > (0.25 / 32) ** 0.5
    assert mean_and_error([0.5]) == (0.5, None)
