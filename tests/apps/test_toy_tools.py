"""The tools task: its tokenizer and template."""

import json
from pathlib import Path

import pytest

from megatron_rl.apps.toy_tools import CALL_END, CALL_START, write_tools
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import EnvironmentSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.environments.calculator import Calculator
from megatron_rl.environments.templates import Behaviour, behaviour, parser_of
from megatron_rl.environments.tools import ToolBox

TOOLS = ToolBox(Calculator.tools).schemas


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    assert write_tools(folder)["test"] == 256
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FolderTokenizer:
    return FolderTokenizer(folder / "model")


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_nothing_is_trained_on_that_is_held_out(folder: Path) -> None:
    train, test = ({row["prompt"] for row in rows(folder, name)} for name in ("train", "test"))
    assert not train & test
    assert {
        row["prompt"] for row in rows(folder, "warm") if isinstance(row["prompt"], str)
    } <= train


def test_the_template_only_appends_and_shows_the_hermes_form(tokenizer: FolderTokenizer) -> None:
    assert behaviour(tokenizer, {}, TOOLS) == Behaviour(
        appends_tool=True, appends_user=True, thinking_stays=True
    )
    assert parser_of(EnvironmentSection(), tokenizer) == parser_of(
        EnvironmentSection(tool_parser="hermes"), tokenizer
    )
    with pytest.raises(ConfigError, match=r"environment\.tool_parser: hermess: .*hermes"):
        parser_of(EnvironmentSection(tool_parser="hermess"), tokenizer)


def test_a_conversation_comes_back_and_is_short(folder: Path, tokenizer: FolderTokenizer) -> None:
    for row in rows(folder, "read")[:20]:
        text = tokenizer.render(row["prompt"], {}, tools=TOOLS, opened=True)
        ids = tokenizer.encode(text)
        assert tokenizer.decode_all(ids) == text
        assert len(ids) < 64
        # the warm start's
        assert (
            tokenizer.text(row["prompt"], {"tools": [{"function": {"name": "calculate"}}]}) == text
        )


def test_a_rendered_call_has_the_tokens_of_a_sampled_one(
    folder: Path, tokenizer: FolderTokenizer
) -> None:
    question, call, _ = rows(folder, "read")[0]["prompt"]
    sampled = tokenizer.encode(f"{CALL_START}{question['content']}{CALL_END}")
    before = tokenizer.encode(
        tokenizer.render(
            [question],
            {},
            tools=TOOLS,
            opened=True,
        )
    )
    closed = tokenizer.encode(
        tokenizer.render(
            [question, call],
            {},
            tools=TOOLS,
            opened=False,
        )
    )
    assert closed[: len(before) + len(sampled)] == before + sampled
    assert closed[len(before) + len(sampled)] in tokenizer.stop_token_ids
    assert len(sampled) == len(question["content"]) + 2
