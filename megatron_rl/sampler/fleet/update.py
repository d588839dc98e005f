"""Fan-out of one update, or one question, to every server of a fleet at once.

An update has three parts: every server begins it, then every server verifies it, then every server loads it. If one
refuses it while verifying, none loads it. A server that dies in any part is taken out; its supervisor brings it back
with the version that the fleet serves by then. Servers go on answering in the first two parts, and stop between two
steps for the third.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.config.schema import Format
from megatron_rl.sampler.fleet.replica import NoServerLeft, Replica, ReplicaGone
from megatron_rl.sampler.fleet.supervisor import FleetState
from megatron_rl.sampler.protocol import SamplerError

POLL_S = 0.1


class FleetUpdates:
    """Used from the fleet's event loop only."""

    def __init__(self, replicas: Sequence[Replica], state: FleetState) -> None:
        self._replicas, self._state = replicas, state
        self._updating = False  # holds state.updating, which keeps re-syncs away
        self._staged: dict[Format, dict[str, Any]] = {}

    async def on_all(self, ask: Callable[[Replica], Any]) -> list[Any]:
        """Ask every server that is ready, all at once. One that is gone is taken out; with none left, an error."""
        state = self._state
        ready = [replica for replica in self._replicas if replica.ready]
        answers = await asyncio.gather(*(self._ask(replica, ask) for replica in ready), return_exceptions=True)
        for replica, answer in zip(ready, answers, strict=True):
            if isinstance(answer, ReplicaGone):
                state.take_out(replica, str(answer))
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        serious = [answer for answer in refused if not isinstance(answer, ReplicaGone)]
        if serious:
            raise serious[0]
        if not any(replica.ready for replica in ready):
            raise NoServerLeft(self._replicas, state.version, state.start_timeout_s)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _ask(self, replica: Replica, ask: Callable[[Replica], Any]) -> Any:
        """Its supervisor may take the replica out meanwhile, and so end the wait for its answer."""
        task = asyncio.ensure_future(ask(replica))
        replica.running.add(task)
        try:
            await asyncio.wait([task])
        finally:
            replica.running.discard(task)
            task.cancel()  # where the caller was
        if task.cancelled():
            raise ReplicaGone(replica.reason)
        return task.result()

    async def begin(self) -> None:
        state = self._state
        if not any(replica.ready for replica in self._replicas):
            await self._until_one_is_ready()
        self._end()  # one that was never finished
        try:
            await asyncio.wait_for(state.updating.acquire(), state.start_timeout_s)
        except TimeoutError:
            raise SamplerError(
                f"a weight update could not begin within sampler.start_timeout_s={state.start_timeout_s:g}: "
                f"{', '.join(one.name for one in self._replicas if not one.ready and not one.given_up)} is still "
                "receiving the version before. Read its log; raise sampler.start_timeout_s where it was only slow"
            ) from None
        self._updating = True
        try:
            await self.on_all(lambda one: one.start_update())
        except BaseException:
            self._end()
            raise

    async def stage(self, updates: dict[Format, dict[str, Any]]) -> None:
        self._staged = updates
        try:
            await self.on_all(lambda one: one.stage_update(updates[one.format]))
        except BaseException:
            self._end()
            with contextlib.suppress(SamplerError):  # the first error is the one to report
                await self.on_all(lambda one: one.call_workers("abort_weight_update"))
            raise

    async def finish(self) -> dict[str, Any]:
        """Load the update. No server goes on before every one has: no token is of weights that are taken back."""
        state = self._state
        updated = [replica for replica in self._replicas if replica.ready]
        for replica in updated:
            replica.updating = True
        try:
            states = await self.on_all(lambda one: one.finish_update(state.swap))
            slowest = max(states, key=lambda answer: answer["load_s"])
            state.served.append(slowest["policy_version"])
            state.kept_update = self._staged
        except BaseException:  # of every kind: one that was interrupted may have either version
            for replica in updated:
                if replica.ready and replica.version != state.version:
                    state.take_out(replica, "it loaded a version that another server could not load")
            raise
        finally:
            self._end()
            for replica in updated:
                replica.updating = False
            stood_s = await self._resume(updated)
            state.tell()
        return slowest | {"stood_s": stood_s}

    async def _resume(self, replicas: Sequence[Replica]) -> float:
        """Let servers that stand still go on; how long they stood. One that cannot go on is taken out."""
        standing = [replica for replica in replicas if replica.ready and replica.paused_at is not None]
        answers = await asyncio.gather(
            *(self._ask(one, lambda it: it.resume()) for one in standing), return_exceptions=True
        )
        for replica, answer in zip(standing, answers, strict=True):
            if isinstance(answer, BaseException):
                self._state.take_out(replica, str(answer))
        return max((answer for answer in answers if isinstance(answer, float)), default=0.0)

    def _end(self) -> None:
        self._staged = {}
        if self._updating:
            self._updating = False
            self._state.updating.release()

    async def _until_one_is_ready(self) -> None:
        state = self._state
        deadline = time.monotonic() + state.start_timeout_s
        while not any(replica.ready for replica in self._replicas):
            if time.monotonic() > deadline or all(replica.given_up for replica in self._replicas):
                raise NoServerLeft(self._replicas, state.version, state.start_timeout_s)
            await asyncio.sleep(POLL_S)
