"""Weight update of all engines: begun, verified and loaded together, or by none; also sleeps,
wakes, asks all.

An update has three parts: every engine begins it, then every engine verifies it, then every engine
loads it. If one refuses it while verifying, none loads it. An engine that dies in any part is taken
out; its supervisor brings it back with the version that is served by then. Where none is left, the
first one that comes back is told what the others had been told, and the update goes on. Engines
answer in the first two parts, and stop between two steps for the third.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_rl.config.schema import Format, Transport
from megatron_rl.sampler.client.interface import Engine, EngineGone, Part, SamplerError, UpdateStep
from megatron_rl.sampler.replica import NoServerLeft, Replica
from megatron_rl.sampler.supervisor import SamplerState, Told
from megatron_rl.weight_sync.file_transport import BACKGROUND

POLL_S = 0.1


class Updates:
    """Used from the sampler's event loop only."""

    def __init__(self, replicas: Sequence[Replica], state: SamplerState) -> None:
        self._replicas = replicas
        self._state = state
        self.holds = False  # state.updating, which keeps re-syncs away
        self._releases = False  # at the end of the update: nobody holds it for longer
        # a replica that has another engine by now takes it no more
        self._taken_by: list[tuple[Replica, Engine]] = []
        self._told: list[Told] = []
        self._stood_s = 0.0  # what engines have stood still for this update so far

    async def on_all(self, ask: Callable[[Replica], Awaitable[Any]]) -> list[Any]:
        """Ask every engine that is up, all at once. One that is gone is taken out; with none left,
        who comes back.
        """
        while True:
            await self._until_one_is_up()
            with contextlib.suppress(NoServerLeft):
                return await self._on([replica for replica in self._replicas if replica.up], ask)

    async def sleep(self, level: int) -> None:
        """Engines that are being started, or told of the present version, come first: the learner
        wants their room.
        """
        if not self.holds:
            with contextlib.suppress(NoServerLeft):
                await self.until(
                    lambda: all(one.ready or one.process is None for one in self._replicas)
                )
        await self.on_all(lambda one: one.engine.sleep(level))
        self._state.asleep = True

    async def wake(self, parts: Sequence[Part] | None) -> None:
        # the learner has made room, also for an engine that has to start again
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
            # another may have taken its place
            if isinstance(answer, EngineGone) and replica.engine is engine:
                state.mark_down(replica, str(answer))
        refused = [answer for answer in answers if isinstance(answer, BaseException)]
        serious = [answer for answer in refused if not isinstance(answer, EngineGone)]
        if serious:
            raise serious[0]
        if len(refused) == len(answers):
            raise NoServerLeft(self._replicas, state.version, state.start_timeout_s)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    @property
    def _taking(self) -> list[Replica]:
        """Engines that take the update."""
        return [
            replica for replica, engine in self._taken_by if replica.up and replica.engine is engine
        ]

    def _all_up(self) -> list[tuple[Replica, Engine]]:
        return [(replica, replica.engine) for replica in self._replicas if replica.up]

    async def hold(self) -> None:
        """Keep engines that come back from being told of the present version: its files may
        be written over.
        """
        if self.holds:
            return
        state = self._state
        try:
            await asyncio.wait_for(state.updating.acquire(), state.start_timeout_s)
        except TimeoutError:
            raise SamplerError(
                "a weight update could not begin within "
                f"sampler.start_timeout_s={state.start_timeout_s:g}: "
                f"{', '.join(one.name for one in self._replicas if not one.ready and not one.given_up)} "
                "is still receiving the version before. Read its log; raise "
                "sampler.start_timeout_s where it was only slow"
            ) from None
        self.holds = True

    async def release(self) -> None:
        if self.holds:
            self.holds = False
            self._state.updating.release()

    async def init(self, info: dict[str, Any]) -> None:
        self._state.init_info = info  # also of engines that come later
        self.require_group()
        await self.on_all(lambda one: one.engine.update("init", **self._state.init_of(one)))

    def require_group(self) -> None:
        """Raise where NCCL would wait for good for an engine that is gone."""
        lost = [one for one in self._replicas if not one.up]
        if lost and self._state.transport == Transport.nccl:
            raise SamplerError(
                f"{lost[0].name} is lost, and with sync.transport=nccl nothing reaches the others "
                "without it: the run ends here, and goes on from its last checkpoint (by itself "
                f"with --attempts). What became of it: {lost[0].reason}"
            )

    async def begin(self) -> None:
        self.require_group()
        self._releases = not self.holds
        await self.hold()
        self._taken_by = self._all_up()
        self._told = []
        self._stood_s = 0.0
        try:
            await self._tell("start", {})
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> None:
        if self._releases:
            await self.release()

    async def stage(self, updates: dict[Format, dict[str, Any]]) -> None:
        """Engines go on answering while they verify, where the update says so; nothing
        is loaded yet.
        """
        began = time.perf_counter()
        try:
            await self._tell(
                "stage", {format: {"update_info": info} for format, info in updates.items()}
            )
            if all(info.get(BACKGROUND) for info in updates.values()):
                await self._tell("await", {})
            else:
                self._stood_s += time.perf_counter() - began
        except BaseException:
            with contextlib.suppress(SamplerError):  # the first error is the one to report
                await self._update("abort", {})
            await self._end()
            raise

    async def finish(self) -> dict[str, Any]:
        """Load the update. No engine goes on before every one has: no token is of weights that
        are taken back.

        With what the slowest engine says of it, and for how long engines stood still.
        """
        state = self._state
        told = list(self._told)
        began = time.perf_counter()
        for replica, _ in self._taken_by:
            replica.begin_update()
        try:
            stand = len(self._taken_by) > 1
            states = await self._tell("finish", {}, stand=stand)
            slowest = max(states, key=lambda answer: answer["load_s"])
            state.served.append(slowest["policy_version"])
            state.kept_update = [*told, ("finish", {})]
            for replica in self._taking:
                replica.hold(state.version)
            if stand:
                await self._resume()
        except BaseException:  # of every kind: one that was interrupted may have either version
            await asyncio.shield(self._reconcile())
            raise
        finally:
            for replica in self._replicas:
                replica.end_update()
            await self._end()
            state.tell()
        return slowest | {"pause_s": self._stood_s + time.perf_counter() - began}

    async def _reconcile(self) -> None:
        """After a load that failed somewhere: engines that have the version before go on, others
        are taken out.
        """
        for replica in self._taking:
            try:
                status = await replica.engine.status()
                if status["torn"] and self._state.transport != Transport.file:
                    # it cannot be started again: it refuses whatever is asked, until a good update
                    # repairs it
                    continue
                if status["policy_version"] != self._state.version or status["torn"]:
                    raise EngineGone("it loaded a version that another engine could not load")
                await replica.engine.update("resume")
            except SamplerError as error:
                self._state.mark_down(replica, str(error))

    async def _resume(self) -> None:
        """Let engines that stand still go on. One that cannot go on is taken out."""
        standing = self._taking
        asked = (one.wait_for(one.engine.update("resume")) for one in standing)
        for replica, answer in zip(
            standing, await asyncio.gather(*asked, return_exceptions=True), strict=True
        ):
            if isinstance(answer, BaseException):
                self._state.mark_down(replica, str(answer))

    async def _tell(
        self, step: UpdateStep, by_format: dict[Format, dict[str, Any]], **given: Any
    ) -> list[Any]:
        while True:
            try:
                answers = await self._update(step, by_format, **given)
            except NoServerLeft:
                self.require_group()
                await self._start_over()
            else:
                if step != "finish":  # who has loaded it may serve it
                    self.require_group()
                self._told.append((step, by_format))
                return answers

    async def _start_over(self) -> None:
        """Tell the first engine that comes back what those had been told that are gone."""
        await self._until_one_is_up()
        self._taken_by = self._all_up()
        with contextlib.suppress(NoServerLeft):  # whoever called tries again
            for step, by_format in self._told:
                await self._update(step, by_format)

    async def _update(
        self, step: UpdateStep, by_format: dict[Format, dict[str, Any]], **given: Any
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
        """Wait for something that becomes of engines; raise where it does not in time, or
        cannot any more.
        """
        state = self._state
        deadline = time.monotonic() + state.start_timeout_s
        while not happened():
            if time.monotonic() > deadline or all(replica.given_up for replica in self._replicas):
                raise NoServerLeft(self._replicas, state.version, state.start_timeout_s)
            await asyncio.sleep(POLL_S)
