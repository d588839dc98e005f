"""OpenAI's client at the gateway: chat completions and responses, streamed or not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from environments.chats import ROW, TOOLS
from environments.scripted_policy import HERE, Played, call
from environments.test_agent import Asked

CALL = call("add", a=12, b=30)
FUNCTIONS = [{"type": "function", **TOOLS[0]["function"]}]
QUESTION = "Add 12 and 30."
RESULT = "It is 42."


def says(text: str, seed: int) -> str:
    return "42" if RESULT in text else f"So: {CALL}{CALL}"


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    with Played(tmp_path, says, f"{HERE}:agent") as played:
        yield Asked(played)


def chat(client: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    made = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    return _chat_end(client, messages, made.choices[0].message)


def streamed_chat(client: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as stream:
        made = stream.get_final_completion()
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.usage.completion_tokens > 0
    return _chat_end(client, messages, made.choices[0].message)


def _chat_end(client: Any, messages: list[Any], message: Any) -> str:
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    for one in message.tool_calls:
        assert json.loads(one.function.arguments) == {"a": 12, "b": 30}
        messages.append({"role": "tool", "tool_call_id": one.id, "content": RESULT})
    chunks = client.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, stream=True
    )
    # as some clients do, close the connection at the first end
    with chunks:
        (chunk,) = chunks
    return chunk.choices[0].delta.content


def responses(client: Any) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    made = client.responses.create(model="policy", input=items, tools=FUNCTIONS)
    return _responses_end(client, items, made)


def streamed_responses(client: Any) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.responses.stream(model="policy", input=items, tools=FUNCTIONS) as stream:
        deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
        made = stream.get_final_response()
    assert deltas == ["So: "]
    return _responses_end(client, items, made)


def _responses_end(client: Any, items: list[Any], made: Any) -> str:
    assert [one.type for one in made.output] == ["message", "function_call", "function_call"]
    assert (made.status, made.usage.output_tokens > 0) == ("completed", True)
    items += [one.to_dict() for one in made.output]
    for one in made.output[1:]:
        assert json.loads(one.arguments) == {"a": 12, "b": 30}
        items.append({"type": "function_call_output", "call_id": one.call_id, "output": RESULT})
    return client.responses.create(model="policy", input=items, tools=FUNCTIONS).output_text


@pytest.mark.parametrize("talk", [streamed_chat, responses, streamed_responses])
def test_each_api_streamed_or_not_records_the_same_tokens(
    asked: Asked, talk: Callable[[Any], str]
) -> None:
    rows = []
    for one in (asked, Asked(asked.played)):
        client = openai.OpenAI(base_url=one.url, api_key=one.key, max_retries=0)
        assert (chat if rows else talk)(client) == "42"
        one.policy.leave_unread()
        (row,) = one.policy.transcript.conversation.rows(ROW)
        rows.append((row.prompt.token_ids, row.token_ids, row.loss_mask, row.turns))
        assert [turn.tool_calls for turn in one.policy.transcript.turns] == [2, 0]
    assert rows[0] == rows[1]


def test_a_cut_response_is_incomplete(asked: Asked) -> None:
    given = {"input": QUESTION, "instructions": "Be brief.", "max_output_tokens": 1}
    status, reply = asked(given, path="responses")
    assert (status, reply["status"]) == (200, "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    tokens, _, _ = asked.played.policy.asked[0]
    assert "system\nBe brief." in asked.played.tokenizer.decode_all(tokens)


REFUSED = {
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "background": True,
    "include": ["reasoning.encrypted_content"],
    "stream": 1,
    "model": "gpt-5",
    "text": {"format": {"type": "json_object"}},
    "input": 5,
    "input[0]": [{"type": "reasoning", "id": "x", "summary": []}],
    "messages[0].content[0].type": [{"role": "user", "content": [{"type": "input_image"}]}],
    "tools[0].type": [{"type": "web_search", "name": "x"}],
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_cannot_be_kept_are_refused_by_name(asked: Asked, field: str) -> None:
    name = field.partition("[")[0].replace("messages", "input")
    given = {"input": QUESTION, name: REFUSED[field]}
    status, reply = asked(given, path="responses")
    assert (status, reply["error"]["param"]) == (400, field), reply
    assert reply["error"]["type"] == "invalid_request_error"
    assert not asked.played.policy.asked
