"""A held-out set answered, judged and counted: scripted answers, real arithmetic."""

from typing import Any

import pytest
from collectors import Script, Words

from megatron_rl.config import ConfigError, from_mapping, load
from megatron_rl.config.evaluation import held_out
from megatron_rl.config.schema import Config, RewardSection
from megatron_rl.evaluation import Evaluator
from megatron_rl.rewards.task import Score, Task
from megatron_rl.rollout.collect import Scorer
from megatron_rl.tracking.metrics import unknown
from megatron_rl.types import Prompt, Verdict


class Drawn(Script):
    """Letters: y is right; the same letter is the same answer; `?` has no score, `-` no answer."""

    def score(self, tasks: list[Task]) -> list[Score]:  # type: ignore[override]
        found = []
        for task in tasks:
            verdict = {"y": Verdict.right, "?": Verdict.error, "-": Verdict.no_answer}.get(
                task.response, Verdict.wrong
            )
            error = "late" if verdict == Verdict.error else None
            vote = task.response if verdict in (Verdict.right, Verdict.wrong) else None
            found.append(Score(float(verdict == Verdict.right), verdict, error, answer=vote))
        return found


def evaluated(config: Config, *groups: str) -> dict[str, float]:
    script = Drawn(*groups)
    prompts = tuple(Prompt(index, (1,), "1", {}) for index in range(len(groups)))
    (about,) = held_out(config)
    scorer = Scorer(about.reward, script, Words())  # type: ignore[arg-type]
    return Evaluator(about, prompts, script, scorer).evaluate()


def config(**section: Any) -> Config:
    return from_mapping({"data": {"eval": "e.jsonl"}, "eval": section})


def test_a_missing_score_counts_as_wrong_and_is_counted() -> None:
    found = evaluated(config(), "y", "n", "?", "y")
    assert found["eval/accuracy"] == found["eval/reward_mean"] == 0.5
    assert (found["eval/errors"], found["eval/n"]) == (1, 4)
    assert found["eval/accuracy_stderr"] == pytest.approx((1 / 3 / 4) ** 0.5)
    assert not [name for name in found if "@" in name]


def test_several_samples_of_a_named_set() -> None:
    setting = from_mapping({"eval": {"sets": {"aime": {"path": "a.jsonl", "samples": 4}}}})
    found = evaluated(setting, "yyna", "n-n-", "-y-?", "yynn")
    assert found["eval/aime/accuracy"] == pytest.approx((0.5 + 0 + 0.25 + 0.5) / 4)
    assert found["eval/aime/pass@2"] == pytest.approx((5 / 6 + 0 + 1 / 2 + 5 / 6) / 4)
    assert found["eval/aime/pass@4"] == pytest.approx(0.75)
    assert found["eval/aime/maj@4"] == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert found["eval/aime/no_answer_fraction"] == 4 / 16
    assert {
        f"eval/aime/{name}_stderr" for name in ("accuracy", "pass@2", "pass@4", "maj@4")
    } <= found.keys()
    assert unknown(found) == []
    (about,) = held_out(setting)
    assert set(about.metrics()) <= found.keys()


def test_without_answers_to_compare_there_is_no_vote() -> None:
    own = RewardSection(name="mine.py:score")
    script = Script("ynyn", "nnnn")  # its scores hold no answers
    (about,) = held_out(
        Config(
            reward=own,
            data=config().data,
            eval=config(samples=4).eval,
        )
    )
    scorer = Scorer(own, script, Words())  # type: ignore[arg-type]
    prompts = tuple(Prompt(index, (1,), "1", {}) for index in range(2))
    found = Evaluator(about, prompts, script, scorer).evaluate()
    assert "eval/pass@4" in found
    assert "eval/maj@4" not in found


def test_what_a_set_does_not_say_is_the_section_s_or_the_run_s() -> None:
    given = {
        "data": {"eval": "e.jsonl"},
        "rollout": {"temperature": 0.9, "max_response_tokens": 70},
        "reward": {"name": "math_dapo", "wrong": -1},
        "eval": {
            "top_p": 0.7,
            "sets": {
                "again": {
                    "samples": 8,
                    "temperature": 0.5,
                    "reward": "math_verify",
                    "max_response_tokens": 90,
                },
                "math": {"path": "math", "samples": 2},
            },
        },
    }
    plain, again, math = held_out(from_mapping(given))
    assert (
        plain.name,
        plain.samples,
        plain.temperature,
        plain.max_tokens,
    ) == ("", 1, 0.0, 70)
    assert (again.path, again.temperature, again.top_p, again.max_tokens) == (
        "e.jsonl",
        0.5,
        0.7,
        90,
    )
    assert (again.reward.name, again.reward.wrong) == ("math_verify", -1)
    assert (math.path, math.temperature, math.reward.name) == (
        "HuggingFaceH4/MATH-500[test]",
        0.9,
        "math_dapo",
    )
    assert plain.ks == []
    assert again.ks == [2, 4, 8]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("eval.sets.a.pth=x", "eval.sets.a.pth: unknown"),
        ("eval.sets={a/b: {path: x}}", "a/b"),
        ("eval.sets.a={samples: 0}", "eval.sets.a.samples is 0"),
        ("eval={samples: 2, temperature: 0}", "eval.samples: 2"),
    ],
)
def test_a_set_that_cannot_be(tmp_path: Any, override: str, key: str) -> None:
    (tmp_path / "mine.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=key):
        load(tmp_path / "mine.yaml", [override])
