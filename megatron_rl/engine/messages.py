"""Messages between a sampler and an engine process, and a server's validation of requests.

One transmission is a list of messages, which the engine starts in one step: its requests share
batches. A request is {id, method, arguments}. Its reply is {id, value} or {id, error: {type,
message}}.

REQUESTS lists the requests that a server accepts. A token id beyond the vocabulary would end vLLM's
engine, and an invalid worker method would make it unresponsive: a server validates every message
before the engine sees it.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from megatron_rl.engine.readiness import LARGEST_ID
from megatron_rl.files import JsonObject
from megatron_rl.models.tensors import DTYPES
from megatron_rl.processes.channel import Refused, encode
from megatron_rl.weight_sync.manifest import NO_VERSION

LARGEST = 2**63 - 1
MOST_CANDIDATES = 2048  # per token; the engine's own bound is max_logprobs
LONGEST_TRANSMISSION = 64 << 20  # bytes: four million token ids, and overhead

TokenId = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ID)]
Tokens = Annotated[list[TokenId], msgspec.Meta(min_length=1)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
Few = Annotated[int, msgspec.Meta(ge=1, le=(1 << 16) - 1)]
Version = Annotated[int, msgspec.Meta(ge=NO_VERSION, le=LARGEST_ID)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Dtype = Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(DTYPES)})\Z")]
Shape = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ID)]], msgspec.Meta(max_length=8)
]
Frames = list[JsonObject]


class Body(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Tools(Body):
    parser: Annotated[str, msgspec.Meta(max_length=64)]
    schemas: Annotated[str, msgspec.Meta(max_length=1 << 20)]


class Generate(Body):
    """Request for one sample of a prompt."""

    tokens: Tokens
    seed: Natural
    max_tokens: Positive
    temperature: Annotated[float, msgspec.Meta(ge=0, le=LARGEST)] = 1.0  # neither NaN nor infinite
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=LARGEST)] = -1
    stop_token_ids: list[TokenId] = []
    candidates: Annotated[int, msgspec.Meta(ge=0, le=MOST_CANDIDATES)] = 0
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_CANDIDATES)] = 0
    top_mass: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    policy_version: Version | None = None  # the version that the caller expects
    # accept a newer version, and wait if the request cannot be served now
    patient: bool = False
    tools: Tools | None = None  # tools and parser of the response's calls


class Cancel(Body):
    requests: list[Natural]


class Init(Body):
    init_info: JsonObject


class Stage(Body):
    update_info: JsonObject


class Finish(Body):
    pause: bool = False  # open samples are paused until `resume`


class EmptyBody(Body):
    pass


class Sleep(Body):
    level: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1


class Wake(Body):
    tags: list[Literal["weights", "kv_cache"]] | None = None


REQUESTS: dict[str, type[Body]] = {
    "generate": Generate,
    "cancel": Cancel,
    "status": EmptyBody,
    "sleep": Sleep,
    "wake": Wake,
    "init_weight_transfer_engine": Init,
    "start_weight_update": EmptyBody,
    "update_weights": Stage,
    "await_weight_update": EmptyBody,
    "finish_weight_update": Finish,
    "resume": EmptyBody,
    "abort_weight_update": EmptyBody,
    "forget_version": EmptyBody,
}


class FileUpdate(Body):
    """Location of an update's files."""

    directory: str
    policy_version: Natural
    writers: Few
    background: bool = False


def _form(**fields: Any) -> Any:
    return msgspec.defstruct("Form", list(fields.items()), bases=(Body,))


_TENSOR = _form(name=Name, dtype=Dtype, shape=Shape)
# arguments of a server before the first update and in each update, by transport (`ipc` reaches no
# server); with `nccl` also the messages around tensors, by their key. Nothing of it is unpickled
INITS: JsonObject = {
    "file": EmptyBody,
    "nccl": _form(
        master_address=Name,
        master_port=Few,
        rank_offset=Few,
        world_size=Few,
        packed=bool,
        packed_buffer_size_bytes=Positive,
        packed_num_buffers=Few,
    ),
}
TENSORS: JsonObject = {
    "file": FileUpdate,
    "nccl": _form(names=list[Name], dtype_names=list[Dtype], shapes=list[Shape]),
}
_TENSORS = list[_TENSOR]  # type: ignore[valid-type]
_ANNOUNCED = _form(policy_version=Natural, format=Name, tensors=_TENSORS)
AROUND: JsonObject = {
    "announce": _form(announce=_ANNOUNCED),
    "seal": _form(seal=_form(policy_version=Natural, checksums=dict[Name, tuple[int, int]])),
    "abandon": _form(abandon=Name),
}


class _Frame(msgspec.Struct, forbid_unknown_fields=True):
    id: Natural
    method: str
    arguments: msgspec.Raw


def transmissions(frames: Iterable[Any]) -> Iterator[bytes]:
    """Encode frames in as few transmissions as the size limit allows: samples that finish together
    may exceed one.
    """
    part: list[msgspec.Raw] = []
    size = 0
    for frame in frames:
        content = encode(frame)
        if part and size + len(content) > LONGEST_TRANSMISSION // 2:
            yield msgspec.msgpack.encode(part)
            part = []
            size = 0
        part.append(msgspec.Raw(content))
        size += len(content)
    if part:
        yield msgspec.msgpack.encode(part)


def checked(
    content: bytes, vocabulary: int, longest: int, transport: str = "file"
) -> tuple[Frames, Frames]:
    """Decode and validate the requests of one transmission; return them, and error replies to
    invalid ones.

    Refused as a whole if it is no list of requests. `longest`: tokens of prompt and response
    together.
    """
    try:
        frames = msgspec.msgpack.decode(content, type=list[_Frame])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(f"invalid transmission: {error}") from None
    requests = []
    refusals = []
    for one in frames:
        try:
            arguments = _arguments(one, vocabulary, longest, transport)
        except Refused as error:
            refusals.append(
                {"id": one.id, "error": {"type": Refused.__name__, "message": str(error)}}
            )
        else:
            requests.append({"id": one.id, "method": one.method, "arguments": arguments})
    return requests, refusals


def _arguments(frame: _Frame, vocabulary: int, longest: int, transport: str) -> JsonObject:
    form = REQUESTS.get(frame.method)
    if form is None:
        raise Refused(f"no method {frame.method[:40]!r}; an engine supports {', '.join(REQUESTS)}")
    try:
        body = msgspec.msgpack.decode(frame.arguments, type=form)
        if isinstance(body, Stage):
            form = TENSORS.get(transport, EmptyBody)
            if transport == "nccl":
                form = AROUND.get(next(iter(body.update_info), ""), form)
            msgspec.convert(body.update_info, form)
        elif isinstance(body, Init):
            msgspec.convert(body.init_info, INITS.get(transport, EmptyBody))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(
            f"{frame.method}: {error}; this engine takes sync.transport={transport}"
        ) from None
    if isinstance(body, Generate):
        _check_lookups(body, vocabulary, longest)
    asked = msgspec.structs.asdict(body)
    if isinstance(body, Generate):
        asked["tools"] = body.tools and msgspec.structs.asdict(body.tools)
    return asked


def _check_lookups(body: Generate, vocabulary: int, longest: int) -> None:
    for name, ids in (("tokens", body.tokens), ("stop_token_ids", body.stop_token_ids)):
        if ids and max(ids) >= vocabulary:
            raise Refused(f"{name}: {max(ids)} is beyond the vocabulary of {vocabulary} tokens")
    if len(body.tokens) + body.max_tokens > longest:
        raise Refused(
            f"a prompt of {len(body.tokens)} tokens and max_tokens={body.max_tokens} exceed "
            f"{longest} tokens (max_model_len)"
        )
