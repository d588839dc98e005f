"""The servers of a fleet together: opened, watched, asked, shut; and the event loop that all of that happens on."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, wait
from typing import Any, TypeVar

from megatron_rl.config.fleet import KEY_VARIABLE, max_sequences
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.fleet.dispatch import Dispatcher, Done, Job
from megatron_rl.sampler.fleet.replica import Replica, Swap
from megatron_rl.sampler.fleet.server_process import ServerSettings
from megatron_rl.sampler.fleet.supervisor import FleetState, Supervisor
from megatron_rl.sampler.fleet.update import FleetUpdates
from megatron_rl.types import SamplingParams

T = TypeVar("T")

KEY_BYTES = 32
SHUT_S = 5.0  # for what still runs on the loop
MEANWHILE_S = 1.0


class EventLoopThread:
    """An asyncio event loop in a thread of its own, for callers that are not asynchronous themselves."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Run to the end and return the result; an interrupt of the caller cancels it.

        `meanwhile` is called in the caller's thread every now and then, for what cannot wait for a long call's end.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not wait([future], MEANWHILE_S).done:
                meanwhile()
            return future.result()
        except CancelledError:
            raise RuntimeError("the event loop was stopped meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs, then end the thread; safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(SHUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SHUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=SHUT_S / 2) if others else None


class Servers:
    """Used from the fleet's event loop only, but for `end_processes`."""

    def __init__(self, settings: EngineSettings, vocabulary: int, note: Callable[[str], None]) -> None:
        self._sampler, self._formats, self._vocabulary = settings.sampler, settings.formats, vocabulary
        self._state = FleetState(
            start_timeout_s=settings.sampler.start_timeout_s,
            max_tokens=settings.max_tokens,
            note=note,
            swap=Swap(settings.in_flight, settings.in_flight_cache),
        )
        self.replicas: list[Replica] = []
        self.updates = FleetUpdates(self.replicas, self._state)
        self._supervisors: list[Supervisor] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, started: Sequence[ServerSettings]) -> None:
        """Start the run's own servers, and look after them and the given ones from here on."""
        fleet = self._sampler.fleet
        own_key, given_key = secrets.token_urlsafe(KEY_BYTES), os.environ.get(KEY_VARIABLE, "")
        servers: list[tuple[ServerSettings | None, str, str]] = [(one, "", own_key) for one in started]
        servers += [(None, address.rstrip("/"), given_key) for address in fleet.addresses]
        for index, ((own, address, key), format) in enumerate(zip(servers, self._formats, strict=True)):
            name = f"server {index} ({format.value}{f', {address}' if address else ''})"
            replica = Replica(name, format, address, key, self._sampler.request_timeout_s, vocabulary=self._vocabulary)
            self.replicas.append(replica)
            self._supervisors.append(Supervisor(replica, own, self._state))
        for supervisor in self._supervisors:
            supervisor.start_process()
        self._tasks = [asyncio.create_task(supervisor.run()) for supervisor in self._supervisors]

    async def first_starts(self) -> None:
        """Wait for all servers: one that is missing from the beginning is a mistake, not an accident."""
        await asyncio.gather(*(supervisor.first_start for supervisor in self._supervisors))

    async def dispatcher(self, params: SamplingParams) -> Dispatcher:
        state = self._state
        dispatcher = Dispatcher(
            self.replicas,
            params,
            served=state.served,
            max_sequences=max_sequences(self._sampler),
            patience_s=state.start_timeout_s,
            on_gone=state.take_out,
        )
        state.dispatchers.append(dispatcher)
        return dispatcher

    async def add(self, dispatcher: Dispatcher, jobs: Sequence[Job]) -> None:
        dispatcher.add(jobs)

    async def finished(self, dispatcher: Dispatcher) -> tuple[list[Done], int]:
        """The jobs that are complete by now, and how often servers have been restarted so far."""
        return await dispatcher.finished(), self._state.restarted

    async def give_up(self, dispatcher: Dispatcher) -> None:
        if dispatcher in self._state.dispatchers:
            self._state.dispatchers.remove(dispatcher)
        await dispatcher.close()

    async def health(self) -> dict[str, Any]:
        return {
            "policy_version": self._state.version,
            "torn": False,
            "replicas": [
                {
                    "name": one.name,
                    "ready": one.ready and (await one.look()).alive,
                    "policy_version": one.version,
                    "reason": one.given_up or one.reason,
                    "pid": one.process.pid if one.process else None,
                }
                for one in self.replicas
            ],
        }

    async def shut(self) -> None:
        """Stop watching, and hang up. The servers themselves are ended afterwards."""
        for dispatcher in self._state.dispatchers:
            await dispatcher.close("the sampler was closed while prompts were being answered")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SHUT_S)
        for supervisor in self._supervisors:
            supervisor.first_start.cancel()
            await supervisor.replica.close()

    def end_processes(self) -> None:
        """End the servers, once nobody watches them any more; not on the event loop, as each may take seconds."""
        for replica in self.replicas:
            if replica.process is not None:
                replica.process.end()
                replica.process = None
