"""Weight updates of all engines: started, verified and loaded together, or by none; also sleep,
wake, and calls to all engines.

An update has three parts: every engine starts it, then every engine verifies it, then every engine
loads it. If one refuses it while verifying, none loads it. An engine that dies in any part is
marked down; its supervisor restarts it with the version that is served by then. If none is left,
the first one that comes back gets the same calls again, and the update continues. Engines generate
during the first two parts, and pause between two steps for the third.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_rl.config.schema import Format, Transport
from megatron_rl.files import JsonObject
from megatron_rl.sampler.client.interface import (
    Engine,
    EngineUnavailable,
    Part,
    SamplerError,
    UpdateStep,
)
from megatron_rl.sampler.replica import NoServerLeft, Replica
from megatron_rl.sampler.supervisor import SamplerState, UpdateCall
from megatron_rl.weight_sync.file_transport import BACKGROUND

POLL_S = 0.1


class Updates:
    """Updates of a sampler's engines. Used from the sampler's event loop only."""

    def __init__(self, replicas: Sequence[Replica], state: SamplerState) -> None:
        self._replicas = replicas
        self._state = state
        self.holds = False  # holds state.updating, which blocks re-syncs
        self._releases = False  # release the lock at the end of the update
        # a restarted engine no longer takes part
        self._taken_by: list[tuple[Replica, Engine]] = []
        self._calls: list[UpdateCall] = []
        self._stood_s = 0.0  # seconds that engines have paused for this update so far

    async def on_all(self, ask: Callable[[Replica], Awaitable[Any]]) -> list[Any]:
        """Call all live engines concurrently. A failed one is marked down; if none is left, wait
        for a restart.
        """
        while True:
            await self._until_one_is_up()
            with contextlib.suppress(NoServerLeft):
                return await self._on([replica for replica in self._replicas if replica.up], ask)

    async def sleep(self, level: int) -> None:
        """Put the engines to sleep. Engines that are starting or re-syncing come first: the learner
        needs their memory.
        """
        if not self.holds:
            with contextlib.suppress(NoServerLeft):
                await self.until(
                    lambda: all(one.ready or one.process is None for one in self._replicas)
                )
        await self.on_all(lambda one: one.engine.sleep(level))
        self._state.asleep = True

    async def wake(self, parts: Sequence[Part] | None) -> None:
        # the learner has released memory, also for an engine that has to be restarted
        self._state.asleep = False
        await self.on_all(lambda one: one.engine.wake(parts))

    async def _on(
        self, replicas: Sequence[Replica], ask: Callable[[Replica], Awaitable[Any]]
    ) -> list[Any]:
        state = self._state
        engines = [one.engine for one in replicas]
        answers = await asyncio.gather(
            *(one.wait_for(ask(one)) for one in replicas), return_exceptions=True
        )
        for replica, engine, answer in zip(replicas, engines, answers, strict=True):
            # it may have been replaced
            if isinstance(answer, EngineUnavailable) and replica.engine is engine:
                state.mark_down(replica, str(answer))
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        serious = [answer for answer in refused if not isinstance(answer, EngineUnavailable)]
        if serious:
            raise serious[0]
        if len(refused) == len(answers):
            raise NoServerLeft(self._replicas, state.version, state.start_timeout_s)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    @property
    def _taking(self) -> list[Replica]:
        """Return the engines that take part in the update."""
        return [
            replica for replica, engine in self._taken_by if replica.up and replica.engine is engine
        ]

    def _all_up(self) -> list[tuple[Replica, Engine]]:
        return [(replica, replica.engine) for replica in self._replicas if replica.up]

    async def hold(self) -> None:
        """Block re-syncs of restarted engines: the files of the current version may be
        overwritten.
        """
        if self.holds:
            return
        state = self._state
        try:
            await asyncio.wait_for(state.updating.acquire(), state.start_timeout_s)
        except TimeoutError:
            raise SamplerError(
                "a weight update could not start within "
                f"sampler.start_timeout_s={state.start_timeout_s:g}: "
                f"{', '.join(one.name for one in self._replicas if not one.ready and not one.failed)} "
                "is still receiving the version before. Read its log; raise "
                "sampler.start_timeout_s where it was only slow"
            ) from None
        self.holds = True

    async def release(self) -> None:
        if self.holds:
            self.holds = False
            self._state.updating.release()

    async def init(self, info: JsonObject) -> None:
        self._state.init_info = info  # also for engines that come later
        self.require_group()
        await self.on_all(lambda one: one.engine.update("init", **self._state.init_of(one)))

    def require_group(self) -> None:
        """Raise if NCCL would wait forever for a lost engine."""
        lost = [one for one in self._replicas if not one.up]
        if lost and self._state.transport == Transport.nccl:
            raise SamplerError(
                f"{lost[0].name} is lost, and with sync.transport=nccl nothing reaches the others "
                "without it: the run ends here, and resumes from its last checkpoint (by itself "
                f"with --attempts). Its end: {lost[0].reason}"
            )

    async def begin(self) -> None:
        self.require_group()
        self._releases = not self.holds
        await self.hold()
        self._taken_by = self._all_up()
        self._calls = []
        self._stood_s = 0.0
        try:
            await self._request("start", {})
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> None:
        if self._releases:
            await self.release()

    async def stage(self, updates: dict[Format, JsonObject]) -> None:
        """Have engines verify the update; nothing is loaded yet. They keep generating if the update
        allows it.
        """
        began = time.perf_counter()
        try:
            await self._request(
                "stage", {format: {"update_info": info} for format, info in updates.items()}
            )
            if all(info.get(BACKGROUND) for info in updates.values()):
                await self._request("await", {})
            else:
                self._stood_s += time.perf_counter() - began
        except BaseException:
            with contextlib.suppress(SamplerError):  # the first error is the one to report
                await self._update("abort", {})
            await self._end()
            raise

    async def finish(self) -> JsonObject:
        """Load the update. No engine resumes before all have loaded it: no token may be of weights
        that are reverted.

        Return the report of the slowest engine, and the seconds that engines were paused.
        """
        state = self._state
        calls = list(self._calls)
        began = time.perf_counter()
        for replica, _ in self._taken_by:
            replica.begin_update()
        try:
            pause = len(self._taken_by) > 1
            states = await self._request("finish", {}, pause=pause)
            slowest = max(states, key=lambda answer: answer["load_s"])
            state.served.append(slowest["policy_version"])
            state.kept_update = [*calls, ("finish", {})]
            for replica in self._taking:
                replica.hold(state.version)
            if pause:
                await self._resume()
        except BaseException:  # any exception: an interrupted engine may have either version
            await asyncio.shield(self._reconcile())
            raise
        finally:
            for replica in self._replicas:
                replica.end_update()
            await self._end()
            state.publish()
        return slowest | {"pause_s": self._stood_s + time.perf_counter() - began}

    async def _reconcile(self) -> None:
        """Recover after a load that failed somewhere: engines with the previous version resume,
        others are marked down.
        """
        for replica in self._taking:
            try:
                status = await replica.engine.status()
                if status["incomplete"] and self._state.transport != Transport.file:
                    # it cannot be restarted: it refuses requests until a good update repairs it
                    continue
                if status["policy_version"] != self._state.version or status["incomplete"]:
                    raise EngineUnavailable(
                        "it loaded a version that another engine could not load"
                    )
                await replica.engine.update("resume")
            except SamplerError as error:
                self._state.mark_down(replica, str(error))

    async def _resume(self) -> None:
        """Resume paused engines. One that cannot resume is marked down."""
        paused = self._taking
        asked = (one.wait_for(one.engine.update("resume")) for one in paused)
        for replica, answer in zip(
            paused, await asyncio.gather(*asked, return_exceptions=True), strict=True
        ):
            if isinstance(answer, BaseException):
                self._state.mark_down(replica, str(answer))

    async def _request(
        self, step: UpdateStep, by_format: dict[Format, JsonObject], **given: Any
    ) -> list[Any]:
        while True:
            try:
                answers = await self._update(step, by_format, **given)
            except NoServerLeft:
                self.require_group()
                await self._start_over()
            else:
                if step != "finish":  # an engine that has loaded it may serve it
                    self.require_group()
                self._calls.append((step, by_format))
                return answers

    async def _start_over(self) -> None:
        """Repeat the calls of the lost engines on the first one that comes back."""
        await self._until_one_is_up()
        self._taken_by = self._all_up()
        with contextlib.suppress(NoServerLeft):  # the caller tries again
            for step, by_format in self._calls:
                await self._update(step, by_format)

    async def _update(
        self, step: UpdateStep, by_format: dict[Format, JsonObject], **given: Any
    ) -> list[Any]:
        return await self._on(
            self._taking,
            lambda one: one.engine.update(
                step,
                **by_format.get(one.format, {}),
                **given,
            ),
        )

    async def _until_one_is_up(self) -> None:
        await self.until(lambda: any(replica.up for replica in self._replicas))

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait until a condition of the engines holds; raise after the timeout, or once no engine
        can recover.
        """
        state = self._state
        deadline = time.monotonic() + state.start_timeout_s
        while not happened():
            if time.monotonic() > deadline or all(replica.failed for replica in self._replicas):
                raise NoServerLeft(self._replicas, state.version, state.start_timeout_s)
            await asyncio.sleep(POLL_S)
