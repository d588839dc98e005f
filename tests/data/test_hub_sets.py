"""Data sets by hub id, with the real clients against a hub on loopback: what is downloaded, pinned,
read again without the hub, and the error for each defect.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import dapo_row, refusal
from hub_server import HubServer, hub_server, use

from megatron_rl.checkpoint.resume import refuse_changes
from megatron_rl.config import to_yaml
from megatron_rl.config.evaluation import held_out
from megatron_rl.config.load import from_base
from megatron_rl.config.schema import Config
from megatron_rl.data import hub_sets
from megatron_rl.data.hub_sets import missing_in, parse, pinned
from megatron_rl.data.prompts import load_dataset, load_held_out
from megatron_rl.data.rows import read_rows
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.preflight.downloads import with_data
from megatron_rl.tracking.run_dir import RunDir

BOXED = "\n\nThink step by step, and put the final answer within \\boxed{...}."
ASKED = "Last line: Answer: $Answer.\n\n"
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# Grade school math
"""


def parquet(*rows: dict) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def lines(*rows: dict) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def gsm8k(question: str, answer: str) -> bytes:
    return parquet({"question": question, "answer": f"<<1+1={answer}>>\n#### {answer}"})


MATH = {"problem": "x?", "level": "Level 5", "type": "Algebra", "solution": "It is $\\boxed{x^2}$."}
MATH_500 = {"problem": "y?", "solution": "So $\\boxed{8}$.", "answer": "9", "unique_id": "a/1"}
PUBLISHED = {  # names and columns as on the hub
    "openai/gsm8k": {
        "README.md": CARD.encode(),
        "gsm8k.py": b"raise SystemExit",
        "main/train-00000-of-00002.parquet": gsm8k("Eggs?", "1,018"),
        "main/train-00001-of-00002.parquet": gsm8k("Ducks?", "7"),
        "main/test-00000-of-00001.parquet": gsm8k("Geese?", "3"),
        "socratic/train-00000-of-00001.parquet": gsm8k("Why?", "4"),
    },
    "DigitalLearningGmbH/MATH-lighteval": {
        "README.md": b"# MATH\n",
        "data/train-00000-of-00001-7320a6f3.parquet": parquet(MATH),
        "data/test-00000-of-00001-4c7e2a11.parquet": parquet(MATH),
    },
    "HuggingFaceH4/MATH-500": {"README.md": b"# 500\n", "test.jsonl": lines(MATH_500)},
    "BytedTsinghua-SIA/DAPO-Math-17k": {
        "README.md": b"# DAPO\n",
        "data/dapo-math-17k.parquet": parquet(*[dapo_row(f"{ASKED}1+1?", "2")] * 100),
    },
    "BytedTsinghua-SIA/AIME-2024": {
        "data/aime-2024.parquet": parquet(*[dapo_row(f"{ASKED}How many?", "033")] * 32),
    },
}
TRAIN = {
    "gsm8k": [("Eggs?" + BOXED, "1018"), ("Ducks?" + BOXED, "7")],
    "math": [("x?" + BOXED, "x^2")],
    "dapo_math": [(f"{ASKED}1+1?", "2")],
    "aime_2024": [],
}
AIME = [(f"{ASKED}How many?", "33")]
EVAL = {
    "gsm8k": [("Geese?" + BOXED, "3")],
    "math": [("y?" + BOXED, "9")],
    "dapo_math": AIME,
    "aime_2024": AIME,
}


@pytest.fixture
def hub(empty: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        for name, files in PUBLISHED.items():
            server.add(name, files, "dataset")
        use(server, empty / ".home", monkeypatch)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", empty / ".home" / "datasets")
        yield server


def of(*words: str) -> Config:
    return from_base({"data": {"chat_template_kwargs": {}}, "eval": {"every": 0}}, words)


def fetched(name: str, key: str = "data.train") -> str:
    return pinned(of(f"{key}={name}")).data.train


def pairs(config: Config, tokenizer: FolderTokenizer) -> tuple[list, list]:
    """Question and answer of the prompts for training and of all held-out sets."""
    loaded = [load_held_out(one, config.data, tokenizer, 500) for one in held_out(config)]
    if config.data.train:
        train = [load_dataset("train", config.data, tokenizer, 500, needs_answer=True)]
    else:
        train = []
    return tuple(
        [
            (json.loads(one.text)[0]["content"] if one.text[0] == "[" else one.text, one.answer)
            for dataset in parts
            for one in dataset.prompts
        ]
        for parts in (train, loaded)
    )


@pytest.mark.parametrize("preset", TRAIN)
def test_presets_work_from_published_ids(
    preset: str, hub: HubServer, tokenizer: FolderTokenizer
) -> None:
    config = pinned(of(f"data={preset}"))
    assert pairs(config, tokenizer) == (TRAIN[preset], EVAL[preset])


def test_a_set_of_another_preset_has_its_own_format(
    hub: HubServer, tokenizer: FolderTokenizer
) -> None:
    config = pinned(
        of("data=gsm8k", "data.eval=null", "eval.sets={a: {path: aime_2024}, b: {path: math}}")
    )
    assert pairs(config, tokenizer)[1] == AIME + EVAL["math"]


def test_a_resumed_run_keeps_its_commits_without_the_hub(
    hub: HubServer, empty: Path, tokenizer: FolderTokenizer
) -> None:
    words = ["data=gsm8k", "data.train={'openai/gsm8k:main': 1.0}", "run.name=mine"]
    config = with_data(of(*words))
    commit = hub.repositories["dataset", "openai/gsm8k"].refs["main"]
    assert config.data.train == {f"openai/gsm8k:main@{commit}[train]": 1.0}
    assert config.data.eval == f"openai/gsm8k:main@{commit}[test]"
    (folder,) = empty.glob(".home/hub/datasets--openai--gsm8k/snapshots/*")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"README.md", *(name for name in PUBLISHED["openai/gsm8k"] if "main/" in name)}

    recorded = RunDir(config.run.folder).config
    recorded.parent.mkdir(parents=True)
    recorded.write_text(to_yaml(config))
    newer = hub.add("openai/gsm8k", {**PUBLISHED["openai/gsm8k"], "new": b""}, "dataset")
    assert f"main@{newer}[" in with_data(of(*words)).data.eval
    hub.close()
    resumed = with_data(of(*words, "run.if_exists=resume"), network=False)
    refuse_changes(recorded, to_yaml(resumed))
    assert resumed.data == config.data
    assert pairs(resumed, tokenizer) == (TRAIN["gsm8k"], EVAL["gsm8k"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", b"prompt,answer\n1+1?,2\n"),
        ("train.json", b'[{"prompt": "1+1?", "answer": "2"}]'),
        ("train.jsonl.gz", gzip.compress(lines({"prompt": "1+1?", "answer": "2"}))),
    ],
    ids=["csv", "json", "jsonl.gz"],
)
def test_other_formats_become_arrow_files(
    name: str, content: bytes, hub: HubServer, tokenizer: FolderTokenizer
) -> None:
    hub.add("org/other", {name: content, "test" + name[5:]: content}, "dataset")
    config = pinned(of("data.train=org/other"))
    hub.close()
    (file,) = parse(config.data.train).files("data.train")
    assert file.suffix == ".arrow"
    (pair,) = pairs(config, tokenizer)[0]
    assert [*map(str, pair)] == ["1+1?", "2"]


def test_a_process_finds_splits_and_converts_rows_once(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = b"prompt,answer\n1+1?,2\n"
    hub.add(
        "org/once", {"train.csv": rows, "test.csv": rows * 2, "README.md": b"# Sums\n"}, "dataset"
    )
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    built: list[str] = []
    build = datasets.load_dataset_builder

    def counted(*given: Any, **more: Any) -> Any:
        built.append(given[0])
        return build(*given, **more)

    monkeypatch.setattr(datasets, "load_dataset_builder", counted)
    words = ["data.train=org/once", "data.eval=org/once[test]"]
    files = []
    for _ in range(2):  # a dry run and a start, or the checks and the driver
        missing_in(of(*words))
        data = pinned(of(*words)).data
        for key, path in (("data.train", data.train), ("data.eval", data.eval)):
            assert len(read_rows(key, Path(path))) > 0
            files += parse(path).files(key)
    assert sorted(hub.fetched()) == ["README.md", "test.csv", "train.csv"]
    assert "metadata block" not in caplog.text
    assert len(built) == 3  # the splits, and each split's rows
    before = [file.stat().st_mtime_ns for file in files]
    hub_sets._converted.cache_clear()  # as in the next process
    assert parse(data.train).files("data.train") == files[:1]
    assert [file.stat().st_mtime_ns for file in files] == before


@pytest.mark.fault(
    "a data set of the hub is unknown, incomplete or in pieces that no key names",
    "the error names the way out",
)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/none", ["org/none", "HF_TOKEN"]),
        ("openai/gsm8k", ["main, socratic", "openai/gsm8k:main"]),
        ("openai/gsm8k:man", ["main, socratic"]),
        ("openai/gsm8k:main@v9", ["no revision 'v9'"]),
        ("openai/gsm8k:main[dev]", ["train, test", "such as openai/gsm8k:main[train]"]),
        ("HuggingFaceH4/MATH-500[train]", ["the splits test", "[test]"]),
        ("org/images", ["train.txt", ".parquet"]),
        ("org/empty", ["org/empty", "data files"]),
        ("org/broken", ["org/broken", "not readable"]),
    ],
)
def test_refusals(name: str, words: list[str], hub: HubServer) -> None:
    hub.add("org/images", {"train.txt": b"1"}, "dataset")
    hub.add("org/empty", {"README.md": b"# none\n"}, "dataset")
    hub.add("org/broken", {"train.json": b"[{"}, "dataset")
    message = refusal(lambda: read_rows("data.train", Path(fetched(name))))
    assert message.startswith("data.train: ")
    for word in words:
        assert word in message


def test_what_is_not_in_the_cache_is_missing(hub: HubServer, tokenizer: FolderTokenizer) -> None:
    train = fetched("openai/gsm8k:main")
    other = train.replace("[train]", "[test]")
    assert len(read_rows("data.train", Path(train))) == 2
    assert other in refusal(read_rows, "data.train", Path(other))
    for name in ("openai/gsm8k:main[test]", "HuggingFaceH4/MATH-500"):
        assert "megatron-rl fetch" in refusal(pinned, of(f"data.train={name}"), network=False)


def test_a_text_is_an_id_unless_it_is_a_path(empty: Path) -> None:
    found = parse("openai/gsm8k:main@refs/pr/1[train]")
    assert found is not None
    assert (found.id.name, found.id.revision) == ("openai/gsm8k", "refs/pr/1")
    assert (found.config, found.split) == ("main", "train")
    (empty / "mine").mkdir()
    for path in ("data/toy", "mine/train", "some/rows.jsonl", "rows.parquet", "a/b/c", "", "/a/b"):
        assert parse(path) is None, path
