"""What a server of the fleet may be asked: an ASGI middleware behind the key (server_access.py).

vLLM's server trusts whoever holds its key. One token id beyond the vocabulary ends its engine, one odd worker method
(`__class__`) leaves it deaf, others write files. Here whatever is not on the list of a fleet's requests is answered
404, and whatever does not fit its form 400, before vLLM sees it; what passes is written anew from what was understood.

/health is answered here: vLLM's own says that the engine's process exists, as one does that was stopped, or whose
threads have died. Here the engine itself is asked. One that does not answer at once may be busy with a long prefill, an
update or a compilation; then its processes use the CPU, or their main threads look again and again for what they wait
for (a lock on a cache, a worker, a page of a file). One that neither answers nor works hangs.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from megatron_rl.engine.server_access import App, Message, Receive, Send
from megatron_rl.processes.process import work_below

LONGEST_BODY = 16 << 20  # a million token ids, and room
LARGEST = 2**63 - 1
MOST_LOGPROBS = 2048  # of a token; the engine's own bound is max_logprobs
WAIT_S = 4.0
BUSY_SHARE = 0.05  # of a core; an engine that waits for a request uses a hundredth
BUSY_TURNS = 5.0  # of its main thread, per second; it has none while it waits for a request

TokenId = Annotated[int, msgspec.Meta(ge=0)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]


class _Body(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    pass


class _Sampling(_Body):
    n: Positive = 1
    seed: Natural | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=LARGEST)] = 0
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True


class _Generate(_Body):
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: _Sampling


class _Stamp(_Body):
    new_version: Annotated[str, msgspec.Meta(pattern="^(-1|[0-9]{1,18})$")]


class _UpdateInfo(_Body):
    directory: str
    policy_version: Natural
    writers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    background: bool = False


class _Nothing(_Body):
    pass


class _Init(_Body):
    init_info: _Nothing


class _Update(_Body):
    update_info: _UpdateInfo


class _Rpc(_Body):
    method: Literal["guarded_call", "weight_sync_state", "weight_update_building"]
    args: list[Any] = []


WORKER_METHODS: dict[str, type[_Body]] = {  # of guarded_call, with their arguments
    "init_weight_transfer_engine": _Init,
    "start_weight_update": _Nothing,
    "update_weights": _Update,
    "await_weight_update": _Nothing,
    "finish_weight_update": _Nothing,
    "abort_weight_update": _Nothing,
    "forget_version": _Nothing,
}
BODIES: dict[tuple[str, str], type[_Body]] = {
    ("POST", "/inference/v1/generate"): _Generate,
    ("POST", "/collective_rpc"): _Rpc,
    ("POST", "/update_weight_version"): _Stamp,
}
QUERIES = {  # requests without a body, and what may follow their `?`
    ("GET", "/server_info"): rb"config_format=(json|text)|",
    ("GET", "/weight_info"): rb"",
    ("GET", "/v1/models"): rb"",
    ("GET", "/version"): rb"",
    ("GET", "/metrics"): rb"",
    ("POST", "/pause"): rb"mode=(keep|wait)&clear_cache=false",
    ("POST", "/resume"): rb"",
    ("POST", "/reset_prefix_cache"): rb"(reset_running_requests=true)?",
    ("POST", "/sleep"): rb"(level=[12])?",
    ("POST", "/wake_up"): rb"((tags=weights|tags=kv_cache)(&(?!$)|$))*",
}


@dataclass(frozen=True)
class Limits:
    """Bounds of the engine behind the server."""

    vocabulary: int
    tokens: int  # of a prompt and its answer together
    sequences: int

    @classmethod
    def of(cls, config: Any) -> Limits:
        model = config.model_config
        return cls(model.get_vocab_size(), model.max_model_len, config.scheduler_config.max_num_seqs)


class Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Heartbeat:
    def __init__(self, engine: Any, server: int) -> None:
        """`server`: the process whose children are the engine."""
        self._engine, self._server = engine, server
        self._asked: asyncio.Future[Any] | None = None  # one question at a time, however often somebody looks

    async def look(self) -> tuple[int, dict[str, str]]:
        before = work_below(self._server)
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._engine.collective_rpc("weight_update_building"))
        await asyncio.wait([self._asked], timeout=WAIT_S)
        if self._asked.done():
            error = self._asked.exception()
            return (200, {"engine": "answers"}) if error is None else (503, {"error": f"its engine failed: {error}"})
        after = work_below(self._server)
        if after.stopped:
            return 503, {"error": f"its engine's process {after.stopped[0]} is stopped"}
        if after.cpu_s - before.cpu_s >= BUSY_SHARE * WAIT_S or after.turns - before.turns >= BUSY_TURNS * WAIT_S:
            return 200, {"engine": "busy"}
        return 503, {"error": f"its engine neither answers nor works (for {WAIT_S:g} s)"}


class CheckRequests:
    def __init__(self, app: App) -> None:
        self._app = app
        self._heartbeat: Heartbeat | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        route = scope["method"], scope["path"]
        try:
            if route == ("GET", "/health"):
                if self._heartbeat is None:
                    self._heartbeat = Heartbeat(scope["app"].state.engine_client, os.getpid())
                await _answer(send, *await self._heartbeat.look())
            elif route in BODIES:
                body = checked(route, await _body(receive), Limits.of(scope["app"].state.vllm_config))
                await self._app(_with_length(scope, len(body)), _replay(body, receive), send)
            elif route in QUERIES:
                if not re.fullmatch(QUERIES[route], scope["query_string"]):
                    raise Refused(400, f"what follows the ? of {scope['path']} is not understood")
                await self._app(scope, receive, send)
            else:
                raise Refused(404, f"a fleet has no request {scope['method']} {scope['path']}")
        except Refused as error:
            await _answer(send, error.status, {"error": str(error)})


def checked(route: tuple[str, str], body: bytes, limits: Limits) -> bytes:
    """The body written anew from what was understood of it; Refused where it does not fit."""
    try:
        request = msgspec.json.decode(body, type=BODIES[route])
        if isinstance(request, _Generate):
            _check_prompt(request, limits)
        elif isinstance(request, _Rpc):
            _check_call(request)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(400, f"the body does not fit: {error}") from None
    return msgspec.json.encode(request)


def _check_prompt(request: _Generate, limits: Limits) -> None:
    wanted = request.sampling_params
    for name, ids in (("token_ids", request.token_ids), ("stop_token_ids", wanted.stop_token_ids)):
        if ids and max(ids) >= limits.vocabulary:
            raise Refused(400, f"{name}: {max(ids)} is beyond the vocabulary of {limits.vocabulary} tokens")
    length, answer = len(request.token_ids), wanted.max_tokens or 1
    if length + answer > limits.tokens:
        raise Refused(
            400, f"a prompt of {length} tokens and max_tokens={answer} exceed {limits.tokens} tokens (max_model_len)"
        )
    if wanted.n > limits.sequences:
        raise Refused(400, f"n: {wanted.n} samples exceed the {limits.sequences} that are decoded at once")


def _check_call(request: _Rpc) -> None:
    if request.method != "guarded_call":
        msgspec.convert(request.args, tuple[()])
        return
    method, arguments = msgspec.convert(request.args, tuple[str, dict[str, Any]])
    if method not in WORKER_METHODS:
        raise Refused(400, f"no worker method {method[:40]!r} for a fleet; there are {', '.join(WORKER_METHODS)}")
    msgspec.convert(arguments, WORKER_METHODS[method])


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the connection ended in the middle of the body")
        body += message.get("body", b"")
        if len(body) > LONGEST_BODY:
            raise Refused(413, f"the body has more than {LONGEST_BODY} bytes")
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, then whatever still comes, such as the end of the connection."""
    waiting = [body]

    async def again() -> Message:
        return {"type": "http.request", "body": waiting.pop(), "more_body": False} if waiting else await receive()

    return again


def _with_length(scope: Message, length: int) -> Message:
    """The body is JSON, whatever its sender called it."""
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"content-type")]
    given = [(b"content-length", b"%d" % length), (b"content-type", b"application/json")]
    return {**scope, "headers": headers + given}


async def _answer(send: Send, status: int, content: dict[str, str]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})
