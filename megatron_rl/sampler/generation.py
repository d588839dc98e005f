"""Prompts in generation on an event loop, for one thread that takes the complete groups: from
engines (sampler.py) or conversations (environments/sessions.py).
"""

import asyncio
import queue
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from typing import Protocol

from megatron_rl.processes.threads import MEANWHILE_S, EventLoopThread, cancel_all
from megatron_rl.types import Prompt, Rollout, SamplingParams


class GenerationHandle:
    """Open prompts of one thread; other threads may use the same engines."""

    def __init__(
        self,
        loop: EventLoopThread,
        answer: Callable[[Prompt, int], Awaitable[list[Rollout]]],
        *,
        waiting: Callable[[], AbstractContextManager[None]],
        close: Callable[[], None],
    ) -> None:
        """`answer`: generates a prompt's group, on the loop. `waiting`: context around waits."""
        self._loop = loop
        self._answer = answer
        self._waiting = waiting
        self._close = close
        self._found: queue.SimpleQueue[list[Rollout] | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        """Add prompts behind those before; a prompt's group is `first_group` plus its index."""
        if prompts:
            self._loop.call(self._begin(prompts, first_group))
            self._open += len(prompts)

    def finished(self) -> list[list[Rollout]]:
        """Return the complete groups, each by sample; wait for one. Empty: no prompt is open."""
        groups: list[list[Rollout]] = []
        with self._waiting():
            while self._open > len(groups) and not (groups and self._found.empty()):
                found = self._failure or self._next()
                if not isinstance(found, BaseException):
                    groups.append(found)
                    continue
                self._failure = found
                if groups:  # return complete groups before raising the error
                    break
                raise found
        self._open -= len(groups)
        return groups

    def close(self) -> None:
        """Cancel open prompts; safe to call twice, from another thread, and after the loop has
        ended.
        """
        self._open = 0
        with suppress(type(self._loop.ended())):
            self._loop.call(cancel_all(self._tasks))
        self._close()

    def _next(self) -> list[Rollout] | BaseException:
        while True:
            try:
                return self._found.get(timeout=MEANWHILE_S)
            except queue.Empty:
                self._loop.check()

    async def _begin(self, prompts: Sequence[Prompt], first_group: int) -> None:
        for group, prompt in enumerate(prompts, first_group):
            task = asyncio.create_task(self._group(prompt, group))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _group(self, prompt: Prompt, group: int) -> None:
        try:
            self._found.put(await self._answer(prompt, group))
        except asyncio.CancelledError:
            self._found.put(self._loop.ended())  # for callers that still wait
            raise
        except BaseException as error:
            self._found.put(error)


class GenerationSource(Protocol):
    """Sampler, or sampler of whole conversations."""

    def stream(
        self, params: SamplingParams, *, seed: int, step: int = 0, patient: bool = True
    ) -> GenerationHandle:
        """Generate responses to prompts, group by group. `patient`: see Engine.generate."""
        ...

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, first_group: int = 0
    ) -> list[Rollout]:
        """Return rollouts by prompt, sample, branch; a prompt's group is `first_group` plus its
        index.
        """
        groups: list[list[Rollout]] = []
        with closing(self.stream(params, seed=seed, patient=False)) as stream:
            stream.add(prompts, first_group)
            while more := stream.finished():
                groups += more
        groups.sort(key=lambda group: group[0].group)
        return [rollout for group in groups for rollout in group]
