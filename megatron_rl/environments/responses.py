"""OpenAI's Responses API: converts its requests to chat completions, and writes its replies.

No state is kept between requests: previous items arrive in `input`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megatron_rl.environments.completions import (
    FIXED,
    Count,
    ParsedRequest,
    Refused,
    chat_request,
    checked,
    completion,
    events,
)
from megatron_rl.environments.session import PolicyResponse
from megatron_rl.files import JsonObject

SUPPORTED = {
    **FIXED,
    "include": ([[]], "there is nothing to include; leave it out"),
    "previous_response_id": ([], "responses are not stored; send the previous items in input"),
}


class ResponsesRequest(msgspec.Struct):
    """Supported fields of a request."""

    input: str | Annotated[list[JsonObject], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[JsonObject] | None = None
    max_output_tokens: Count | None = None


def responses_request(given: Mapping[str, Any]) -> ParsedRequest:
    """Parse a request of the Responses API."""
    known = checked(given, ResponsesRequest, SUPPORTED)
    chat = {name: given.get(name) for name in FIXED}
    chat["max_tokens"] = known.max_output_tokens
    chat["messages"] = _messages(known)
    chat["tools"] = [
        {"type": one.pop("type", None), "function": one} for one in map(dict, known.tools or [])
    ]
    return ParsedRequest(chat_request(chat).arguments, partial(_reply, given))


def _messages(known: ResponsesRequest) -> list[JsonObject]:
    """Convert items to messages; calls are part of the assistant's message before them."""
    messages: list[JsonObject] = []
    if known.instructions:
        messages.append({"role": "system", "content": known.instructions})
    if isinstance(known.input, str):
        return [*messages, {"role": "user", "content": known.input}]
    for place, item in enumerate(known.input):
        match {"type": "message", **item}:
            case {"type": "message", "role": role, "content": content}:
                messages.append({"role": role, "content": content})
            case {"type": "function_call_output", "call_id": id, "output": content}:
                messages.append({"role": "tool", "tool_call_id": id, "content": content})
            case {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                function = {"name": name, "arguments": arguments}
                call = {"id": id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case _:
                known_types = "message, function_call and function_call_output are supported"
                raise Refused(400, known_types, field=f"input[{place}]")
    return messages


def _reply(given: Mapping[str, Any], response: PolicyResponse) -> JsonObject | str:
    """Return the reply with a response, as events if the request streams."""
    chat = completion(response)
    (choice,) = chat["choices"]
    usage = chat["usage"]
    cut = choice["finish_reason"] == "length"
    items = list(_items(chat["id"], choice["message"]))
    whole = {
        "id": f"resp_{chat['id']}",
        "object": "response",
        "created_at": chat["created"],
        "model": chat["model"],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [item for item, _ in items],
        "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
    if not given.get("stream"):
        return whole
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    found: list[tuple[str, JsonObject]] = [("created", {"response": begun})]
    for place, (item, steps) in enumerate(items):
        where = {"output_index": place, "item_id": item["id"], "content_index": 0}
        steps.append(("output_item.done", {"item": item}))
        found += [(kind, {**where, **fields}) for kind, fields in steps]
    found.append((whole["status"], {"response": whole}))
    return events(
        {"type": f"response.{kind}", "sequence_number": number, **fields}
        for number, (kind, fields) in enumerate(found)
    )


def _items(
    name: str, message: Mapping[str, Any]
) -> Iterator[tuple[JsonObject, list[tuple[str, JsonObject]]]]:
    """Yield the items of a message, its text and its calls, each with the events before its end."""
    calls = message.get("tool_calls", [])
    text = message["content"]
    item: JsonObject
    if text or not calls:
        part: JsonObject = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [part]}
        yield (
            {**item, "status": "completed"},
            [
                ("output_item.added", {"item": {**item, "content": []}}),
                ("content_part.added", {"part": {**part, "text": ""}}),
                ("output_text.delta", {"delta": text}),
            ],
        )
    for call in calls:
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
        item |= call["function"]
        yield (
            {**item, "status": "completed"},
            [
                ("output_item.added", {"item": {**item, "arguments": ""}}),
                ("function_call_arguments.delta", {"delta": item["arguments"]}),
            ],
        )
