"""Data sets as others publish them, in folders, several at once, large ones, and rows that
contradict each other.
"""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import refusal, write_lines

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import DataSection, LongPrompts
from megatron_rl.data import dataset as datasets
from megatron_rl.data import prompts as loading
from megatron_rl.data.prompts import Dataset, PromptOrder, load_dataset
from megatron_rl.data.rows import read_rows
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_toy


def written(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_lines(path, rows)
    return str(path)


def sums(count: int) -> list[dict]:
    return [{"prompt": f"{index}+1=", "answer": str(index + 1)} for index in range(count)]


def loaded(
    tokenizer: FolderTokenizer, train: object, needs_answer: bool = True, **keys: object
) -> Dataset:
    return load_dataset(
        "train", DataSection(train=train, **keys), tokenizer, 40, needs_answer=needs_answer
    )


ASKED = [{"role": "user", "content": "1+1"}]
PUBLISHED = {
    "verl": {
        "data_source": "math_dapo",
        "prompt": ASKED,
        "ability": "MATH",
        "extra_info": {"index": "a"},
        "reward_model": {"ground_truth": "2", "style": "rule"},
    },
    "slime": {"prompt": ASKED, "label": "2"},
    "NeMo-RL": {"messages": [*ASKED, {"role": "assistant", "content": "2"}], "task_name": "math"},
    "NeMo-RL, OpenMathInstruct": {
        "problem": "1+1",
        "expected_answer": "2",
        "generated_solution": "1+1 is 2",
    },
    "TRL": {"prompt": ASKED, "solution": "2"},
    "OpenRLHF": {"input": "1+1", "label": "2"},
    "OpenRLHF, context": {"context_messages": ASKED, "answer": "2"},
    "DeepScaleR": {"problem": "1+1", "solution": "It is 2.", "answer": "2"},
    "ours": {"prompt": "1+1", "answer": "2"},
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("publisher", PUBLISHED)
def test_published_rows_are_recognised(
    tmp_path: Path, tokenizer: FolderTokenizer, publisher: str, suffix: str
) -> None:
    path = written(tmp_path / f"rows{suffix}", [PUBLISHED[publisher]])
    found = loaded(tokenizer, path, chat_template_kwargs={})
    (prompt,) = found.prompts
    assert tokenizer.decode([prompt.token_ids]) == ["1+1="]
    assert prompt.answer == prompt.row[prompt.answer_key] == "2"
    assert prompt.row[prompt.prompt_key] in ("1+1", ASKED)
    assert publisher == "ours" or publisher.split(",")[0] in found.columns


def test_keys_choose_where_two_columns_fit(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    path = written(
        tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": "2", "label": "3", "question": "4"}]
    )
    assert [one.answer for one in loaded(tokenizer, path).prompts] == ["2"]
    assert [one.answer for one in loaded(tokenizer, path, answer_key="label").prompts] == ["3"]
    assert [one.text for one in loaded(tokenizer, path, prompt_key="question").prompts] == ["4"]


def test_a_system_prompt_and_options_of_the_template(
    tmp_path: Path, tokenizer: FolderTokenizer
) -> None:
    said = [{"role": "system", "content": "7"}, *ASKED]
    path = written(
        tmp_path / "rows.jsonl", [{"prompt": "1+1", "answer": "2"}, {"prompt": said, "answer": "2"}]
    )

    def texts(**keys: object) -> list[str]:
        return tokenizer.decode([one.token_ids for one in loaded(tokenizer, path, **keys).prompts])

    assert texts() == ["1+1", "71+1="]
    assert texts(chat_template_kwargs={}) == ["1+1=", "71+1="]
    assert texts(system_prompt="9-") == ["9-1+1=", "71+1="]
    assert texts(system_prompt="9-", chat_template_kwargs={"stars": True}) == [
        "9-*1+1*=",
        "7*1+1*=",
    ]


@pytest.mark.fault("a prompt has two answers in a data set", "it is left out, and counted")
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_conflicts(tmp_path: Path, tokenizer: FolderTokenizer, suffix: str) -> None:
    answers = (
        ("1+1=", "2"),
        ("2+2=", "4"),
        ("1+1=", " 2 "),
        ("2+2=", "5"),
        (
            "3+3=",
            "6",
        ),
    )
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
    path = written(tmp_path / f"rows{suffix}", rows)
    found = loaded(tokenizer, path)
    assert [one.id for one in found.prompts] == [0, 4]
    assert (found.rows, found.duplicates, found.conflicts) == (5, 2, 1)
    assert len(loaded(tokenizer, path, needs_answer=False)) == 3
    written(tmp_path / f"rows{suffix}", [rows[1], rows[3]])
    with pytest.raises(ConfigError, match="1 with two answers"):
        loaded(tokenizer, path)


@pytest.mark.fault(
    "rows are changed, shuffled, cut off or added", "the data set has another checksum"
)
def test_other_rows_have_another_checksum(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    rows = sums(6)
    changed = [
        rows[:-1],
        rows[::-1],
        [*rows, rows[0]],
        [*rows[:5], {**rows[5], "answer": "7"}],
        [*rows[1:], rows[0]],
    ]

    def checksum(name: str, rows: list[dict]) -> str:
        return loaded(tokenizer, written(tmp_path / f"{name}.jsonl", rows)).checksum

    known = checksum("known", rows)
    assert known == checksum("noted", [{**row, "note": 1} for row in rows])
    assert known not in [checksum(f"{n}", each) for n, each in enumerate(changed)]


def test_folders(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    rows = sums(6)
    for number, half in enumerate((rows[:3], rows[3:])):
        written(tmp_path / "hub" / "data" / f"train-0000{number}-of-00002-ab12.parquet", half)
    assert [one.answer for one in loaded(tokenizer, str(tmp_path / "hub")).prompts] == list(
        "123456"
    )
    written(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", rows[:1])
    assert len(loaded(tokenizer, str(tmp_path / "hub" / "test"))) == 1
    with pytest.raises(ConfigError, match=r"test, train.*hub/test"):
        loaded(tokenizer, str(tmp_path / "hub"))
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(saved / "data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table)
    (saved / "cache-0123.arrow").write_text("")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    for path in (tmp_path / "saved", saved):
        assert [one.answer for one in loaded(tokenizer, str(path)).prompts] == list("123456")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"data\.train"):
        loaded(tokenizer, str(tmp_path / "empty"))


def test_several_files_take_turns_as_their_weights_say(
    tmp_path: Path, tokenizer: FolderTokenizer
) -> None:
    small = written(
        tmp_path / "a.jsonl", [{"prompt": f"{each}+1=", "answer": "1"} for each in range(3)]
    )
    large = written(
        tmp_path / "b.jsonl", [{"question": f"{each}+2=", "answer": "2"} for each in range(50)]
    )
    found = loaded(tokenizer, {small: 1, large: 3})
    assert [one.id for one in found.prompts] == list(range(53))
    whole = PromptOrder(found, seed=3)
    taken = whole.take(2000)
    assert sum(one.answer == "1" for one in taken) == 500
    of_small = [one.id for one in taken if one.answer == "1"]
    # each epoch has all of them
    assert all(sorted(of_small[at : at + 3]) == [0, 1, 2] for at in range(0, 498, 3))
    resumed = PromptOrder(found, seed=3, position=777)
    assert resumed.take(500) == taken[777:1277] and resumed.position == 1277


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_large_data_set_is_read_when_it_is_drawn(
    tmp_path: Path, tokenizer: FolderTokenizer, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    rows = sums(20_000)
    rows[123] = {"prompt": "1" * 60 + "=", "answer": "0"}
    path = written(tmp_path / f"rows{suffix}", [*rows, rows[5]])
    whole = loaded(tokenizer, path, long_prompts=LongPrompts.drop)
    for module in (datasets, loading):
        monkeypatch.setattr(module, "AT_ONCE", 100)
    found = loaded(tokenizer, path, long_prompts=LongPrompts.drop)
    assert isinstance(whole.prompts, tuple) and not isinstance(found.prompts, tuple)
    assert found.describe() == whole.describe()
    assert (len(found), found.duplicates, found.too_long) == (19_999, 1, 1)
    assert list(found.prompts[120:125]) == list(whole.prompts[120:125])
    drawn = (PromptOrder(one, seed=1).take(300) for one in (whole, found))
    assert next(drawn) == next(drawn)
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens: 40"):
        loaded(tokenizer, path)
    joined = loaded(
        tokenizer, {path: 1.0, written(tmp_path / "more.jsonl", rows[:3]): 1.0}, long_prompts="drop"
    )
    assert joined.prompts[19_999].text == "0+1=" and len(joined) == 20_002


@pytest.mark.parametrize("at_once", [1, 100])
def test_what_a_template_adds_counts(
    tmp_path: Path, tokenizer: FolderTokenizer, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(datasets, "AT_ONCE", at_once)
    path = written(
        tmp_path / "rows.jsonl", [{"prompt": "1" * digits, "answer": "1"} for digits in (3, 40, 39)]
    )
    found = loaded(tokenizer, path, chat_template_kwargs={}, long_prompts="drop")
    assert (len(found), found.too_long) == (2, 1)
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens: 40.*has 41 tokens"):
        loaded(tokenizer, path, chat_template_kwargs={})


@pytest.mark.fault(
    "a data file is written to while a run draws from it", "a sentence, and no row of another file"
)
def test_a_file_that_changes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written(path, [{"prompt": "1+1=", "answer": "2"}] * 3)
    rows = read_rows("data.train", path)
    os.replace(written(tmp_path / "new.jsonl", [{"prompt": "9"}]), path)
    # replaced: the run goes on with the old one
    assert rows[2] == {"prompt": "1+1=", "answer": "2"}
    rows = read_rows("data.train", path)
    with path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match="written to"):
        rows[0]


def test_columns_of_any_row_groups_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}", "answer": index, "day": None} for index in range(20_000)]
    for size in (7, 20_000):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=size)
        found = read_rows("data.train", tmp_path / "rows.parquet")
        for each in (0, 6, 7, 19_999):
            assert found[each] == rows[each]
        assert list(found) == rows
        with pytest.raises(IndexError):
            found[20_000]


def test_a_bad_row_is_named_by_its_line(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    """Line numbers count per file of a folder, and include empty lines."""
    good = '{"prompt": "1+1=", "answer": "2"}\n'
    (tmp_path / "train-00000-of-00002.jsonl").write_text(good * 3)
    (tmp_path / "train-00001-of-00002.jsonl").write_text(good + "\n" + '{"prompt": "1+2="}\n')
    assert f"line 3 of {tmp_path}/train-00001-of-00002.jsonl" in refusal(
        loaded, tokenizer, str(tmp_path)
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", '{"sum": "1+1="}\n', ["data.prompt_key", "line 1", "has sum"]),
        ("rows.jsonl", '{"prompt": ""}\n', ["data.train", "line 1", "empty"]),
        ("rows.jsonl", "", ["data.train", "0 rows"]),
        ("rows.csv", "prompt\n", [".csv", ".parquet, .jsonl, .arrow"]),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, tokenizer: FolderTokenizer, name: str, content: str, words: list[str]
) -> None:
    (tmp_path / name).write_text(content)
    message = refusal(loaded, tokenizer, str(tmp_path / name), needs_answer=False)
    assert all(word in message for word in words), message


def test_what_is_no_tokenizer_or_has_no_template_is_named(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")
    with pytest.raises(ConfigError, match=r"data\.prompt_key"):
        FolderTokenizer(tmp_path / "toy" / "model").text(ASKED)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        FolderTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        FolderTokenizer(tmp_path)


def test_the_order_resumes_from_its_position(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    dataset = loaded(tokenizer, written(tmp_path / "rows.jsonl", sums(90)))
    whole = PromptOrder(dataset, seed=3)
    taken = whole.take(70) + whole.take(110)
    resumed = PromptOrder(dataset, seed=3, position=70)
    assert resumed.take(110) == taken[70:]
    assert resumed.position == whole.position == 180
    first = taken[:90]
    second = taken[90:]
    for epoch in (first, second):
        assert {prompt.id for prompt in epoch} == set(range(90))
    assert first != second
    assert PromptOrder(dataset, seed=4).take(90) != first
