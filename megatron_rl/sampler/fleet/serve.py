"""`megatron-rl serve`: one server for the fleet of a run elsewhere, in the foreground, until it is interrupted.

The run names it under `sampler.fleet.addresses`; both sides read the key from the environment
variable MEGATRON_RL_FLEET_KEY. The weights come from the run: until its first sync the server holds none.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.config.fleet import KEY_VARIABLE
from megatron_rl.config.schema import Config, Format
from megatron_rl.engine.server import ALL_CORES
from megatron_rl.sampler import model_folder
from megatron_rl.sampler.fleet.server_process import ServerPlan, ServerProcess


def serve(config: Config, format: Format, host: str, port: int) -> int:
    """Returns the server's exit status; 0 where it was asked to end."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise ConfigError(f"{KEY_VARIABLE} is not set in the environment; export the key that the run will use")
    own = replace(config, quantization=replace(config.quantization, format=format))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="megatron-rl-server-") as name:
        folder = model_folder.write_engine_folder(Path(config.model.path), Path(name) / "engine", own)
        plan = ServerPlan(
            arguments=model_folder.engine_arguments(own, folder),
            log_path=None,
            socket_dir=Path(name),
            cores=ALL_CORES,
            port=port,
            devices=config.sampler.devices,
            workers=config.sampler.tensor_parallel,
            host=host,
            hidden=KEY_VARIABLE,
        )
        server = ServerProcess(plan, key)
        try:
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            server.end()
