"""Engine client with scripted replies."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from megatron_rl.processes.channel import encode
from megatron_rl.sampler.client.engine_client import EngineClient
from megatron_rl.sampler.client.interface import Look
from megatron_rl.sampler.client.lines import Line
from megatron_rl.types import Completion, SamplingParams

NAME = "server 0 (int8)"
PARAMS = SamplingParams(samples=1, max_tokens=2)
SAMPLE = {
    "token_ids": array("i", [5, 6]),
    "logprobs": array("f", [-1.0, float("nan")]),
    "finish_reason": "length",
    "policy_version": 3,
}
Frames = list[dict[str, Any]]


def replied(frames: Iterable[dict[str, Any]], value: Any = SAMPLE) -> bytes:
    return encode([{"id": one["id"], "value": value} for one in frames])


class ScriptedLine(Line):
    """Line that records what is sent and receives scripted replies."""

    def __init__(self, answer: Callable[[Frames], bytes | None] = lambda frames: None) -> None:
        super().__init__()
        self.sent: Frames = []
        self._answer = answer

    async def open(self) -> None: ...

    def send(self, content: bytes) -> None:
        frames = msgspec.msgpack.decode(content)
        self.sent += frames
        answer = self._answer(frames)
        if answer is not None:
            asyncio.get_running_loop().call_soon(self.received, answer)

    async def look(self) -> Look:
        return Look(True)

    async def close(self) -> None: ...


def generate(engine: EngineClient, params: SamplingParams = PARAMS) -> Awaitable[Completion]:
    return engine.generate((1, 2), params, 7, version=3, patient=True)


async def sampled(engine: EngineClient) -> None:
    one = await generate(engine)
    assert (list(one.token_ids), one.policy_version, one.logprobs[0]) == ([5, 6], 3, -1.0)


def with_replies(
    answer: Callable[[Frames], bytes | None], use: Callable[[EngineClient], Awaitable[Any]]
) -> Any:
    """Return the result of `use` with a client; `answer` is the reply to each transmission."""

    async def main() -> Any:
        engine = EngineClient(NAME, ScriptedLine(answer), 30.0, 100)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(main())
