"""The servers of a fleet together: opened, watched, asked, shut. Lives on the fleet's event loop."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.config.fleet import KEY_VARIABLE, max_sequences
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.fleet.dispatch import Dispatcher, Done, Job
from megatron_rl.sampler.fleet.replica import Replica, Swap
from megatron_rl.sampler.fleet.server_process import ServerSettings
from megatron_rl.sampler.fleet.supervisor import FleetState, Supervisor
from megatron_rl.sampler.fleet.update import FleetUpdates
from megatron_rl.types import SamplingParams

KEY_BYTES = 32
SHUT_S = 5.0


class Servers:
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
        """All of them: a server that is missing from the beginning is a mistake, not an accident."""
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
        """And how often servers have been restarted so far."""
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
                    "ready": one.ready and await one.is_healthy(),
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
        """Once nobody watches them any more; not on the event loop, as each may take seconds."""
        for replica in self.replicas:
            if replica.process is not None:
                replica.process.end()
                replica.process = None
