"""All engines of a sampler: starts and ends the run's own, connects to given ones, each under a
supervisor; opens dispatchers, reports health, reads modules' outputs.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.fleet import KEY_VARIABLE, devices, max_sequences, uses_servers
from megatron_rl.processes.process import share_of_cores
from megatron_rl.processes.threads import cancel_all
from megatron_rl.sampler.client.engine_client import EngineClient
from megatron_rl.sampler.client.engine_process import ProcessSettings
from megatron_rl.sampler.client.interface import EngineUnavailable, Kind
from megatron_rl.sampler.client.lines import PortLine
from megatron_rl.sampler.dispatch import Dispatcher, Meter
from megatron_rl.sampler.engine_settings import (
    EngineSettings,
    engine_arguments,
    write_engine_folder,
)
from megatron_rl.sampler.replica import Replica
from megatron_rl.sampler.supervisor import SamplerState, Supervisor
from megatron_rl.sampler.update import Updates

NOT_RUNNING = "the sampler is not running: it was never started, was closed, or failed before"
SHUT_S = 5.0  # for pending supervisor tasks


class Replicas:
    """Engines of a sampler. Used from the sampler's event loop only, except `end_processes`."""

    def __init__(self, settings: EngineSettings, vocabulary: int) -> None:
        self._settings = settings
        self._state = SamplerState(
            start_timeout_s=settings.sampler.start_timeout_s,
            request_timeout_s=settings.sampler.request_timeout_s,
            max_tokens=settings.max_tokens,
            vocabulary=vocabulary,
            transport=settings.transport,
        )
        self.all: list[Replica] = []
        self.updates = Updates(self.all, self._state)
        self._supervisors: list[Supervisor] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def restarted(self) -> int:
        return self._state.restarted

    async def open(
        self, hf_folder: Path, folder: Path, log_dir: Path, worker_extension: str
    ) -> None:
        """Start the run's own engines, and supervise all engines from now on."""
        settings = self._settings
        sampler = settings.sampler
        starts: Sequence[ProcessSettings | None] = [None] * sampler.engines
        addresses = [""] * sampler.engines
        if uses_servers(sampler):
            addresses = [address.rstrip("/") for address in sampler.addresses]
        else:
            starts = process_settings(settings, hf_folder, folder, log_dir, worker_extension)
        key = os.environ.get(KEY_VARIABLE, "")
        for index, (start, address) in enumerate(zip(starts, addresses, strict=True)):
            format = settings.formats[index]
            name = name_of(index, settings, address)
            # reconnects to each new process
            engine = EngineClient(
                name, PortLine(address, key), self._state.request_timeout_s, self._state.vocabulary
            )
            self.all.append(Replica(name, format, engine, index * settings.sampler.tensor_parallel))
            self._supervisors.append(Supervisor(self.all[-1], start, self._state, address, key))
        for supervisor in self._supervisors:
            supervisor.start_process()
        self._tasks = [asyncio.create_task(supervisor.run()) for supervisor in self._supervisors]

    async def first_starts(self) -> None:
        """Wait for all engines: an engine that is missing at the start is a mistake, not a failure
        to recover from.
        """
        await asyncio.gather(*(supervisor.first_start for supervisor in self._supervisors))

    async def dispatcher(self, meter: Meter, patient: bool) -> Dispatcher:
        state = self._state
        dispatcher = Dispatcher(
            self.all,
            served=state.served,
            max_sequences=max_sequences(self._settings.sampler),
            patience_s=state.start_timeout_s,
            on_gone=state.mark_down,
            meter=meter,
            patient=patient,
        )
        state.dispatchers.append(dispatcher)
        return dispatcher

    async def give_up(self, dispatcher: Dispatcher) -> None:
        if dispatcher in self._state.dispatchers:
            self._state.dispatchers.remove(dispatcher)
        await dispatcher.close()

    async def values(self, kind: Kind, sequences: list[list[int]]) -> list[Any]:
        while True:
            await self.updates.until(lambda: any(one.ready for one in self.all))
            first = next(one for one in self.all if one.ready)
            try:
                return await first.wait_for(
                    first.engine.values(kind, sequences, self._state.version)
                )
            except EngineUnavailable as error:
                self._state.mark_down(first, str(error))

    async def health(self) -> dict[str, Any]:
        """Return the state of each engine, and the status of the first unhealthy one."""
        while True:
            await self.updates.until(
                lambda: any(one.ready or (one.up and self.updates.holds) for one in self.all)
            )
            engines = [await self._about(one) for one in self.all]
            if up := [one for one in engines if "incomplete" in one]:
                return {
                    **next((one for one in up if one["incomplete"] or one["refusal"]), up[0]),
                    "engines": engines,
                }

    async def _about(self, one: Replica) -> dict[str, Any]:
        status: Any = {}
        if one.up:
            try:
                status = await one.wait_for(one.engine.status())
            except EngineUnavailable as error:
                self._state.mark_down(one, str(error))
        return {
            **status,
            "name": one.name,
            "ready": one.ready and (await one.look()).alive,
            "reason": one.reason,
            "pid": one.process.pid if one.process else None,
        }

    async def shut(self) -> None:
        """Stop supervision and close the connections. The processes are ended afterwards."""
        for dispatcher in self._state.dispatchers:
            await dispatcher.close(NOT_RUNNING)
        await cancel_all(self._tasks, SHUT_S)
        for supervisor in self._supervisors:
            supervisor.first_start.cancel()
            await supervisor.close(shut=True)

    def end_processes(self) -> None:
        """End the engines after supervision has stopped; not on the event loop, as each may take
        seconds.
        """
        for replica in self.all:
            if replica.process is not None:
                replica.process.end()
                replica.process = None


def name_of(index: int, settings: EngineSettings, address: str) -> str:
    """Return an engine's name for messages."""
    if address:
        return f"server {index} ({settings.formats[index]}, {address})"
    if len(set(settings.formats)) > 1:
        return f"engine {index} ({settings.formats[index]})"
    if settings.sampler.engines > 1:
        return f"engine {index}"
    return "engine"


def process_settings(
    settings: EngineSettings, hf_folder: Path, folder: Path, log_dir: Path, worker_extension: str
) -> list[ProcessSettings]:
    """Return the settings of each engine that the run starts."""
    gpus = devices(settings.sampler)
    started = []
    for index, format in enumerate(settings.formats):
        own = settings.with_format(format)
        engine_folder = write_engine_folder(hf_folder, folder / format.value, own.quantization)
        name = f"sampler-{index + 1}.log" if index else "sampler.log"
        started.append(
            ProcessSettings(
                arguments=engine_arguments(own, engine_folder, worker_extension),
                log_path=log_dir / name,
                workers=settings.sampler.tensor_parallel,
                devices=gpus[index] if gpus else None,
                cores=share_of_cores(index, len(settings.formats)),
            )
        )
    return started
