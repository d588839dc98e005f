"""Data sets to prompts: order, duplicates, lengths, and errors that name the file and the line."""

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import DataSection, LongPrompts
from megatron_rl.data.prompts import FolderTokenizer, PromptOrder, load_dataset
from megatron_rl.data.toy import COUNTING, SLIPS, ToyTask, write_counting, write_toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder, ToyTask(largest=9, largest_second=9, held_out=10))
    return folder


@pytest.fixture(scope="module")
def tokenizer(toy: Path) -> FolderTokenizer:
    return FolderTokenizer(toy / "model")


def rows_file(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_counting_on_has_answers_of_thirty_two_tokens() -> None:
    problems = {row["prompt"]: row["answer"] for row in COUNTING.problems()}
    assert problems["127+8="] == "135 143 151 159 167 175 183 191"
    assert {len(answer) for answer in problems.values()} == {31}  # and an end


def test_slips_are_counted_on_from(tmp_path: Path) -> None:
    write_counting(tmp_path)
    rows = [[json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "slips")]
    assert [row["prompt"] for row in rows[0]] == [row["prompt"] for row in rows[1]]
    offs = [
        [int(b) - int(a) for a, b in zip(*(row["answer"].split() for row in pair), strict=True)]
        for pair in zip(*rows, strict=True)
    ]
    steps = [abs(b - a) for off in offs for a, b in itertools.pairwise([0, *off])]
    assert set(steps) == {0, 1}
    assert sum(steps) / len(steps) == pytest.approx(SLIPS, abs=0.005)
    assert sum(not any(off) for off in offs) / len(offs) == pytest.approx((1 - SLIPS) ** COUNTING.terms, abs=0.02)


def test_the_toy_is_split_without_overlap(toy: Path) -> None:
    train, test = ([json.loads(line) for line in (toy / f"{name}.jsonl").open()] for name in ("train", "test"))
    assert len(train) + len(test) == 100
    assert len(test) == 10
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    for row in train + test:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(a) + int(b) == int(row["answer"])


def test_characters_survive_the_tokenizer(tokenizer: FolderTokenizer) -> None:
    text = "12+34= 5-6*7"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([[*ids, *tokenizer.stop_token_ids], ids[:2]]) == [text, text[:2]]


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    one = load_dataset("train", DataSection(train=rows_file(tmp_path / "rows.jsonl", rows)), tokenizer, 8)
    two = load_dataset("train", DataSection(train=str(tmp_path / "rows.parquet")), tokenizer, 8)
    assert list(one.prompts) == list(two.prompts)
    assert [prompt.id for prompt in one.prompts] == [0, 1]


def test_duplicates_are_counted_and_left_out(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    path = rows_file(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 3)
    dataset = load_dataset("train", DataSection(train=path), tokenizer, 8)
    assert (len(dataset), dataset.rows, dataset.duplicates) == (1, 3, 2)
    assert "2 duplicates" in dataset.describe()


def test_long_prompts_are_refused_or_dropped(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "111+111=", "answer": "222"}]
    path = rows_file(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens: 5.*longest has 8.*data\.long_prompts=drop"):
        load_dataset("train", DataSection(train=path), tokenizer, 5)
    dataset = load_dataset("train", DataSection(train=path, long_prompts=LongPrompts.drop), tokenizer, 5)
    assert (len(dataset), dataset.too_long) == (1, 1)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", '{"prompt": "1+1="}\n{"prompt": \n', ["data.train", "line 2"]),
        ("rows.jsonl", "[1, 2]\n", ["line 1", "list"]),
        ("rows.jsonl", '{"sum": "1+1="}\n', ["data.prompt_key", "row 0", "has sum, none of which"]),
        ("rows.jsonl", '{"prompt": 7}\n', ["data.prompt_key", "row 0", "int"]),
        ("rows.jsonl", '{"prompt": ""}\n', ["data.train", "row 0", "empty"]),
        ("rows.jsonl", '{"prompt": [{"role": "user", "content": "1+1="}]}\n', ["model.path", "chat template"]),
        ("rows.jsonl", "", ["leaves no prompts"]),
        ("rows.csv", "prompt\n", [".parquet, .jsonl, .arrow are read"]),
        ("rows.parquet", "nonsense", ["not a readable parquet"]),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, tokenizer: FolderTokenizer, name: str, content: str, words: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_dataset("train", DataSection(train=str(tmp_path / name)), tokenizer, 8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        FolderTokenizer(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.path: .*tokenizer\.json is not a readable tokenizer"):
        FolderTokenizer(tmp_path)


def test_the_order_resumes_from_its_position(toy: Path, tokenizer: FolderTokenizer) -> None:
    dataset = load_dataset("train", DataSection(train=str(toy / "train.jsonl")), tokenizer, 12)
    whole = PromptOrder(dataset, seed=3, shuffle=True)
    taken = whole.take(70) + whole.take(70)
    resumed = PromptOrder(dataset, seed=3, shuffle=True, position=70)
    assert resumed.take(70) == taken[70:]
    assert resumed.position == whole.position == 140
    first, second = taken[:90], [*taken[90:], *whole.take(40)]
    assert {prompt.id for prompt in first} == {prompt.id for prompt in second} == {p.id for p in dataset.prompts}
    assert first != second
    assert PromptOrder(dataset, seed=4, shuffle=True).take(90) != first
    assert PromptOrder(dataset, seed=4, shuffle=False).take(90) == list(dataset.prompts)
