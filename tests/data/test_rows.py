"""Rows that are not what a run can use: each is refused with its file and line before anything
starts, or harmless.
"""

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import refusal

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import DataSection
from megatron_rl.data.prompts import FolderTokenizer, load_dataset
from megatron_rl.data.rows import DEPTH, read_rows

GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'
NESTED = b'{"prompt": "1+1=", "answer": "2", "more": %s}'


def refused(path: Path) -> str:
    said = refusal(read_rows, "data.train", path)
    assert "data.train" in said and str(path) in said
    assert "\n" not in said
    said.encode()  # a screen takes it
    return said


@pytest.mark.fault(
    "line 2 of a data set is broken in any of 19 ways", "file, line and reason in a sentence"
)
@pytest.mark.parametrize(
    ("line", "word"),
    [
        (rb'{"prompt": "\ud83d", "answer": "2"}', "half of a surrogate pair"),
        (rb'{"prompt": "1+1=", "answer": "\uDE00"}', "half of a surrogate pair"),
        (NESTED % rb'[{"deep": ["\udfff"]}]', "half of a surrogate pair"),
        (NESTED % rb'{"\ud800": 1}', "half of a surrogate pair"),
        (b'{"prompt": "\xff\xfe", "answer": "2"}', "not UTF-8"),
        (b'{"prompt": "caf\xe9", "answer": "2"}', "not UTF-8"),
        (b'{"prompt": "\xed\xa0\xbd", "answer": "2"}', "not UTF-8"),
        (b'{"prompt": "1\x00"}', "not JSON"),
        (b"[" * 100_000, "nested deeper"),
        (NESTED % (b"[" * 100_000 + b"]" * 100_000), "nested deeper"),
        (NESTED % (b"[" * DEPTH + b"]" * DEPTH), "nested deeper"),
        (NESTED % (b'{"a":' * 200 + b"1" + b"}" * 200), "nested deeper"),
        (NESTED % b"NaN", "NaN is not a number"),
        (NESTED % b"[-Infinity]", "Infinity is not a number"),
        (NESTED % b"1e999", "too large"),
        (NESTED % (b"9" * 5000), "too large"),
        (b'{"prompt": "1+1=", "answer": "2", "answer": "3"}', "'answer' is there twice"),
        (NESTED % b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'"text"', "str, expected an object"),
    ],
)
def test_broken_lines(tmp_path: Path, line: bytes, word: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(GOOD + line + b"\n" + GOOD)
    said = refused(path := tmp_path / "rows.jsonl")
    assert f"line 2 of {path} {'holds ' if word.startswith('str') else 'is '}" in said
    assert word in said


@pytest.mark.fault("a data set is saved as UTF-16, or as a folder", "a sentence")
def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(GOOD.decode() * 2, encoding="utf-16")
    assert "rows.jsonl is not UTF-8" in refused(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(GOOD.decode() * 2, encoding="utf-16-le")
    assert f"line 1 of {tmp_path / 'rows.jsonl'} is not" in refused(tmp_path / "rows.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    refused(tmp_path / "folder.jsonl")


@pytest.mark.fault(
    "a data set has a byte order mark, empty lines, emoji, brackets in text", "it is read"
)
def test_what_only_looks_broken(tmp_path: Path) -> None:
    rows = [
        {"prompt": "\U0001f600 [[{{" * 40, "answer": None, "big": 2**70, "x": [1.5, -3, True]},
        {"prompt": "2"},
    ]
    lines = [json.dumps(rows[0]), "", "  ", json.dumps(rows[1], ensure_ascii=False)]
    (tmp_path / "rows.jsonl").write_text("\r\n".join(lines), encoding="utf-8-sig")
    assert list(read_rows("data.train", tmp_path / "rows.jsonl")) == rows


@pytest.mark.fault(
    "a Parquet file is cut short, or holds text or times that cannot be shown",
    "file and row are named",
)
def test_broken_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["1+1="] * 3000}), path)
    whole = path.read_bytes()
    for broken in (
        b"",
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:8] + whole[-8:],
        b"\0" * len(whole),
    ):
        path.write_bytes(broken)
        assert "not a readable parquet" in refused(path)
    data = pa.array([b"1+1="] * 2050 + [b"\xff\xfe"], pa.binary())
    text = pa.StringArray.from_buffers(len(data), *data.buffers()[1:])
    pq.write_table(pa.table({"prompt": text}), path)
    assert "row 2050 of" in refused(path)
    pq.write_table(pa.table({"when": pa.array([1, 3], pa.timestamp("ns"))}), path)
    assert "row 0 of" in refused(path)
    pq.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), path)
    assert "'prompt' twice" in refused(path)


def test_parquet_rows_are_as_json_has_them(tmp_path: Path) -> None:
    columns = {
        "prompt": [[{"role": "user", "content": "é"}]],
        "gold": [float("nan")],
        "day": [datetime.date(2026, 1, 2)],
        "raw": [b"\xff"],
        "text": [b"1+1="],
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    rows = read_rows("data.train", tmp_path / "rows.parquet")
    plain = {"gold": None, "day": "2026-01-02", "raw": "/w==", "text": "1+1=", "map": [["a", 1]]}
    assert list(rows) == [{"prompt": [{"role": "user", "content": "é"}]} | plain]


def load(path: Path, rows: list[dict], tokenizer: FolderTokenizer, **keys: str) -> list[dict]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSection(train=str(path), **keys)
    return [
        dict(one.row)
        for one in load_dataset("train", data, tokenizer, 8, needs_answer=True).prompts
    ]


@pytest.mark.fault(
    "an answer is null, or a list", "the row is named: it does not become the text 'None'"
)
@pytest.mark.parametrize(
    ("answer", "kind"), [(None, "null"), (["2"], "list"), ({"a": 2}, "dict"), (True, "bool")]
)
def test_answers_that_are_no_text(
    tmp_path: Path, tokenizer: FolderTokenizer, answer: object, kind: str
) -> None:
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": answer}]
    with pytest.raises(
        ConfigError, match=rf"data\.answer_key: 'answer' of line 2 of .*rows.jsonl is {kind}"
    ):
        load(tmp_path / "rows.jsonl", rows, tokenizer)


@pytest.mark.fault(
    "prompts are lists of text, empty lists, messages without a role", "the row is named"
)
@pytest.mark.parametrize(
    "prompt", [["1+1="], [], [[]], [{"content": "x"}], [{"role": 1, "content": "x"}], [None]]
)
def test_lists_that_are_no_messages(
    tmp_path: Path, tokenizer: FolderTokenizer, prompt: list
) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.prompt_key: 'prompt' of line 2 of .* not one of messages"
    ):
        load(
            tmp_path / "rows.jsonl",
            [{"prompt": "1+1=", "answer": 2}, {"prompt": prompt, "answer": 2}],
            tokenizer,
        )


def test_keys_reach_into_columns(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    row = {"task": {"text": "1+1="}, "reward_model": {"style": "rule", "ground_truth": "2"}}
    keys = {"prompt_key": "task.text", "answer_key": "reward_model.ground_truth"}
    (loaded,) = load(tmp_path / "rows.jsonl", [row], tokenizer, **keys)
    assert (
        loaded["reward_model.ground_truth"] == "2" and loaded["reward_model"] == row["reward_model"]
    )
    # a column of just this name comes first
    plain = {
        "prompt": "1+1=",
        "a.b": "3",
        "a": {"b": "4"},
    }
    (loaded,) = load(tmp_path / "rows.jsonl", [plain], tokenizer, answer_key="a.b")
    assert loaded["a.b"] == "3"


@pytest.mark.fault("a dotted key misses", "the keys that are there at that level are named")
@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("reward_model.truth", "reward_model has style, ground_truth"),
        ("reward.ground_truth", "it has prompt, reward_model"),
        ("reward_model.style.name", "reward_model.style has str"),
        ("reward_model.", "reward_model has style"),
        (".", "it has prompt"),
    ],
)
def test_a_miss_names_what_is_there(
    tmp_path: Path, tokenizer: FolderTokenizer, name: str, there: str
) -> None:
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}
    said = refusal(load, tmp_path / "rows.jsonl", [row], tokenizer, answer_key=name)
    assert said.startswith(f"data.answer_key: {name!r} is not in line 1 of ")
    assert there in said
