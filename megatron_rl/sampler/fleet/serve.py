"""`megatron-rl serve`: one server for the fleet of a run elsewhere, in the foreground, until it is interrupted.

The run names it under `sampler.fleet.addresses`; both sides read the key from the environment
variable MEGATRON_RL_FLEET_KEY. The weights come from the run: until its first sync the server holds none.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.config.fleet import KEY_VARIABLE, devices, is_fleet
from megatron_rl.config.schema import SamplerSection
from megatron_rl.sampler.engine_settings import EngineSettings, engine_arguments
from megatron_rl.sampler.fleet.server_process import ServerProcess, ServerSettings
from megatron_rl.sampler.model_folder import write_engine_folder
from megatron_rl.scratch import Scratch


def serve(settings: EngineSettings, hf_folder: Path, host: str, port: int) -> int:
    """Returns the server's exit status; 0 where it was asked to end."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ConfigError(f"{KEY_VARIABLE} is not set in the environment; export the key that the run will use")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Scratch() as scratch:
        scratch.enter()
        folder = write_engine_folder(hf_folder, scratch.path / "engine", settings.quantization)
        own = ServerSettings(
            arguments=engine_arguments(settings, folder),
            log_path=None,
            socket_dir=scratch.path,
            port=port,
            devices=own_devices(settings.sampler),
            workers=settings.sampler.tensor_parallel,
            host=host,
        )
        server = ServerProcess(own, key)
        try:
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            server.end()


def own_devices(sampler: SamplerSection) -> str | None:
    """The server's GPUs. A list in a fleet's recipe names those of the servers that the run itself starts."""
    if is_fleet(sampler) and isinstance(sampler.devices, list):
        return None
    return next(iter(devices(sampler)), None)
