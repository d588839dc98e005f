"""The generated tasks: disjoint splits, equal each time, read through their tokenizers."""

import itertools
import json
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import (
    COUNTING,
    SLIPS,
    ToyTask,
    hf_config,
    write_counting,
    write_reasoning,
    write_toy,
)
from megatron_rl.models.shape import FAMILIES
from megatron_rl.rewards.reasoning_gym import reward
from megatron_rl.rewards.task import Task
from megatron_rl.types import Verdict


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder, ToyTask(largest=9, largest_second=9, held_out=10))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reasoning")
    write_reasoning(folder)
    return folder


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_files_each_time(folder: Path, tmp_path: Path) -> None:
    counts = write_reasoning(tmp_path)
    assert counts["test"] == 256
    assert counts["train"] > 2500
    for name in ("train.jsonl", "test.jsonl", "model/tokenizer.json", "model/config.json"):
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_existing_rows_are_not_overwritten(tmp_path: Path) -> None:
    for own in ("train.jsonl", "model/config.json"):
        path = tmp_path / own.replace("/", "-") / own
        path.parent.mkdir(parents=True)
        path.write_text("mine")
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"{own} is there already"):
                write_toy(tmp_path / own.replace("/", "-"))
        assert path.read_text() == "mine"


def test_nothing_is_trained_on_that_is_held_out(folder: Path) -> None:
    train, test = ({row["prompt"] for row in rows(folder, name)} for name in ("train", "test"))
    assert not train & test


def test_the_solutions_are_right_and_others_are_not(folder: Path) -> None:
    for row in rows(folder, "test")[:20]:
        assert reward(Task(row, row["answer"])).verdict == Verdict.right
        assert reward(Task(row, str(int(row["answer"]) + 1))).verdict == Verdict.wrong


def test_every_question_fits_the_recipe_and_comes_back(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder / "model")
    for row in rows(folder, "test"):
        text = tokenizer.text([{"role": "user", "content": row["prompt"]}])
        assert text == f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(text)
        assert len(ids) <= 48
        assert tokenizer.decode([ids]) == [f"user\n{row['prompt']}\nassistant\n"]
        answer = tokenizer.encode(row["answer"])
        assert len(answer) < 8
        assert tokenizer.decode([answer]) == [row["answer"]]


def test_words_are_tokens_and_digits_stand_alone(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder / "model")
    assert len(tokenizer.encode(" arithmetic problem")) == 2
    assert len(tokenizer.encode("2024")) == 4


def test_counting_on_has_answers_of_thirty_two_tokens() -> None:
    problems = {row["prompt"]: row["answer"] for row in COUNTING.problems()}
    assert problems["127+8="] == "135 143 151 159 167 175 183 191"
    assert {len(answer) for answer in problems.values()} == {31}  # and an end


def test_slips_are_counted_on_from(tmp_path: Path) -> None:
    write_counting(tmp_path)
    found = [rows(tmp_path, name) for name in ("train", "slips")]
    assert [row["prompt"] for row in found[0]] == [row["prompt"] for row in found[1]]
    offs = [
        [int(b) - int(a) for a, b in zip(*(row["answer"].split() for row in pair), strict=True)]
        for pair in zip(*found, strict=True)
    ]
    steps = [abs(b - a) for off in offs for a, b in itertools.pairwise([0, *off])]
    assert set(steps) == {0, 1}
    assert sum(steps) / len(steps) == pytest.approx(SLIPS, abs=0.005)
    assert sum(not any(off) for off in offs) / len(offs) == pytest.approx(
        (1 - SLIPS) ** COUNTING.terms, abs=0.02
    )


def test_the_toy_is_split_without_overlap(toy: Path) -> None:
    train, test = (rows(toy, name) for name in ("train", "test"))
    assert len(train) + len(test) == 100
    assert len(test) == 10
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for row in train + test:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(a) + int(b) == int(row["answer"])


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_class_of_a_family_reads_as_we_do(tmp_path: Path, family: str) -> None:
    """AutoTokenizer takes the class of model_type, which may make its own splits."""
    from transformers import AutoTokenizer

    write_toy(tmp_path, like=hf_config() | {"model_type": family})
    ours = FolderTokenizer(tmp_path / "model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in ("12+34=46", "100-7*3 = 79", "   1 2", "0123456789+-*= "):
        assert theirs.encode(text) == (ids := ours.encode(text))
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode([ids])[0] == text


def test_characters_survive_the_tokenizer(toy: Path) -> None:
    tokenizer = FolderTokenizer(toy / "model")
    text = "12+34= 5-6*7"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([[*ids, *tokenizer.stop_token_ids], ids[:2]]) == [text, text[:2]]
