"""Chat templates and texts of any length: token ids, and the share encoded before a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import program, write_lines

from megatron_rl.commands import train
from megatron_rl.config import ConfigError, from_mapping
from megatron_rl.config.schema import Config, DataSection, LongPrompts, ModelSection, RolloutSection
from megatron_rl.data import prompts
from megatron_rl.data.prompts import FolderTokenizer, check_datasets, load_dataset
from megatron_rl.data.toy import write_toy

TEMPLATE = (
    "{% for each in messages %}{% if each.role == 'banned' %}{{ raise_exception('no ' ~ "
    "each.role) }}{% endif %}{{ each.content + eos_token }}{% endfor %}{% if "
    "add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_toy(tmp_path)
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return tmp_path / "model"


def chat(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def write_rows(path: Path, texts: list, **more: str) -> DataSection:
    rows = [{"prompt": text, "answer": "2"} for text in texts]
    return DataSection(train=str(write_lines(path, rows)), **more)


def test_messages_are_read_through_the_template(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    assert tokenizer.text(chat("1+1")) == "1+1<end>="
    parts = (tokenizer.encode("1+1"), tokenizer.stop_token_ids, tokenizer.encode("="))
    assert tokenizer.encode(chat("1+1")) == [token for part in parts for token in part]
    assert tokenizer.encode_texts(["1+1<end>=", "2"], 8) == [
        tokenizer.encode(chat("1+1")),
        tokenizer.encode("2"),
    ]


def test_text_of_messages_ends_no_turn(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    asked, (end,) = chat("1<end>=2"), tokenizer.stop_token_ids
    spelled, written = tokenizer.encode_texts([tokenizer.text(asked), "1<end>=2"], 16)
    assert spelled == tokenizer.encode(asked)
    assert (spelled.count(end), written.count(end)) == (1, 1)  # a prompt of text is the data's


@pytest.mark.fault(
    "the chat template refuses one row of many", "the row is named before the run starts"
)
def test_a_row_that_the_template_refuses(folder: Path, tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "rows.jsonl", [*(chat(f"{n}+1") for n in range(1500)), chat("1", "banned")]
    )
    with pytest.raises(ConfigError, match=r"model\.path: .*no banned.*\(line 1501 "):
        check_datasets(Config(model=ModelSection(str(folder)), data=data))


@pytest.mark.fault("a prompt of 5 MB", "refused or left out, without encoding it")
def test_a_huge_prompt(folder: Path, tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    huge = "1+" * 2_500_000
    data = write_rows(tmp_path / "rows.jsonl", ["1+1=", huge, chat(huge)])
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens: 16, but 2"):
        load_dataset("train", data, tokenizer, 16)
    dropping = replace(data, long_prompts=LongPrompts.drop)
    assert load_dataset("train", dropping, tokenizer, 16).too_long == 2
    assert max(map(len, tokenizer.encode_texts([huge, huge], 16))) < 10_000
    rare = "<end>" * 1000  # many characters in each token
    assert len(tokenizer.encode_texts([rare], 999)[0]) == 1000


def test_a_sample_is_encoded_before_the_start_and_holds_the_longest_and_the_shortest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    plain = FolderTokenizer.encode_texts

    def watched(self: FolderTokenizer, texts: list[str], at_most: int) -> list[list[int]]:
        encoded.extend(texts)
        return plain(self, texts, at_most)

    monkeypatch.setattr(FolderTokenizer, "encode_texts", watched)
    data = write_rows(
        tmp_path / "rows.jsonl", [chat(str(n)) for n in range(900, 3000)] + [chat("1" * 70)]
    )
    config = Config(
        model=ModelSection(str(folder)), data=data, rollout=RolloutSection(max_prompt_tokens=71)
    )
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens: 71.* 72 tokens"):
        check_datasets(config)
    assert prompts.EARLY_SAMPLE <= len(encoded) <= prompts.EARLY_SAMPLE + 2
    assert min(map(len, encoded)) == len("900<end>=")


CHECKS = """
import sys
from megatron_rl.config.schema import *
from megatron_rl.data.prompts import check_datasets
model, data, rollout = ModelSection(sys.argv[1]), DataSection(sys.argv[2]), RolloutSection(prompts_per_step=1)
check_datasets(Config(model=model, data=data, rollout=rollout))
assert "transformers" in sys.modules and "torch" not in sys.modules
"""


@pytest.mark.fault(
    "chat data before a start", "checked without torch, whose import took longer than the check"
)
def test_templates_need_no_torch(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [chat("1+1")])
    program(CHECKS, folder, tmp_path / "rows.jsonl")


@pytest.mark.fault("64 ranks of torchrun or srun start", "the first looks at the data, once")
@pytest.mark.parametrize(("rank", "looks"), [("0", 1), ("1", 0)])
def test_one_rank_looks_at_the_data(
    monkeypatch: pytest.MonkeyPatch, place: Path, rank: str, looks: int
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(
        prompts, "check_datasets", lambda *sections: seen.append(sections) or ([], [], "")
    )
    monkeypatch.setattr("megatron_rl.rank.run_rank", lambda config, folder: None)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "1")
    given = {
        "run": {"name": "x", "root": str(place / "runs")},
        "model": {"path": "data/toy/model", "init": "random"},
    }
    given |= {"rollout": {"max_prompt_tokens": 16, "max_response_tokens": 16}, "eval": {"every": 0}}
    config = from_mapping(given | {"data": {"train": "data/toy/train.jsonl"}})
    assert train.run(config, "env") == 0
    assert len(seen) == looks
