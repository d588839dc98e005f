"""Rows that a run cannot use: each is refused with its file and line before anything starts."""

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import refusal, write_lines

from megatron_rl.config.schema import DataSection
from megatron_rl.data.prompts import FolderTokenizer, load_dataset
from megatron_rl.data.rows import DEPTH, read_rows

GOOD = b'{"prompt": "1+1=", "answer": "2"}\n'
NESTED = b'{"prompt": "1+1=", "answer": "2", "more": %s}'


def refused(path: Path) -> str:
    message = refusal(read_rows, "data.train", path)
    assert "data.train" in message and str(path) in message
    return message


@pytest.mark.fault("line 2 of a data set is broken in any of 12 ways", "file and line are named")
@pytest.mark.parametrize(
    "line",
    [
        rb'{"prompt": "\ud83d", "answer": "2"}',
        NESTED % rb'{"\ud800": 1}',
        b'{"prompt": "caf\xe9", "answer": "2"}',
        b'{"prompt": "\xed\xa0\xbd", "answer": "2"}',
        b'{"prompt": "1\x00"}',
        b"[" * 100_000,
        NESTED % (b"[" * DEPTH + b"]" * DEPTH),
        NESTED % (b'{"a":' * 200 + b"1" + b"}" * 200),
        NESTED % b"NaN",
        NESTED % b"1e999",
        NESTED % (b"9" * 5000),
        b'"text"',
    ],
)
def test_broken_lines(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    assert f"line 2 of {path} is" in refused(path)


def test_a_row_may_be_as_deep_as_the_bound(tmp_path: Path) -> None:
    levels = DEPTH - 1
    (tmp_path / "rows.jsonl").write_bytes(NESTED % (b"[" * levels + b"]" * levels))
    assert len(read_rows("data.train", tmp_path / "rows.jsonl")) == 1


@pytest.mark.fault("a data set is saved as UTF-16, or as a folder", "the file is named")
def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD.decode() * 2, encoding="utf-16")
    assert "line 1 of" in refused(path)
    (tmp_path / "folder.jsonl").mkdir()
    refused(tmp_path / "folder.jsonl")


@pytest.mark.fault(
    "a data set has a byte order mark, empty lines, emoji, brackets in text", "it is read"
)
def test_what_only_looks_broken(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": "\U0001f600 [[{{" * 40,
            "answer": None,
            "big": 2**70,
            "x": [1.5, -3, True],
        },
        {"prompt": "2"},
    ]
    lines = [
        json.dumps(rows[0]),
        "",
        "  ",
        json.dumps(rows[1], ensure_ascii=False),
    ]
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
        b"\0" * len(whole),
    ):
        path.write_bytes(broken)
        refused(path)
    data = pa.array([b"1+1="] * 2050 + [b"\xff\xfe"], pa.binary())
    text = pa.StringArray.from_buffers(len(data), *data.buffers()[1:])
    pq.write_table(pa.table({"prompt": text}), path)
    assert "row 2050 of" in refused(path)
    pq.write_table(pa.table([["a"], ["b"]], names=["prompt", "prompt"]), path)
    assert "'prompt'" in refused(path)


def test_parquet_rows_are_as_json_has_them(tmp_path: Path) -> None:
    columns = {
        "prompt": [[{"role": "user", "content": "é"}]],
        "gold": [float("nan")],
        "day": [datetime.date(2026, 1, 2)],
        "raw": [b"\xff"],
        "text": [b"1+1="],
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())),
        "kind": pa.array(["sum"]).dictionary_encode(),
        "when": pa.array([1], pa.timestamp("ns")),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    (row,) = read_rows("data.train", tmp_path / "rows.parquet")
    assert row == {
        "prompt": [{"role": "user", "content": "é"}],
        "gold": None,
        "day": "2026-01-02",
        "raw": "/w==",
        "text": "1+1=",
        "map": [["a", 1]],
        "kind": "sum",
        "when": "1970-01-01 00:00:00.000000001",
    }


def load(path: Path, rows: list[dict], tokenizer: FolderTokenizer, **keys: str) -> list[dict]:
    data = DataSection(train=str(write_lines(path, rows)), **keys)
    found = load_dataset("train", data, tokenizer, 8, needs_answer=True)
    return [dict(one.row) for one in found.prompts]


@pytest.mark.fault("an answer is null, or a list", "the row is named: it does not become 'None'")
@pytest.mark.parametrize("answer", [None, ["2"], {"a": 2}, True])
def test_answers_that_are_no_text(
    tmp_path: Path, tokenizer: FolderTokenizer, answer: object
) -> None:
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": answer}]
    message = refusal(load, tmp_path / "rows.jsonl", rows, tokenizer)
    assert message.startswith("data.answer_key: ") and " line 2 " in message


@pytest.mark.fault("prompts are empty lists, or messages without a role", "the row is named")
@pytest.mark.parametrize(
    "prompt",
    [
        ["1+1="],
        [],
        [{"content": "x"}],
        [{"role": 1}],
        7,
    ],
)
def test_prompts_that_are_no_messages(
    tmp_path: Path, tokenizer: FolderTokenizer, prompt: object
) -> None:
    rows = [{"prompt": "1+1=", "answer": 2}, {"prompt": prompt, "answer": 2}]
    message = refusal(load, tmp_path / "rows.jsonl", rows, tokenizer)
    assert message.startswith("data.prompt_key: ") and " line 2 " in message


def test_keys_reach_into_columns(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"task": {"text": "1+1="}, "reward_model": {"style": "rule", "ground_truth": "2"}}
    keys = {"prompt_key": "task.text", "answer_key": "reward_model.ground_truth"}
    (loaded,) = load(path, [row], tokenizer, **keys)
    assert loaded["reward_model.ground_truth"] == "2"
    assert loaded["reward_model"] == row["reward_model"]
    # a column of just this name comes first
    plain = {"prompt": "1+1=", "a.b": "3", "a": {"b": "4"}}
    (loaded,) = load(path, [plain], tokenizer, answer_key="a.b")
    assert loaded["a.b"] == "3"


@pytest.mark.fault("a dotted key misses", "the keys that are there at that level are named")
@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("reward_model.truth", ["style", "ground_truth"]),
        ("reward.ground_truth", ["prompt", "reward_model"]),
        ("reward_model.style.name", ["reward_model.style", "str"]),
    ],
)
def test_a_miss_names_what_is_there(
    tmp_path: Path, tokenizer: FolderTokenizer, name: str, there: list[str]
) -> None:
    row = {"prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}
    message = refusal(load, tmp_path / "rows.jsonl", [row], tokenizer, answer_key=name)
    assert message.startswith(f"data.answer_key: {name!r} ")
    assert all(word in message for word in there)
