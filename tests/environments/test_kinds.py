"""Text, thinking and tool calls are told apart by single tokens and by spelled markers alike, as
vLLM's parsers do.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from environments.chats import APPENDS, DROPS_THINKING, SPECIAL, TOOLS, completion, folder_of
from environments.scripted_policy import Played, call

from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.environments.kinds import TokenKinds
from megatron_rl.sampler.client.interface import WrittenCall
from megatron_rl.types import CALL, KINDS, TEXT, THINKING

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WAYS = {"single": (*SPECIAL, *MARKERS), "spelled": SPECIAL, "mixed": (*SPECIAL, *MARKERS[:2])}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FolderTokenizer]:
    place = tmp_path_factory.mktemp("kinds")
    found = {
        way: FolderTokenizer(folder_of(place / way, DROPS_THINKING, special))
        for way, special in WAYS.items()
    }
    assert [len(one.encode("<tool_call>")) == 1 for one in found.values()] == [True, False, False]
    return found


def parts(
    tokenizer: FolderTokenizer, kinds: TokenKinds, ids: list[int], request: str = ""
) -> list[tuple[int, str]]:
    """Runs of one kind, and their text."""
    runs: list[tuple[int, list[int]]] = []
    for token, kind in zip(ids, kinds.of(request, completion(ids)), strict=True):
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(token)
    return [(kind, tokenizer.decode_all(some)) for kind, some in runs]


def written(draw: random.Random) -> list[tuple[int, str]]:
    def words() -> str:
        return "".join(
            draw.choice(["the ", "42", "é", "日本", "\n", "{", "</", "🙂", "answer"])
            for _ in range(6)
        )

    found = [(draw.randrange(3), words()) for _ in range(draw.randrange(1, 6))]
    marks = {TEXT: ("", ""), THINKING: MARKERS[:2], CALL: MARKERS[2:]}
    joined: list[tuple[int, str]] = []
    for kind, text in found:
        inner = text + "<tool_call>" * (kind == THINKING)  # what thinking mentions is thinking
        whole = marks[kind][0] + inner + marks[kind][1]
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + whole)
        else:
            joined.append((kind, whole))
    return joined


@pytest.mark.parametrize("way", WAYS)
def test_every_token_is_of_the_part_that_it_was_written_in(
    tokenizers: dict[str, FolderTokenizer], way: str
) -> None:
    tokenizer = tokenizers[way]
    kinds = TokenKinds(tokenizer, "hermes")
    for seed in range(200):
        answer = written(random.Random(seed))
        ids = [token for _, text in answer for token in tokenizer.encode(text)]
        assert parts(tokenizer, kinds, ids) == answer, seed


@pytest.mark.parametrize("way", WAYS)
def test_what_is_cut_or_opened_by_the_request_reaches_to_its_end(
    tokenizers: dict[str, FolderTokenizer], way: str
) -> None:
    tokenizer = tokenizers[way]
    kinds = TokenKinds(tokenizer, "hermes")
    cut = tokenizer.encode("so\n<tool_call>{")
    assert parts(tokenizer, kinds, cut) == [(TEXT, "so\n"), (CALL, "<tool_call>{")]
    opened = tokenizer.encode("so</think>42")
    assert parts(tokenizer, kinds, opened, "assistant\n<think>\n") == [
        (THINKING, "so</think>"),
        (TEXT, "42"),
    ]
    assert parts(tokenizer, kinds, opened, "assistant\n<think>\n\n</think>\n") == [
        (TEXT, "so</think>42")
    ]
    none = TokenKinds(tokenizer, None)
    assert parts(tokenizer, none, cut) == [(TEXT, "so\n<tool_call>{")]


def test_calls_that_nothing_marks_are_calls_where_nothing_else_was_said(
    tokenizers: dict[str, FolderTokenizer],
) -> None:
    tokenizer = tokenizers["single"]
    kinds = TokenKinds(tokenizer, "pythonic")
    made = WrittenCall("add", "{}")
    ids = tokenizer.encode("<think>so</think>[add()]")
    thought = len(tokenizer.encode("<think>so</think>"))
    alone = replace(completion(ids), content="", calls=(made,))
    assert list(kinds.of("", alone)) == [THINKING] * thought + [CALL] * (len(ids) - thought)
    beside = replace(alone, content="I add.")
    assert list(kinds.of("", beside)) == [THINKING] * thought + [TEXT] * (len(ids) - thought)


def test_rows_of_sessions_have_the_kind_of_each_token(tmp_path: Path) -> None:
    def says(text: str, seed: int) -> str:
        return "42" if "42<|im_end|>" in text else "I add.\n" + call("add", a=12, b=30)

    with Played(tmp_path, says) as played:
        ((rollout,),) = played.play()
    called = [
        token
        for token, kind in zip(rollout.token_ids, rollout.kinds, strict=True)
        if KINDS[kind] == "tool_call"
    ]
    assert played.tokenizer.decode_all(called) == call("add", a=12, b=30)
    assert all(
        kind == TEXT
        for kind, turn in zip(rollout.kinds, rollout.turns or (), strict=True)
        if turn != 0
    )


@pytest.mark.engine
@pytest.mark.parametrize("way", WAYS)
def test_vllms_parsers_read_the_same_parts(
    tokenizers: dict[str, FolderTokenizer], way: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer
    from vllm.reasoning import ReasoningParserManager

    from megatron_rl.engine.tool_calls import ToolCallParser

    folder = folder_of(tmp_path, APPENDS, WAYS[way])
    tokenizer = tokenizers[way]
    kinds = TokenKinds(tokenizer, "hermes")
    calls = ToolCallParser(str(folder))
    thought = "<think>so it is 日本</think>"
    said = "the answer\n"
    asked = call("add", a=1)
    ids = tokenizer.encode(said + asked)
    found = calls.parsed(list(ids), [], "hermes", json.dumps(TOOLS))
    assert len(found["calls"]) == 1
    assert parts(tokenizer, kinds, ids) == [(TEXT, found["content"]), (CALL, asked)]
    if way == "spelled":
        return  # its parser of thinking wants single tokens
    reasoning = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(
        AutoTokenizer.from_pretrained(folder)
    )
    inner, content = reasoning.extract_reasoning(thought + said, None)
    found_parts = parts(tokenizer, kinds, tokenizer.encode(thought + said))
    assert found_parts == [(THINKING, f"<think>{inner}</think>"), (TEXT, content)]
