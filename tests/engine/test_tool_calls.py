"""Tool calls as vLLM's own parser reads them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from environments.chats import TOOLS

from megatron_rl.apps.toy_tools import write_tools
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.engine.tool_calls import ToolCallParser
from megatron_rl.processes.channel import Refused
from megatron_rl.types import ToolCall

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "317*999"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tools")
    write_tools(place)
    return place / "model"


@pytest.mark.engine
def test_vllms_parser_reads_a_call_and_leaves_what_is_none(model: Path) -> None:
    tokenizer = FolderTokenizer(model)
    parser = ToolCallParser(str(model))
    stops = list(tokenizer.stop_token_ids)
    about = ("hermes", json.dumps(TOOLS))
    ids = tokenizer.encode(CALL)
    found = parser.parsed([*ids, *stops[:1]], stops, *about)
    assert found["calls"] == [ToolCall("calculate", '{"expression": "317*999"}')]
    assert found["content"] == ""
    for text in ("316683", CALL[:40]):
        found = parser.parsed(tokenizer.encode(text), stops, *about)
        assert found == {"content": tokenizer.decode_all(tokenizer.encode(text)), "calls": []}
    parser._tokenizer = SimpleNamespace(decode=lambda *_, **__: CALL.replace("317*999", r"\ud800"))
    assert parser.parsed([], stops, *about)["calls"] == [], "half a pair, which could not be sent"
    with pytest.raises(Refused, match="tool_parser 'hermess'"):
        parser.check("hermess", json.dumps(TOOLS))
