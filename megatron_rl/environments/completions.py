"""OpenAI's chat completions: parses requests, refuses unsupported fields, writes replies.

A field that would change a response is supported or refused. Sampling parameters are the recipe's:
such fields are ignored, as agents send them by default, and so are those that identify the client.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_rl.environments.session import PolicyResponse, read_arguments
from megatron_rl.files import JsonObject

MODEL = "policy"
Count = Annotated[int, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]
IGNORED = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    ),
    *("seed", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "stream_options",  # usage is always sent
)
# supported values of fields, and the hint for any other value
FIXED: Mapping[str, tuple[list[Any], str]] = {
    "model": ([MODEL], f"there is {MODEL!r} alone"),
    "stream": ([True, False], "true or false"),
    "n": ([1], "one response per request; ask again for another"),
    "logprobs": ([False], "the run keeps them, agents get none; leave it out"),
    "response_format": (
        [{"type": "text"}],
        "responses are free text; request a format in the messages",
    ),
    "tool_choice": (["auto", "none"], "the policy chooses ('auto'), or sees no tools ('none')"),
    "parallel_tool_calls": ([True, False], "true or false"),
}


class Refused(Exception):
    """Refused request: HTTP status, and the invalid field."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, field: str | None = None
    ) -> None:
        super().__init__(message if field is None else f"{field}: {message}")
        self.status = status
        self.content = {
            "error": {
                "message": str(self),
                "type": "invalid_request_error",
                "code": code,
                "param": field,
            }
        }


class Function(msgspec.Struct):
    """Function of a tool, or of a call."""

    name: str
    arguments: str | JsonObject = ""


class Named(msgspec.Struct):
    function: Function
    type: Literal["function"] = "function"


class Part(msgspec.Struct):
    type: Literal["text", "input_text", "output_text"]  # the latter two of the Responses API
    text: str


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Named] | None = None


class ChatRequest(msgspec.Struct):
    """Supported fields of a request."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[Named] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=16)] | None = None


@dataclass(frozen=True)
class ParsedRequest:
    """Arguments of PolicyClient.turn_response, and the writer of the reply."""

    arguments: JsonObject
    write: Callable[[PolicyResponse], JsonObject | str]  # JSON, or server-sent events


def request_object(body: bytes) -> JsonObject:
    """Return the JSON object of a request."""
    try:
        given = json.loads(body)
        json.dumps(given, ensure_ascii=False).encode()  # unpaired surrogates cannot be encoded
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is not JSON ({str(error)[:100]})") from None
    if not isinstance(given, dict):
        raise Refused(400, "the request is no JSON object")
    return given


def checked(given: Mapping[str, Any], kind: Any, fixed: Mapping[str, Any]) -> Any:
    """Return a request as a struct of this kind; Refused names the first invalid field."""
    for name, value in given.items():
        if value is not None and name not in (*kind.__struct_fields__, *IGNORED):
            taken, why = fixed.get(name, ([], "this field is not supported; leave it out"))
            # neither true nor 1.0 passes as 1
            if not any(type(value) is type(one) and value == one for one in taken):
                raise Refused(400, why, field=name[:60])
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        field = where.strip(".`") or kind.__struct_fields__[0]
        raise Refused(400, what, field=field) from None


def chat_request(given: Mapping[str, Any]) -> ParsedRequest:
    """Parse a request of chat completions."""
    known = checked(given, ChatRequest, FIXED)
    arguments = {
        "messages": [_message(one) for one in given["messages"]],
        "tools": given.get("tools") or [] if given.get("tool_choice") != "none" else [],
        "max_tokens": known.max_completion_tokens or known.max_tokens,
        "stops": [known.stop] if isinstance(known.stop, str) else known.stop or [],
        "most_calls": 1 if given.get("parallel_tool_calls") is False else None,
    }
    return ParsedRequest(arguments, _chunk if given.get("stream") else completion)


def completion(response: PolicyResponse) -> JsonObject:
    """Return the reply with a response."""
    message = dict(response.message)
    count = len(response.completion.token_ids)
    reason: str = response.completion.finish_reason
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{**one, "function": _as_text(one["function"])} for one in calls]
        reason = "tool_calls" if reason == "stop" else reason
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": reason,
        "stop_reason": response.stop,
        "logprobs": None,
    }
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": response.asked,
            "completion_tokens": count,
            "total_tokens": response.asked + count,
        },
    }


def events(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return objects as server-sent events."""
    return "".join(f"data: {json.dumps(one)}\n\n" for one in objects)


def _chunk(response: PolicyResponse) -> str:
    """Return the reply with a response as one chunk, as calls are parsed from complete responses."""
    chunk = completion(response)
    (choice,) = chunk["choices"]
    choice["delta"] = choice.pop("message")
    for place, call in enumerate(choice["delta"].get("tool_calls", [])):
        call["index"] = place
    return events([{**chunk, "object": "chat.completion.chunk"}]) + "data: [DONE]\n\n"


def _message(given: Mapping[str, Any]) -> JsonObject:
    """Convert a message to the form of chat templates: text as text, arguments as mappings."""
    message = {name: value for name, value in given.items() if value is not None}
    content = message.get("content", "")
    message["content"] = (
        content if isinstance(content, str) else "".join(one["text"] for one in content)
    )
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [{**one, "function": _as_sampled(one["function"])} for one in calls]
    return message


def _as_sampled(function: Mapping[str, Any]) -> JsonObject:
    """Return a call with its name first, as sampled: clients reorder keys, and templates may print
    all.
    """
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        read = read_arguments(arguments)
    else:
        read = arguments
    return {"name": function["name"], **function, "arguments": read}


def _as_text(function: Mapping[str, Any]) -> JsonObject:
    arguments = function["arguments"]
    return {
        **function,
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
    }
