"""Data, reward and run directory in a dry run and at a start: docs/getting-started/your-own-task.md."""

import json
import socket
from pathlib import Path

import pytest
from helpers import Command

REWARD = ("reward.name=own.py:reward",)


def rows(place: Path, *answers: object) -> tuple[str, ...]:
    """Rows with these answers, as the training data."""
    lines = [json.dumps({"prompt": f"{n}+0=", "answer": one}) for n, one in enumerate(answers)]
    (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return ("data.train=rows.jsonl", "rollout.prompts_per_step=1")


def reward(place: Path, *lines: str) -> None:
    (place / "own.py").write_text(
        "\n    ".join(["def reward(row, answer_key, response):", *lines]) + "\n"
    )


def test_prompts_that_are_left_out_are_counted(place: Path, command: Command) -> None:
    # of which 10+0= and more have 5
    given = (
        *rows(place, *"0123456789abcdefg"),
        "rollout.max_prompt_tokens=4",
    )
    assert "7 of 17 prompts" in command.refused(*given)
    assert "7 of 17 prompts" in command.dry_run(*given, "data.long_prompts=drop")


@pytest.mark.fault(
    "a reward raises, or returns no number",
    "the dry run and the start say so before anything is made",
)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return row['gold'] == response", "KeyError: 'gold'"),
        ("return 'right'", "TypeError: the reward is 'right', expected a number"),
        ("return {'acc': True}", "without 'score'"),
        ("import time; time.sleep(600)", "no score within reward.timeout_s=0.5"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_reward_that_judges_nothing(
    place: Path, command: Command, line: str, said: str, dry: bool
) -> None:
    reward(place, line)
    found = command.refused(*rows(place, *"123"), *REWARD, "reward.timeout_s=0.5", dry=dry)
    assert found.startswith("error: reward.name: own.py:reward ")
    assert "'3' to '2+0='" in found
    assert said in found
    assert not (place / "runs").exists()


def test_one_row_that_a_reward_can_judge_is_enough(place: Path, command: Command) -> None:
    """Each is asked about its own answer."""
    reward(place, "return 1 / (response == row['answer'] == '2')")
    said = command.dry_run(*rows(place, *"123"), *REWARD, "reward.wrong=-1")
    assert "reward.wrong=-1 is not used: own.py:reward returns its own scores" in said
    assert "ZeroDivisionError" in command.refused(*rows(place, *"113"), *REWARD)


def test_a_judge_that_is_not_there_yet_is_a_note_of_the_dry_run(
    place: Path, command: Command
) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        ask = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{one.getsockname()[1]}')"
        reward(place, f"{ask}; return 1.0")
        said = command.dry_run(*rows(place, *"123"), *REWARD)
        assert "refused: reward.name: own.py:reward" in said
        assert "Connection refused" in said
        assert "start the service" in command.refused(*REWARD, *rows(place, *"123"), dry=False)


def test_a_held_out_set_with_a_reward_of_its_own(place: Path, command: Command) -> None:
    reward(place, "return row['gold'] == response")
    given = "eval.sets={more: {path: data/toy/test.jsonl, reward: own.py:reward}}"
    assert "KeyError: 'gold'" in command.refused(given)


def test_what_a_start_makes_of_a_directory_that_is_there(place: Path, command: Command) -> None:
    old = place / "runs" / "mine"
    old.mkdir(parents=True)
    (old / "status.json").write_text(json.dumps({"state": "finished"}))
    assert "refused: run.name: " in command.dry_run()
    assert "to runs/mine.1 " in command.dry_run("run.if_exists=archive")
    assert "no checkpoint" in command.dry_run("run.if_exists=resume")
    (old / "checkpoints" / "step_3").mkdir(parents=True)
    assert "after step 3" in command.dry_run("run.if_exists=resume")
    (old / "status.json").write_text(json.dumps({"state": "failed"}))
    assert "before its first step" in command.dry_run()
    assert "exists:" not in command.dry_run("run.name=other")
