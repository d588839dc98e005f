"""Groups for one thread, of answers that come on an event loop."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from rollouts import rollout

from megatron_rl.processes.threads import EventLoopThread
from megatron_rl.sampler.generation import GenerationHandle
from megatron_rl.types import Prompt, Rollout


class Ended(RuntimeError):
    pass


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    loop = EventLoopThread("answers", Ended)
    yield loop
    loop.stop()


def prompts(*numbers: int) -> list[Prompt]:
    return [Prompt(number, (number,), "", {}) for number in numbers]


def stream(loop: EventLoopThread) -> GenerationHandle:
    """Prompt 5 is refused; prompt 6 is never answered."""

    async def answer(prompt: Prompt, group: int) -> list[Rollout]:
        if prompt.id == 5:
            await asyncio.sleep(0.05)
            raise ValueError("prompt 5")
        if prompt.id == 6:
            await asyncio.Event().wait()
        return [rollout((prompt.id,), prompt=prompt, group=group)]

    return GenerationHandle(loop, answer, waiting=nullcontext, close=lambda: None)


def test_every_group_comes_once_and_then_none(loop: EventLoopThread) -> None:
    asked = stream(loop)
    assert asked.finished() == []
    asked.add(prompts(1, 2), 10)
    found = asked.finished()
    asked.add(prompts(3), 12)
    while more := asked.finished():
        found += more
    assert sorted((one.group, *one.token_ids) for (one,) in found) == [(10, 1), (11, 2), (12, 3)]


def test_what_is_complete_comes_before_an_error_which_stays(loop: EventLoopThread) -> None:
    asked = stream(loop)
    asked.add(prompts(5, 1, 2), 0)
    found = 0
    while found < 2:
        found += len(asked.finished())
    for _ in range(2):
        with pytest.raises(ValueError, match="prompt 5"):
            asked.finished()


@pytest.mark.parametrize("how", ["it is closed", "its loop ends"])
def test_a_waiting_call_returns_at_the_end(loop: EventLoopThread, how: str) -> None:
    asked = stream(loop)
    asked.add(prompts(6), 0)

    async def end() -> None:
        await asyncio.sleep(0.1)
        for task in asked._tasks:
            task.cancel()

    if how == "its loop ends":
        loop.stop()
    else:
        loop.submit(end())
    with pytest.raises(Ended):
        asked.finished()
    asked.close()
    asked.close()
    assert asked.finished() == []
