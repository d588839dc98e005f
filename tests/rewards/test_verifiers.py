"""Verdicts: equal to verl's rule and to the library's metric; truncated responses are wrong."""

import importlib
import json
from pathlib import Path

import pytest
from verdict_cases import cases

from megatron_rl.rewards.functions import Rewards, resolve
from megatron_rl.rewards.task import Task
from megatron_rl.types import Verdict

EXPECTED = json.loads((Path(__file__).parent / "expected_verdicts.json").read_text())


def differing(name: str, every: int) -> list[tuple[str, str, str]]:
    """Cases with an unexpected verdict: response, truth, verdict."""
    chosen = list(zip(cases(), EXPECTED[name], strict=True))[::every]
    judged = [
        (response, truth, verdict(name, truth, response), sign)
        for (response, truth), sign in chosen
    ]
    return [
        (*case, found) for *case, found, sign in judged if (found == Verdict.right) != (sign == "+")
    ]


def verdict(name: str, truth: object, response: str, finish_reason: str = "stop") -> Verdict:
    judged = resolve(name)(Task({"answer": truth}, response, finish_reason))
    assert judged is not None
    return judged.verdict


def test_there_are_enough_cases() -> None:
    assert len(set(cases())) == len(cases()) == 1150
    assert all(signs.count("+") >= 150 and signs.count("-") >= 500 for signs in EXPECTED.values())


def test_math_dapo_judges_as_verl() -> None:
    assert differing("math_dapo", every=1) == []


def test_math_verify_judges_as_the_library() -> None:  # all of them: tests/faults/test_verdicts.py
    assert differing("math_verify", every=23) == []


@pytest.mark.parametrize("name", ["exact_match", "math_dapo", "math_verify"])
def test_a_truncated_response_is_always_wrong(name: str) -> None:
    said = "34" if name == "exact_match" else "Answer: 34"
    assert verdict(name, "34", said) == Verdict.right
    assert verdict(name, "34", said, "length") == Verdict.wrong
    assert verdict(name, "34", said, "abort") == Verdict.wrong


@pytest.mark.parametrize("name", ["exact_match", "math_dapo", "math_verify"])
def test_a_truth_that_is_a_number(name: str) -> None:
    assert verdict(name, 34, "34" if name == "exact_match" else "Answer: 34") == Verdict.right


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("exact_match", "  "),
        ("math_dapo", "It is 34."),
        ("math_dapo", "Answer: 34" + " " * 300),
        ("math_verify", "Ω"),
    ],
)
def test_no_answer_is_no_wrong_answer(name: str, response: str) -> None:
    assert verdict(name, "34", response) == Verdict.no_answer


def test_a_truth_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="the row's answer ''"):
        verdict("math_verify", "", "Answer: 34")


def test_a_time_limit_of_the_library_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("megatron_rl.rewards.math_verify")

    def late(*_: object, **__: object) -> None:
        raise module.TimeoutException

    monkeypatch.setattr(module, "verify", late)
    assert verdict("math_verify", "34", "Answer: 34") == Verdict.timeout
    monkeypatch.setattr(module, "parse", late)
    assert verdict("math_verify", "35", "Answer: 35") == Verdict.timeout


def test_reasoning_gym_judges_its_own_tasks() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    row = {
        "question": entry["question"],
        "answer": entry["answer"],
        "metadata": json.dumps(entry["metadata"]),
    }
    judge = resolve("reasoning_gym")
    for response, found in (
        (entry["answer"], Verdict.right),
        (f"<answer>1</answer> no: <answer> {entry['answer']} </answer> so", Verdict.right),
        ("77777", Verdict.wrong),
        ("<answer> </answer>", Verdict.no_answer),
    ):
        judged = judge(Task(row, response))
        assert judged is not None and judged.verdict == found, response


def test_wrong_is_worth_what_the_recipe_says() -> None:
    published = Rewards({"math_dapo": 1.0}, wrong=-1.0)
    for response, score in (
        ("Answer: 34", 1.0),
        ("Answer: 35", -1.0),
        ("34", -1.0),
    ):
        assert published.judge(Task({"answer": "34"}, response)).score == score
    assert (
        Rewards({"math_dapo": 1.0}, wrong=0.0).judge(Task({"answer": "34"}, "Answer: 35")).score
        == 0.0
    )
