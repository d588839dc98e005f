"""tools/prepare_data.py: published tables, generated tasks and pass rates to one schema; what is wrong is named."""

import json
import os
from pathlib import Path

import prepare_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import dapo_row, write_lines

from megatron_rl.config.schema import DataSection
from megatron_rl.data.prompts import load_dataset
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_toy
from megatron_rl.rewards.functions import resolve
from megatron_rl.rewards.task import Task
from megatron_rl.types import Verdict

TABLES = {  # kind: rows as published, and what becomes of them
    "dapo_math_17k": (
        [dapo_row("1+1?", "2")] * 100 + [dapo_row("2+2?", "4")] * 3 + [dapo_row("3+3?", "6"), dapo_row("3+3?", "7")],
        [("1+1?", "2"), ("2+2?", "4")],
    ),
    "aime_2024": ([dapo_row("How many?", "033")] * 32 + [{"problem": "And now?", "answer": "204.0"}],
                  [("How many?", "33"), ("And now?", "204")]),
    "aime_2025": ([{"problem_idx": 1, "problem": "How many?", "answer": 70, "problem_type": ["Algebra"]}],
                  [("How many?", "70")]),
    "gsm8k": ([{"question": "Eggs?", "answer": "She sells <<16-3=13>>13.\n#### 1,018"}], [("Eggs?", "1018")]),
    "math": ([{"problem": "x?", "level": "Level 5", "type": "Algebra",
               "solution": "First $\\boxed{1}$, so it is $\\boxed{\\frac{\\sqrt{3}}{2}}$."},
              {"problem": "y?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed 5$."},
              {"problem": "z?", "solution": r"So \boxed{\left\{ x \right.} or \}."}],
             [("x?", "\\frac{\\sqrt{3}}{2}"), ("y?", "5"), ("z?", r"\left\{ x \right.")]),
    "math500": ([{"problem": "x?", "solution": "So $\\boxed{9}$.", "answer": "9", "unique_id": "test/1.json"}],
                [("x?", "9")]),
    "deepscaler": ([{"problem": "x?", "answer": "\\frac12", "solution": "Long."}], [("x?", "\\frac12")]),
}  # fmt: skip


def prepared(kind: str, inputs: list[str], output: Path, *more: str) -> list[dict]:
    assert prepare_data.main([kind, *inputs, "-o", str(output), *more]) == 0
    return pq.read_table(output).to_pylist()


@pytest.mark.parametrize("kind", TABLES)
def test_published_tables(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, expected = TABLES[kind]
    write_lines(tmp_path / "rows.jsonl", given)
    rows = prepared(kind, [str(tmp_path / "rows.jsonl")], tmp_path / "out" / "made.parquet")
    assert [(row["prompt"], row["answer"]) for row in rows] == expected
    assert {row["data_source"] for row in rows} == {kind}
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["prompts"]) == (len(given), len(expected))
    kept = pq.read_schema(tmp_path / "out" / "made.parquet").metadata or {}
    kept |= pq.read_metadata(tmp_path / "out" / "made.parquet").metadata or {}
    assert json.loads(kept[b"prepared"]) == said
    if kind == "dapo_math_17k":
        assert (said["duplicates"], said["with_two_answers"]) == (102, 1)
        pq.write_table(pa.Table.from_pylist(given), tmp_path / "rows.parquet")
        prepared(kind, [str(tmp_path / "rows.parquet")], tmp_path / "again.parquet")
        assert json.loads(capsys.readouterr().out) == said


def test_what_was_prepared_is_read_without_keys(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [dapo_row("1+1", "2")])
    prepared("dapo_math_17k", [str(tmp_path / "rows.jsonl")], tmp_path / "made.parquet")
    write_toy(tmp_path / "toy")
    section = DataSection(train=str(tmp_path / "made.parquet"))
    found = load_dataset("train", section, FolderTokenizer(tmp_path / "toy" / "model"), 8, needs_answer=True)
    assert [(one.text, one.answer) for one in found.prompts] == [("1+1", "2")]


def test_a_look_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "rows.jsonl", [dapo_row(f"{each}+1?", "2") for each in range(9)])
    arguments = ["dapo_math_17k", str(tmp_path / "rows.jsonl"), "--instruction", "answer_line"]
    assert prepare_data.main([*arguments, "--show", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count('"prompt": ') == 3 and "2+1?\\n\\nThink step by step" in shown and "3+1?" not in shown
    assert prepare_data.main([*arguments, "-o", str(tmp_path / "made.parquet")]) == 0
    assert json.loads(shown.splitlines()[-1]) == json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        prepare_data.main(arguments)


def test_generated_tasks_are_judged_by_their_own_verifier(tmp_path: Path) -> None:
    rows = prepared("reasoning_gym", ["chain_sum", "spell_backward"], tmp_path / "made.parquet", "--count", "5")
    assert len(rows) == 10
    judge = resolve("reasoning_gym")
    for row in rows:
        for response, verdict in ((row["answer"], Verdict.right), ("nothing like it", Verdict.wrong)):
            judged = judge(Task(row, response))
            assert judged is not None and judged.verdict == verdict


def test_the_sanity_set_is_what_is_solved_now_and_then(tmp_path: Path) -> None:
    given = [{"problem": f"{each}?", "answer": str(each)} for each in range(5)]
    write_lines(tmp_path / "rows.jsonl", given)
    rates = [{"prompt": f"{each}?", "pass_rate": rate} for each, rate in enumerate((0.0, 0.2, 0.5, 0.9))]
    write_lines(tmp_path / "rates.jsonl", rates)
    more = ["--pass-rates", str(tmp_path / "rates.jsonl"), "--keep-between", "0.2", "0.8"]
    rows = prepared("math", [str(tmp_path / "rows.jsonl")], tmp_path / "made.parquet", *more)
    assert [row["prompt"] for row in rows] == ["1?", "2?"]


@pytest.mark.fault("a table is not of its kind, or has a row without an answer", "row and reason in a sentence")
@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        ("gsm8k", {"question": "1?", "answer": "It is 5."}, "row 1 of {path} has an answer without ####"),
        ("math", {"problem": "1?", "solution": "\\boxed{5"}, "row 1 of {path} has a box that is never closed"),
        ("math", {"problem": "1?", "solution": ""}, "row 1 of {path} has an empty question or answer"),
        ("math", {"text": "1?"}, "row 1 of {path} has text, and no problem or question"),
        ("dapo_math_17k", dapo_row("1?", "5") | {"prompt": [{"content": "a"}] * 2}, "neither text nor one message"),
        ("dapo_math_17k", {"prompt": "1?", "answer": [1, 2]}, "row 1 of {path} has a 'answer' that is list"),
        ("dapo_math_17k", {"prompt": "1?", "answer": float("nan")}, "line 2 of {path} is not JSON (NaN is not"),
    ],
)
def test_rows_that_are_not_of_the_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, row: dict, said: str
) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"question": "0?", "problem": "0?", "prompt": "0?", "answer": "so\n#### 5", "solution": "5"}
    write_lines(path, [good, row])
    assert prepare_data.main([kind, str(path), "-o", str(tmp_path / "made.parquet")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert said.format(path=path) in error
    assert not (tmp_path / "made.parquet").exists()


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    assert prepare_data.main(["math", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "made.parquet")]) == 2
    assert "no prompt is left" in capsys.readouterr().err
    assert not (tmp_path / "made.parquet").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsm8k", "gone.jsonl"], "no file 'gone.jsonl'; bring it there, or name another file"),
        (["gsm8k", "name.parquet"], "INPUT: name.parquet is not a readable parquet file ('utf-8'"),
        (["gsm8k", "rows.jsonl", "--pass-rates", "rates.jsonl"], "--pass-rates: line 2 of rates."),
        (["gsm8k", "rows.jsonl", "-o", "made.jsonl"], "--output made.jsonl: Parquet is written"),
        (["gsm8k", "rows.jsonl", "-o", "pipe.parquet"], "a pipe, a socket or a device is there"),
        (["gsm8k", "rows.jsonl", "--show", "-5"], "name the file to write with -o, or"),
        (["reasoning_gym", "chain_sum", "--options", "[" * 100_000], "--options [[[[[[[[[[[[[["),
        (["reasoning_gym", "chain_sum", "--options", '{"a": ' + "9" * 5000], '--options {"a": 9'),
        (["reasoning_gym", "no_such"], "reasoning_gym no_such: "),
    ],
)
def test_what_is_wrong_is_named(empty: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    write_lines(empty / "rows.jsonl", [{"question": "1+1?", "answer": "#### 2"}])
    write_lines(empty / "rates.jsonl", [{"prompt": "1+1?", "pass_rate": 1}, {"pass_rate": 0}])
    pq.write_table(pa.table({"question": ["?"]}), "name.parquet")
    content = Path("name.parquet").read_bytes()
    Path("name.parquet").write_bytes(content.replace(b"question", b"\xffuestion"))
    os.mkfifo("pipe.parquet")
    try:
        ended = prepare_data.main([*words, *([] if {"-o", "--show"} & {*words} else ["-o", "made.parquet"])])
    except SystemExit as usage:
        ended = usage.code
    assert ended == 2
    assert said in capsys.readouterr().err
    assert not Path("made.parquet").exists()


def test_an_answer_of_many_digits(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"problem": "?", "answer": f"00{'9' * 5000}"}])
    (row,) = prepared("aime_2024", [str(tmp_path / "rows.jsonl")], tmp_path / "made.parquet")
    assert row["answer"] == "9" * 5000
