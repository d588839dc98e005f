"""The calculator: Python's own results, bounds on what it is given, and who judges the answer."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.environments.calculator import MOST_CHARACTERS, MOST_DIGITS, Calculator, calculate
from megatron_rl.environments.environment import Answer

numbers = st.integers(0, 10**9).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda one: f"({one[0]}{one[1]} {one[2]})"
        )
        | inner.map(lambda one: f"-{one}")
    ),
    max_leaves=6,
)


@given(expressions)
def test_it_calculates_as_python_does(expression: str) -> None:
    assert calculate(expression) == str(eval(expression))


@given(st.text(max_size=MOST_CHARACTERS + 10))
def test_any_expression_returns_a_number_or_an_error(expression: str) -> None:
    with suppress(ValueError):
        int(calculate(expression))


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/2",
        "2**3",
        "1.5+1",
        "True+1",
        "abs(1)",
        "9" * (MOST_DIGITS + 1),
        "*".join(["9" * 50] * 3),
        "1+" * MOST_CHARACTERS + "1",
        "1;2",
        "__import__('os')",
    ],
)
def test_what_is_no_arithmetic_or_too_long_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"number|expression"):
        calculate(expression)


@pytest.mark.parametrize(("said", "reward"), [(" 56088\n", 1.0), ("56089", 0.0), ("", 0.0)])
def test_an_answer_is_judged_against_the_rows_own(said: str, reward: float) -> None:
    environment = Calculator()
    assert environment.reset({"prompt": "123*456", "answer": "56088"}) == [
        {"role": "user", "content": "123*456"}
    ]
    step = environment.step(Answer(said, said))
    assert (step.done, step.reward) == (True, reward)


def test_the_recipes_reward_may_judge_and_an_instruction_follow() -> None:
    environment = Calculator(own_reward=False, instruction="Use the tool.")
    system, user = environment.reset(
        {"prompt": [{"role": "system", "content": "Hi"}, {"role": "user", "content": "1+1"}]}
    )
    assert (system["content"], user["content"]) == ("Hi", "1+1\n\nUse the tool.")
    assert environment.step(Answer("2", "2")).reward is None
