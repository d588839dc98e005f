"""HTTP gateway where a user's agent gets the policy's answers, as OpenAI chat completions; runs one agent a session.

A turn of an agent's is a request to the engines like any other; its tokens are kept as any turn's (conversation.py).
Temperature, top_p and the like are the recipe's: what an agent asks for there changes nothing.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megatron_rl.environments.environment import as_messages
from megatron_rl.environments.pool import EnvironmentProcess
from megatron_rl.environments.session import ContextFull, Policy, Rules, TemplateRefuses, read_arguments
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.types import SessionTurn

LARGEST_BODY = 32 << 20
STOP_S = 2.0
MODEL = "policy"


class Refused(Exception):
    """What an agent has asked for is not there, with the status that says so."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Opened:
    """One session at the gateway."""

    policy: Policy
    key: str
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    failure: SamplerError | None = None  # the agent sees it as a server's error


class Gateway:
    """Used from the sessions' event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Opened] = {}
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S)
        self._port = 0

    async def open(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    def begin(self, policy: Policy) -> tuple[str, str, str]:
        """A session's name, its address, and its key."""
        name, key = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._sessions[name] = Opened(policy, key)
        return name, f"http://127.0.0.1:{self._port}/{name}/v1", key

    def end(self, name: str) -> None:
        """Raises what the engines have failed with, whatever the agent has made of it."""
        opened = self._sessions.pop(name)
        for task in opened.tasks:
            task.cancel()
        if opened.failure is not None:
            raise opened.failure

    async def _serve(self, request: web.Request) -> web.Response:
        try:
            status, content = 200, await self._answer(request)
        except Refused as refused:
            error = {"message": str(refused), "type": "invalid_request_error", "code": refused.code, "param": None}
            status, content = refused.status, {"error": error}
        except asyncio.CancelledError:
            status, content = 410, {"error": {"message": "the session has ended", "type": "gone", "code": None}}
        return web.json_response(content, status=status)

    async def _answer(self, request: web.Request) -> dict[str, Any]:
        _, name, _, path = [*request.path.split("/", 3), "", "", ""][:4]
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        opened = self._sessions.get(name)
        # compared also where there is none: a name is not to be found by its timing
        right = hmac.compare_digest(given, (opened.key if opened else secrets.token_urlsafe(32)).encode())
        if opened is None or not right:
            raise Refused(401, "this address wants the key of its session, which OPENAI_API_KEY has")
        if (request.method, path) == ("GET", "models"):
            return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]}
        if (request.method, path) != ("POST", "chat/completions"):
            raise Refused(404, f"{request.method} /{path[:60]}: there are chat/completions and models")
        task = asyncio.create_task(_completed(opened.policy, await _body(request)))
        opened.tasks.add(task)
        try:
            return await task
        except SamplerError as error:
            opened.failure = error
            raise
        finally:
            opened.tasks.discard(task)


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise Refused(413, f"a request has at most {LARGEST_BODY} bytes") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the request is not JSON ({str(error)[:100]})") from None
    if not isinstance(body, dict):
        raise Refused(400, "the request is no JSON object")
    return body


async def _completed(policy: Policy, body: Mapping[str, Any]) -> dict[str, Any]:
    if body.get("stream"):
        raise Refused(400, "stream: answers come whole here; leave it out")
    if body.get("n") not in (None, 1):
        raise Refused(400, "n: one answer for each request; ask again for another")
    try:
        messages, tools = _messages(body.get("messages")), body.get("tools") or []
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        if most is not None and not (isinstance(most, int) and most > 0):
            raise TypeError("max_tokens is a whole number above 0")
        if not (isinstance(tools, list) and all(isinstance(one["function"]["name"], str) for one in tools)):
            raise TypeError("tools is a list of {type: function, function: {name, ...}}")
    except (TypeError, ValueError, KeyError) as error:
        raise Refused(400, f"messages: {str(error)[:300]}") from None
    try:
        answered = await policy.answer(messages, tools, most)
    except ContextFull:
        policy.transcript.end = "length"
        raise Refused(
            400, "the conversation has reached rollout.max_context_tokens", "context_length_exceeded"
        ) from None
    except TemplateRefuses as error:
        raise Refused(400, str(error)) from None
    policy.transcript.end = "done"  # whatever was refused before for its length
    completion, message, turns = answered.completion, answered.message, policy.transcript.turns
    calls, count = message.get("tool_calls", []), len(completion.token_ids)
    turns.extend([SessionTurn(finish_reason="abort")] * (answered.number + 1 - len(turns)))  # others are still asked
    turns[answered.number] = SessionTurn(tokens=count, finish_reason=completion.finish_reason, tool_calls=len(calls))
    said: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if calls:
        said["tool_calls"] = [{**one, "function": _as_text(one["function"])} for one in calls]
    usage = {"prompt_tokens": answered.asked, "completion_tokens": count}
    reason = "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": said, "finish_reason": reason, "logprobs": None}],
        "usage": usage | {"total_tokens": answered.asked + count},
    }


def _messages(given: Any) -> list[dict[str, Any]]:
    """OpenAI's messages as chat templates want them: text as text, arguments as mappings."""
    if not isinstance(given, list) or not given:
        raise TypeError("a list of at least one message")
    messages = []
    for one in as_messages(given):
        content = one.get("content")
        if isinstance(content, list):
            raise TypeError("content: text alone is taken")
        message = {**one, "content": content or ""}
        if one.get("tool_calls"):
            message["tool_calls"] = [{**call, "function": _as_sampled(call["function"])} for call in one["tool_calls"]]
        messages.append({key: value for key, value in message.items() if value is not None})
    return messages


def _as_sampled(function: Mapping[str, Any]) -> dict[str, Any]:
    """The name first, as it was answered: OpenAI's clients turn the order, and a template may write all of it."""
    arguments = function["arguments"]
    read = read_arguments(arguments) if isinstance(arguments, str) else arguments
    return {"name": function["name"], **function, "arguments": read}


def _as_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


class AgentSession:
    """Lets one agent hold its conversation."""

    def __init__(self, policy: Policy, process: EnvironmentProcess, rules: Rules, gateway: Gateway) -> None:
        self._policy, self._process, self._rules, self._gateway = policy, process, rules, gateway

    async def play(self, row: Mapping[str, Any]) -> None:
        transcript, limit_s = self._policy.transcript, self._rules.section.session_timeout_s
        transcript.end = "done"
        name, address, key = self._gateway.begin(self._policy)
        try:
            asked = {"do": "run", "base_url": address, "key": key, "row": dict(row)}
            found = await self._process.ask(asked, limit_s)
        finally:
            self._gateway.end(name)
        transcript.reward, transcript.numbers = found["reward"], found["numbers"]
