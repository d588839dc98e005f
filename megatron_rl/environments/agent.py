"""HTTP gateway that serves the policy to a user's agent as OpenAI's chat completions and responses;
runs one agent per conversation.

A turn of an agent is a request to the engines like any other; its tokens are recorded as those of
any turn (conversation.py), if the complete response was sent while the client was connected, and
the client has not closed its connection with the response unread.
"""

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from megatron_rl.environments.completions import (
    MODEL,
    ParsedRequest,
    Refused,
    chat_request,
    request_object,
)
from megatron_rl.environments.conversation import Turn
from megatron_rl.environments.pool import EnvironmentProcess
from megatron_rl.environments.responses import responses_request
from megatron_rl.environments.session import (
    ContextFull,
    PolicyClient,
    PolicyResponse,
    TemplateError,
)
from megatron_rl.processes.unauthenticated import (
    UNAUTHENTICATED_S,
    UnauthenticatedConnections,
    descriptors,
)
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.types import SessionTurn

CHARACTERS = 32  # of a request, for each token that a conversation may have: few tokens are longer
BESIDE = 64 << 10  # bytes of a request's other fields
BODY_S = 60.0  # timeout of a request's body
IDLE_S = 75.0  # of a connection between two requests; OpenAI's clients close it earlier
STOP_S = 2.0  # for a client that is still sending a refused request
UNAUTHENTICATED = UnauthenticatedConnections()
TOGETHER = 16  # connections accepted at once: agents open many together
BACKLOG = 1024  # connections that wait to be accepted
PARSERS = {"chat/completions": chat_request, "responses": responses_request}  # by path


@dataclass
class Opened:
    """Conversation that is open at the gateway."""

    policy: PolicyClient
    key: str
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    answers: int = 0  # responses that were read, or are being sent
    failure: SamplerError | None = None  # reported to the agent as a server error

    def unread(self, turn: Turn) -> None:
        self.answers -= 1
        self.policy.unread(turn)


class Connection(web.RequestHandler):
    """Connection to the gateway, unauthenticated until it has shown a key."""

    # called if the last response was not read
    unread: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        # no user-space buffer: written data is with the kernel
        self.transport.set_write_buffer_limits(0)
        UNAUTHENTICATED.add(self.transport, UNAUTHENTICATED_S)

    def connection_lost(self, exc: BaseException | None) -> None:
        UNAUTHENTICATED.forget(self.transport)
        # the connection was reset, as by a client that closes with unread data
        if exc is not None and self.unread is not None:
            self.unread()
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **named: Any) -> None:
        """Log an internal failure of the gateway, without data of a client."""
        if not isinstance(named.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **named)


class Gateway:
    """Gateway of a run's agents. Used from the sessions' event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Opened] = {}
        self._port = 0

    async def open(self) -> None:
        self._server = web.Server(self._serve, handler_cancellation=True)
        place = socket.create_server(("127.0.0.1", 0))
        self._port = place.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._connection, sock=place, backlog=TOGETHER)
        place.listen(BACKLOG)

    def _connection(self) -> Connection:
        return Connection(
            self._server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            lingering_time=STOP_S,
        )

    async def close(self) -> None:
        self._listening.close()
        self._server.pre_shutdown()
        await self._server.shutdown(STOP_S)

    def begin(self, policy: PolicyClient) -> tuple[str, str, str]:
        """Open a conversation; return its name, its address, and its key."""
        name = secrets.token_hex(8)
        key = secrets.token_urlsafe(32)
        self._sessions[name] = Opened(policy, key)
        return name, f"http://127.0.0.1:{self._port}/{name}/v1", key

    def end(self, name: str) -> list[asyncio.Task[Any]]:
        """Cancel the conversation's open requests. Raises the engine's error, if there was one."""
        opened = self._sessions.pop(name)
        tasks = list(opened.tasks)
        for task in tasks:
            task.cancel()
        if opened.failure is not None:
            raise opened.failure
        return tasks

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            opened = self._admitted(request)
            task = asyncio.ensure_future(_answered(opened, request))
            opened.tasks.add(task)
            task.add_done_callback(opened.tasks.discard)
            return await task
        except Refused as refused:
            response = web.json_response(refused.content, status=refused.status)
            if refused.status in (401, 429):
                response.force_close()
            return response
        except ConnectionError:
            return web.Response()  # the client has disconnected
        except asyncio.CancelledError:
            handler = asyncio.current_task()
            if handler is None or handler.cancelling():  # the client has disconnected
                raise
            return web.json_response(Refused(410, "the session has ended").content, status=410)

    def _admitted(self, request: web.BaseRequest) -> Opened:
        """Return the conversation of a request, by its key, before reading its body."""
        _, name, *_ = [*request.path.split("/"), ""]
        given = (
            request.headers.get("Authorization", "")
            .removeprefix("Bearer ")
            .encode("utf-8", "surrogateescape")
        )
        opened = self._sessions.get(name)
        # compared for unknown names, too: response times must not reveal names
        right = hmac.compare_digest(
            given, (opened.key if opened else secrets.token_urlsafe(32)).encode()
        )
        if opened is None or not right:
            raise Refused(
                401, "this address wants the key of its session, which OPENAI_API_KEY has"
            )
        UNAUTHENTICATED.forget(request.transport)
        assert isinstance(request.protocol, Connection)
        request.protocol.unread = None
        if len(self._server.connections) > (most := descriptors() // 2):
            raise Refused(
                429, f"the agents of this run have more than {most} connections open; close some"
            )
        return opened


async def _answered(opened: Opened, request: web.BaseRequest) -> web.StreamResponse:
    """Return the response to an authenticated request."""
    _, _, _, path = [*request.path.split("/", 3), "", "", ""][:4]
    if (request.method, path) == ("GET", "models"):
        models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL}]
        return web.json_response({"object": "list", "data": models})
    if request.method != "POST" or path not in PARSERS:
        known = ", ".join((*PARSERS, "models"))
        raise Refused(404, f"{request.method} /{path[:60]}: there are {known}")
    policy, transcript, rules = opened.policy, opened.policy.transcript, opened.policy.rules
    try:
        body = await _body(request, rules.context_tokens)
        parsed = await policy.apart(lambda: PARSERS[path](request_object(body)))
        if opened.answers >= rules.section.max_turns:
            transcript.end = "turns"
            raise Refused(
                400,
                f"environment.max_turns={rules.section.max_turns} responses are used up",
                code="turns_exceeded",
            )
        opened.answers += 1
        try:
            return await _completed(opened, request, parsed)
        except BaseException:
            opened.answers -= 1
            raise
    except ContextFull as full:
        transcript.end = "length"
        raise Refused(400, str(full), code="context_length_exceeded", field="messages") from None
    except TemplateError as error:
        raise Refused(400, str(error), field="messages") from None
    except SamplerError as error:
        opened.failure = error
        raise Refused(500, f"the engines have failed: {error}") from None


async def _completed(
    opened: Opened, request: web.BaseRequest, parsed: ParsedRequest
) -> web.Response:
    """Send the policy's response; ConnectionError if the client had disconnected."""
    transcript = opened.policy.transcript
    connection = request.protocol
    async with opened.policy.turn_response(**parsed.arguments) as response:
        if transcript.end != "turns":
            transcript.end = "done"  # clears an earlier "length" end
        turns = transcript.turns
        place = response.number
        # other requests are still open
        turns.extend([SessionTurn(finish_reason="abort")] * (place + 1 - len(turns)))
        turns[place] = SessionTurn(
            tokens=len(response.completion.token_ids),
            finish_reason=response.completion.finish_reason,
            tool_calls=len(response.message.get("tool_calls", [])),
        )
        reply = _reply(parsed, response)
        await reply.prepare(request)
        await reply.write_eof()  # prepare and this raise it, too
        if request.transport is None:
            raise ConnectionResetError
    assert isinstance(connection, Connection)
    connection.unread = partial(opened.unread, transcript.conversation.turns[place])
    return reply


def _reply(parsed: ParsedRequest, response: PolicyResponse) -> web.Response:
    """Return the reply to a request. Events are one body of known length: a client that closes
    the connection after the last event has then read all of it.
    """
    written = parsed.write(response)
    if isinstance(written, str):
        return web.Response(text=written, content_type="text/event-stream")
    return web.json_response(written)


async def _body(request: web.BaseRequest, context_tokens: int) -> bytes:
    """Read a request's body, up to the size of a conversation with so many tokens."""
    if "Content-Encoding" in request.headers:
        raise Refused(
            400, "compressed requests are not supported; leave it out", field="Content-Encoding"
        )
    most = CHARACTERS * context_tokens + BESIDE
    body = bytearray()
    full = ContextFull(
        f"a request of more than {most} bytes exceeds rollout.max_context_tokens={context_tokens}"
    )
    if (request.content_length or 0) > most:
        raise full
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > most:
                    raise full
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise Refused(400, f"the request is incomplete ({str(error)[:100]})") from None
    return bytes(body)


async def play(
    policy: PolicyClient, process: EnvironmentProcess, gateway: Gateway, row: Mapping[str, Any]
) -> None:
    """Run an agent's conversation."""
    transcript = policy.transcript
    transcript.end = "done"
    name, address, key = gateway.begin(policy)
    try:
        asked = {"do": "run", "base_url": address, "key": key, "row": dict(row)}
        found = await process.ask(asked, policy.rules.section.session_timeout_s)
    finally:
        await asyncio.gather(*gateway.end(name), return_exceptions=True)
        await policy.apart(policy.leave_unread)
    transcript.reward = found["reward"]
    transcript.numbers = found["numbers"]
