"""Work of `megatron-rl serve`: runs a vLLM engine server for a run elsewhere, until interrupted.

The run names it under `sampler.addresses`; both sides have the key in the environment:
MEGATRON_RL_FLEET_KEY. The weights come with the run's first sync: it holds none before. It ends
with the process that started it, unless under nohup.
"""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.config.fleet import KEY_VARIABLE, devices
from megatron_rl.config.schema import SamplerSection
from megatron_rl.processes.scratch import Scratch
from megatron_rl.sampler.client.engine_client import EngineClient
from megatron_rl.sampler.client.engine_process import EngineProcess, ProcessSettings
from megatron_rl.sampler.client.interface import EngineUnavailable, SamplerError
from megatron_rl.sampler.client.lines import SocketLine
from megatron_rl.sampler.engine_settings import (
    EngineSettings,
    engine_arguments,
    write_engine_folder,
)

POLL_S = 1.0
FOREVER_S = 1e9  # no start timeout: the process that started the server ends it


def serve(settings: EngineSettings, hf_folder: Path, host: str, port: int) -> int:
    """Run the server and return its exit status; 0 after a request to end."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ConfigError(
            f"{KEY_VARIABLE} is not set in the environment; export the key that the run will use"
        )
    _check_place(host, port)
    # under nohup the server outlives its starter
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        starter = None
    else:
        starter = os.getppid()
    for number in (signal.SIGTERM, signal.SIGHUP) if starter else (signal.SIGTERM,):
        signal.signal(number, signal.default_int_handler)
    with Scratch() as scratch:
        scratch.enter()
        folder = write_engine_folder(hf_folder, scratch.path / "engine", settings.quantization)
        own = ProcessSettings(
            arguments=engine_arguments(settings, folder),
            log_path=None,
            workers=settings.sampler.tensor_parallel,
            devices=own_devices(settings.sampler),
            listens=True,
            host=host,
            port=port,
        )
        server = EngineProcess(own, key)
        try:
            return asyncio.run(
                _until_ended(server, starter, f"{hf_folder} in {settings.quantization.format}")
            )
        except KeyboardInterrupt:
            return 0
        finally:
            server.end()


def _check_place(host: str, port: int) -> None:
    place = f"--host {host} --port {port}"
    if not 0 < port < 1 << 16:
        raise ConfigError(f"{place}: a port is a number from 1 to 65535")
    try:
        with socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ):
            pass
    except OSError as error:
        raise ConfigError(
            f"{place}: cannot listen there ({error.strerror or error}); choose another"
        ) from None


async def _until_ended(server: EngineProcess, starter: int | None, what: str) -> int:
    """The server's exit status; 0 once the process that started this one has terminated."""
    engine = EngineClient("the server", SocketLine(server.line), FOREVER_S, 1)
    await engine.open()
    starting = asyncio.ensure_future(engine.start(server.settings.arguments, FOREVER_S))
    ready = False
    try:
        while (code := await asyncio.to_thread(server.wait, POLL_S)) is None:
            if starter is not None and os.getppid() != starter:
                return 0
            if not ready and starting.done():
                ready = True
                try:
                    starting.result()
                except EngineUnavailable:
                    continue  # its exit status follows
                except SamplerError as error:
                    print(error, file=sys.stderr)
                    continue
                server.note_shared_memory()
                print(
                    f"ready: {server.address} serves {what} to the run that names it under", end=" "
                )
                print("sampler.addresses", flush=True)
    finally:
        starting.cancel()
        await engine.close()
    print(f"the server ended (exit status {code}); its last lines say why", file=sys.stderr)
    return code


def own_devices(sampler: SamplerSection) -> str | None:
    """The server's GPUs; None where `sampler.devices` names those of several engines of the run."""
    named = devices(sampler)
    if len(named) == 1:
        return named[0]
    return None
