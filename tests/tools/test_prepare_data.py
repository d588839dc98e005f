"""Published tables, generated tasks and pass rates in one schema; errors name their row."""

import json
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

pytestmark = pytest.mark.usefixtures("empty")
ROWS = Path("rows.jsonl")
MADE = "made.parquet"
TABLES = {  # kind: rows as published, and what becomes of them
    "dapo_math_17k": (
        [dapo_row("1+1?", "2")] * 100
        + [dapo_row("2+2?", "4")] * 3
        + [dapo_row("3+3?", "6"), dapo_row("3+3?", "7")],
        [("1+1?", "2"), ("2+2?", "4")],
    ),
    "aime_2024": (
        [dapo_row("How many?", "033")] * 32
        + [
            {"problem": "And now?", "answer": "204.0"},
            {"problem": "More?", "answer": "0" + "9" * 5000},
        ],
        [("How many?", "33"), ("And now?", "204"), ("More?", "9" * 5000)],
    ),
    "aime_2025": (
        [{"problem_idx": 1, "problem": "How many?", "answer": 70, "problem_type": ["Algebra"]}],
        [("How many?", "70")],
    ),
    "gsm8k": (
        [{"question": "Eggs?", "answer": "She sells <<16-3=13>>13.\n#### 1,018"}],
        [("Eggs?", "1018")],
    ),
    "math": (
        [
            {
                "problem": "x?",
                "level": "Level 5",
                "type": "Algebra",
                "solution": "First $\\boxed{1}$, so it is $\\boxed{\\frac{\\sqrt{3}}{2}}$.",
            },
            {"problem": "y?", "solution": "It is $\\boxed 5$."},
            {"problem": "z?", "solution": r"So \boxed{\left\{ x \right.} or \}."},
        ],
        [("x?", "\\frac{\\sqrt{3}}{2}"), ("y?", "5"), ("z?", r"\left\{ x \right.")],
    ),
    "math500": (
        [{"problem": "x?", "solution": "So $\\boxed{8}$.", "answer": "9"}],
        [("x?", "9")],
    ),
    "deepscaler": (
        [{"problem": "x?", "answer": "\\frac12", "solution": "Long."}],
        [("x?", "\\frac12")],
    ),
}


def prepared(words: str, output: str = MADE) -> list[dict]:
    assert prepare_data.main([*words.split(), "-o", output]) == 0
    return pq.read_table(output).to_pylist()


@pytest.mark.parametrize("kind", TABLES)
def test_published_tables(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, expected = TABLES[kind]
    write_lines(ROWS, given)
    rows = prepared(f"{kind} rows.jsonl", "out/made.parquet")
    assert [(row["prompt"], row["answer"]) for row in rows] == expected
    assert {row["data_source"] for row in rows} == {kind}
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["prompts"]) == (len(given), len(expected))
    kept = pq.read_schema("out/made.parquet").metadata or {}
    kept |= pq.read_metadata("out/made.parquet").metadata or {}
    assert json.loads(kept[b"prepared"]) == said
    if kind == "dapo_math_17k":
        assert (said["duplicates"], said["with_two_answers"]) == (102, 1)
        pq.write_table(pa.Table.from_pylist(given), "rows.parquet")
        prepared(f"{kind} rows.parquet")
        assert json.loads(capsys.readouterr().out) == said


def test_what_was_prepared_is_read_without_keys() -> None:
    write_lines(ROWS, [dapo_row("1+1", "2")])
    prepared("dapo_math_17k rows.jsonl")
    write_toy(Path("toy"))
    tokenizer = FolderTokenizer(Path("toy/model"))
    found = load_dataset("train", DataSection(train=MADE), tokenizer, 8, needs_answer=True)
    assert [(one.text, one.answer) for one in found.prompts] == [("1+1", "2")]


def test_a_look_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(ROWS, [dapo_row(f"{each}+1?", "2") for each in range(9)])
    words = "dapo_math_17k rows.jsonl --instruction answer_line"
    assert prepare_data.main([*words.split(), "--show", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count('"prompt": ') == 3
    assert "2+1?\\n\\nThink step by step" in shown
    assert "3+1?" not in shown
    prepared(words)
    assert json.loads(shown.splitlines()[-1]) == json.loads(capsys.readouterr().out)


def test_generated_tasks_are_judged_by_their_own_verifier() -> None:
    rows = prepared("reasoning_gym chain_sum spell_backward --count 5")
    assert len(rows) == 10
    judge = resolve("reasoning_gym")
    for row in rows:
        for response, verdict in ((row["answer"], Verdict.right), ("nothing", Verdict.wrong)):
            judged = judge(Task(row, response))
            assert judged is not None
            assert judged.verdict == verdict


def test_the_sanity_set_is_what_is_solved_now_and_then() -> None:
    write_lines(ROWS, [{"problem": f"{each}?", "answer": str(each)} for each in range(5)])
    rates = enumerate((0.0, 0.2, 0.5, 0.9))
    solved = [{"prompt": f"{each}?", "pass_rate": rate} for each, rate in rates]
    write_lines(Path("rates.jsonl"), solved)
    rows = prepared("math rows.jsonl --pass-rates rates.jsonl --keep-between 0.2 0.8")
    assert [row["prompt"] for row in rows] == ["1?", "2?"]


@pytest.mark.fault("a table is not of its kind, or lacks an answer", "row and reason in a sentence")
@pytest.mark.parametrize(
    ("words", "row", "said"),
    [
        ("gsm8k", {"question": "1?", "answer": "It is 5."}, "row 1 of rows.jsonl"),
        ("math", {"problem": "1?", "solution": "\\boxed{5"}, "row 1 of rows.jsonl"),
        ("math", {"problem": "1?", "solution": ""}, "row 1 of rows.jsonl"),
        ("dapo_math_17k", {"prompt": "1?", "answer": [1, 2]}, "'answer' that is list"),
        ("dapo_math_17k", {"prompt": "1?", "answer": float("nan")}, "line 2 of rows.jsonl"),
        (
            "math --pass-rates rows.jsonl",
            {"problem": "1?", "solution": "5"},
            "--pass-rates: line 1",
        ),
        ("math gone.jsonl", {}, "no file 'gone.jsonl'"),
        ("reasoning_gym no_such", {}, "no_such"),
    ],
)
def test_what_is_wrong_is_named(
    capsys: pytest.CaptureFixture[str], words: str, row: dict, said: str
) -> None:
    good = {"question": "0?", "problem": "0?", "prompt": "0?", "answer": "so\n#### 5"}
    write_lines(ROWS, [good | {"solution": "5"}, row])
    assert prepare_data.main(["-o", MADE, *words.split(), "rows.jsonl"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error
    assert not Path(MADE).exists()
