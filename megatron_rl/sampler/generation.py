"""Prompts that are answered on an event loop, for one thread that takes the complete groups: by
engines (sampler.py), or by sessions (environments/sessions.py).
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from typing import Any

from megatron_rl.processes.threads import MEANWHILE_S, EventLoopThread
from megatron_rl.types import Prompt, Rollout


class GenerationHandle:
    """Open prompts of one thread; other threads may ask the same engines meanwhile."""

    def __init__(
        self,
        loop: EventLoopThread,
        answer: Callable[[Prompt, int], Awaitable[list[Rollout]]],
        *,
        waiting: Callable[[], AbstractContextManager[None]],
        close: Callable[[], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """`answer`: of a prompt and its group, on the loop. `waiting` is around waits; `meanwhile`
        is called in the waiting thread every now and then.
        """
        self._loop = loop
        self._answer = answer
        self._waiting = waiting
        self._close = close
        self._meanwhile = meanwhile
        self._found: queue.SimpleQueue[list[Rollout] | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        """Ask more prompts, behind those before; the group of a prompt is `first_group`
        plus its index.
        """
        if prompts:
            self._loop.call(self._begin(prompts, first_group))
            self._open += len(prompts)

    def finished(self) -> list[list[Rollout]]:
        """Return the groups that are complete by now, each by sample; wait for one. Empty: no
        prompt is open.
        """
        groups: list[list[Rollout]] = []
        with self._waiting():
            while self._open > len(groups) and not (groups and self._found.empty()):
                found = self._failure or self._next()
                if not isinstance(found, BaseException):
                    groups.append(found)
                    continue
                self._failure = found
                if groups:  # what is complete comes before the error
                    break
                raise found
        self._open -= len(groups)
        return groups

    def close(self) -> None:
        """Give up what is open; safe to call twice, from another thread, and after the loop's own
        end.
        """
        self._open = 0
        with suppress(type(self._loop.ended())):
            self._loop.call(self._give_up())
        self._close()

    def _next(self) -> list[Rollout] | BaseException:
        while True:
            try:
                return self._found.get(timeout=MEANWHILE_S)
            except queue.Empty:
                self._loop.check()
                self._meanwhile()

    async def _begin(self, prompts: Sequence[Prompt], first_group: int) -> None:
        for group, prompt in enumerate(prompts, first_group):
            task = asyncio.create_task(self._group(prompt, group))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _group(self, prompt: Prompt, group: int) -> None:
        try:
            self._found.put(await self._answer(prompt, group))
        except asyncio.CancelledError:
            self._found.put(self._loop.ended())  # for whoever still waits
            raise
        except BaseException as error:
            self._found.put(error)

    async def _give_up(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def answered(answering: Any, prompts: Sequence[Prompt], first_group: int) -> list[Rollout]:
    """Rollouts of all prompts, group by group, from a GenerationHandle or its like, which is closed
    at the end.
    """
    groups: list[list[Rollout]] = []
    with closing(answering):
        answering.add(prompts, first_group)
        while more := answering.finished():
            groups += more
    groups.sort(key=lambda group: group[0].group)
    return [rollout for group in groups for rollout in group]
