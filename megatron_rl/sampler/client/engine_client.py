"""Client of an engine process: requests over a child's socket or a server's port, deadlines, bounds
on replies.

Requests made in one iteration of the event loop are sent together, and so share the engine's
batches. The deadline of a sample is not its age, which grows with the queue: the engine has to
finish a sample, or generate tokens, within that time.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from megatron_rl.engine.messages import Version, transmissions
from megatron_rl.engine.readiness import LARGEST_ID, SyncState
from megatron_rl.files import JsonObject
from megatron_rl.processes.channel import Refused, decode
from megatron_rl.processes.heartbeat import mark
from megatron_rl.sampler.client.interface import (
    EngineTimeout,
    EngineUnavailable,
    Kind,
    Look,
    Part,
    RequestRefused,
    SamplerError,
    UpdateStep,
)
from megatron_rl.sampler.client.lines import HEALTH_TIMEOUT_S, Line
from megatron_rl.types import Completion, SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

OTHER_THING = "returned a malformed reply"
REQUEST_KEY = "sampler.request_timeout_s"
HIGHEST_LOGPROB = 1e-3  # at most 0, plus rounding
METHODS: dict[UpdateStep, str] = {
    "init": "init_weight_transfer_engine",
    "start": "start_weight_update",
    "stage": "update_weights",
    "await": "await_weight_update",
    "finish": "finish_weight_update",
    "resume": "resume",
    "abort": "abort_weight_update",
    "forget": "forget_version",
}


class _Error(msgspec.Struct):
    type: str
    message: str


class _Reply(msgspec.Struct):
    id: int
    value: msgspec.Raw = msgspec.Raw()
    error: _Error | None = None


class _Status(msgspec.Struct):
    """Status fields that the client acts on."""

    policy_version: Version = NO_VERSION
    incomplete: bool = False
    refusal: str | None = None
    longest: int = 0
    cache_tokens: int = 0
    written: int = 0


class _Asked:
    """Request in flight."""

    def __init__(self, frame: JsonObject, again: bool) -> None:
        self.frame = frame
        self.again = again
        self.answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()


class EngineClient:
    """Open requests of one engine; implements interface.Engine."""

    def __init__(self, name: str, line: Line, timeout_s: float, vocabulary: int) -> None:
        self.name = name
        self.line = line
        self._timeout_s = timeout_s
        self._vocabulary = vocabulary
        self._number = 0
        self._asked: dict[int, _Asked] = {}
        self._samples: set[int] = set()
        self._to_send: list[JsonObject] = []
        self._cancelled: list[int] = []
        self._gone: EngineUnavailable | None = None
        # time of the last finished sample; value of `written` in the last status
        self._progress = 0.0
        self._written = -1
        self._patience: asyncio.TimerHandle | None = None
        line.received = self._receive
        line.ended = self._end
        line.reopened = self._ask_again

    async def open(self) -> None:
        await self.line.open()

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        version: int,
        patient: bool,
    ) -> Completion:
        arguments = {
            "tokens": tokens,
            "seed": seed,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "stop_token_ids": params.stop_token_ids,
            "candidates": params.candidates,
            "top_logprobs": params.top_logprobs,
            "top_mass": params.top_mass,
            "policy_version": version,
            "patient": patient,
        }
        if params.tools is not None:
            arguments["tools"] = asdict(params.tools)
        asked = self._ask("generate", arguments)
        number = asked.frame["id"]
        if not self._samples:
            self._progress = asyncio.get_running_loop().time()
        self._samples.add(number)
        if self._patience is None:
            self._have_patience()
        try:
            value = await asked.answer
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            self._samples.discard(number)
        try:
            completion: Completion = decode(value, Completion)
            self._check(completion, params, len(tokens))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise EngineUnavailable(
                f"{self.name} returned a malformed completion: {str(error)[:200]}"
            ) from None
        return completion

    async def update(self, step: UpdateStep, **arguments: Any) -> Mapping[str, Any]:
        # a version may have been loaded before the connection ended
        content = await self.call(METHODS[step], arguments, again=step != "finish")
        if step == "finish":
            return asdict(self._read(content, SyncState))
        return {}

    async def sleep(self, level: int) -> None:
        await self.call("sleep", {"level": level})

    async def wake(self, parts: Sequence[Part] | None = None) -> None:
        await self.call("wake", {"tags": parts})

    async def values(
        self, kind: Kind, sequences: Sequence[Sequence[int]], version: int
    ) -> list[Any]:
        arguments = {"kind": kind, "sequences": sequences, "policy_version": version}
        return self._read(await self.call("values", arguments), list[Any])

    async def status(self) -> Mapping[str, Any]:
        content = await self.call("status", {})
        return {
            **self._read(content, JsonObject),
            **msgspec.structs.asdict(self._read(content, _Status)),
        }

    async def look(self) -> Look:
        return await self.line.look()

    async def start(self, arguments: Mapping[str, Any], timeout_s: float) -> None:
        """Send a new process its engine's arguments; return once the engine is up."""
        await self.call("start", arguments, limit=("sampler.start_timeout_s", timeout_s))

    async def call(
        self,
        method: str,
        arguments: Mapping[str, Any],
        again: bool = True,
        limit: tuple[str, float] | None = None,
    ) -> msgspec.Raw:
        """Return the reply to a request; raise EngineTimeout after the timeout."""
        key, seconds = limit or (REQUEST_KEY, self._timeout_s)
        asked = self._ask(method, arguments, again)
        try:
            async with asyncio.timeout(seconds):
                value = await asked.answer
        except TimeoutError:
            raise EngineTimeout(
                f"{self.name} did not reply to `{method}` within {key}={seconds:g}"
            ) from None
        finally:
            self._asked.pop(asked.frame["id"], None)
        return value

    def ask_to_end(self) -> None:
        """Request an orderly shutdown, which takes a larger engine seconds; there is no reply."""
        if self._gone is None:
            self._send({"id": 0, "method": "shutdown", "arguments": {}})

    async def close(self) -> None:
        self._end("it was closed")
        await self.line.close()

    def _ask(self, method: str, arguments: Mapping[str, Any], again: bool = True) -> _Asked:
        if self._gone is not None:
            raise self._gone
        self._number += 1
        asked = self._asked[self._number] = _Asked(
            {"id": self._number, "method": method, "arguments": arguments}, again
        )
        self._send(asked.frame)
        return asked

    def _send(self, frame: JsonObject) -> None:
        if not self._to_send:
            asyncio.get_running_loop().call_soon(self._flush)
        self._to_send.append(frame)

    def _flush(self) -> None:
        frames = self._to_send
        self._to_send = []
        self._cancelled = []
        if self._gone is None:
            for content in transmissions(frames):
                self.line.send(content)

    def _cancel(self, number: int) -> None:
        """Cancel samples at the engine, all of one event loop iteration together."""
        if self._asked.pop(number, None) is None or self._gone is not None:
            return
        if not self._cancelled:
            self._send({"id": 0, "method": "cancel", "arguments": {"requests": self._cancelled}})
        self._cancelled.append(number)

    def _receive(self, content: bytes) -> None:
        try:
            replies = msgspec.msgpack.decode(content, type=list[_Reply])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return self._end(f"it {OTHER_THING}: {str(error)[:200]}")
        for reply in replies:
            asked = self._asked.pop(reply.id, None)
            if reply.id in self._samples:
                self._progress = asyncio.get_running_loop().time()
            if asked is None or asked.answer.done():
                continue
            if asked.frame["method"] != "status":  # status requests are no progress
                mark()
            if reply.error is not None:
                asked.answer.set_exception(self._error(asked.frame["method"], reply.error))
            else:
                asked.answer.set_result(reply.value)

    def _error(self, method: str, error: _Error) -> Exception:
        text = f"{self.name}: {error.message[:4000]}"
        if error.type == WeightSyncError.__name__:
            return WeightSyncError(text)
        if error.type == Refused.__name__:
            return RequestRefused(text)
        broke = method == "generate" and self.line.checked
        kind = EngineUnavailable if broke else SamplerError
        return kind(f"{self.name}: `{method}` failed: {error.type[:100]}: {error.message[:4000]}")

    def _end(self, reason: str) -> None:
        """Fail all requests, open and future ones."""
        if self._gone is None:
            self._gone = EngineUnavailable(f"{self.name}: {reason}")
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(self._gone)
                asked.answer.exception()  # marks the exception as retrieved, or asyncio would warn
        self._asked.clear()
        if self._patience is not None:
            self._patience.cancel()

    def _ask_again(self) -> None:
        self._to_send = []
        self._cancelled = []
        for number, asked in list(self._asked.items()):
            if asked.again:
                self._send(asked.frame)
            elif not asked.answer.done():
                del self._asked[number]
                asked.answer.set_exception(
                    EngineUnavailable(
                        f"{self.name}: the connection ended in `{asked.frame['method']}`"
                    )
                )

    def _have_patience(self) -> None:
        """Check the deadline of samples whenever it may have passed."""
        loop = asyncio.get_running_loop()
        self._progress = loop.time()
        self._patience = loop.call_at(self._progress + self._timeout_s, self._lose_patience)

    def _lose_patience(self) -> None:
        loop = asyncio.get_running_loop()
        self._patience = None
        if not self._samples or self._gone is not None:
            return
        if loop.time() < self._progress + self._timeout_s:
            self._patience = loop.call_at(self._progress + self._timeout_s, self._lose_patience)
        else:
            self._asking = asyncio.ensure_future(self._look_for_progress())

    async def _look_for_progress(self) -> None:
        """Extend the deadline if the engine has generated tokens without finishing a sample."""
        written = self._written
        with suppress(SamplerError, TimeoutError):
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                self._written = (await self.status())["written"]
        if self._gone is None and self._samples and self._written != written:
            return self._have_patience()
        for number in list(self._samples):
            asked = self._asked.pop(number, None)
            if asked is not None and not asked.answer.done():
                asked.answer.set_exception(
                    EngineTimeout(
                        f"{self.name} finished no response within {REQUEST_KEY}={self._timeout_s:g}"
                    )
                )

    def _read(self, content: msgspec.Raw, kind: Any) -> Any:
        try:
            return msgspec.msgpack.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise EngineUnavailable(f"{self.name} {OTHER_THING}: {str(error)[:200]}") from None

    def _check(self, one: Completion, params: SamplingParams, prompt: int) -> None:
        """Check a completion; ValueError if it cannot have been sampled."""
        tokens_T = np.asarray(one.token_ids)
        T = len(tokens_T)
        if params.max_tokens < T:
            raise ValueError(f"{T} tokens, {params.max_tokens} were requested")
        versions_T = one.versions or [one.policy_version] * T
        if len(one.logprobs) != T or len(versions_T) != T:
            raise ValueError(f"logprobs or policy versions that do not add up to {T} tokens")
        if not all(NO_VERSION <= version <= LARGEST_ID for version in one.all_versions):
            raise ValueError("an impossible policy version")
        self._check_ids(tokens_T)
        if (np.asarray(one.logprobs) > HIGHEST_LOGPROB).any():
            raise ValueError("a logprob above 0")
        if T and versions_T[0] != one.policy_version:
            raise ValueError("a policy version that is not the first token's")
        if params.candidates:
            self._check_kept(one, params.candidates)
        elif one.kept_ids is not None or one.kept_counts is not None:
            raise ValueError("a sampling support that was not requested")
        top = one.top_counts, one.top_ids, one.top_logprobs
        if params.top_logprobs:
            self._check_top(one, params.top_logprobs)
        elif any(column is not None for column in top):
            raise ValueError("top logprobs that were not requested")
        read = prompt + max(0, T - 1)
        if one.experts_SLK is not None and (
            one.experts_SLK.ndim != 3 or len(one.experts_SLK) != read
        ):
            raise ValueError(f"experts that do not add up for {read} tokens")

    def _check_kept(self, one: Completion, candidates: int) -> None:
        if one.kept_ids is None or one.kept_counts is None:
            raise ValueError("the sampling support is missing")
        self._check_ids(np.asarray(one.kept_ids))
        counts_T = np.asarray(one.kept_counts)
        if len(counts_T) != len(one.token_ids) or counts_T.sum() != len(one.kept_ids):
            raise ValueError(f"candidates that do not add up for {len(one.token_ids)} tokens")
        if ((counts_T < 1) | (counts_T > candidates)).any():
            raise ValueError(
                f"more than the {candidates} candidates of a token that were requested"
            )

    def _check_top(self, one: Completion, most: int) -> None:
        if one.top_counts is None or one.top_ids is None or one.top_logprobs is None:
            raise ValueError("the top logprobs are missing")
        self._check_ids(np.asarray(one.top_ids))
        counts_T = np.asarray(one.top_counts)
        if ((counts_T < 1) | (counts_T > most)).any():
            raise ValueError(f"top tokens of a token that are not 1 to {most}")
        logprobs = one.top_logprobs
        if logprobs.dtype != np.float16 or logprobs.shape != (len(one.top_ids),):
            raise ValueError(
                f"top logprobs that are not one float16 for each of {len(one.top_ids)}"
            )
        if len(counts_T) != len(one.token_ids) or counts_T.sum() != len(logprobs):
            raise ValueError(f"top tokens that do not add up for {len(one.token_ids)} tokens")
        rises = np.zeros(len(logprobs), bool)
        rises[1:] = logprobs[1:] > logprobs[:-1]
        rises[counts_T.cumsum() - counts_T] = False  # the first ones of each token
        if rises.any() or np.isinf(logprobs).any() or (logprobs > HIGHEST_LOGPROB).any():
            raise ValueError("top logprobs that are no logprobs, or not in descending order")

    def _check_ids(self, ids: np.ndarray) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            raise ValueError(
                f"token {ids.max()} is beyond the vocabulary of {self._vocabulary} tokens"
            )
