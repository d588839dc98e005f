"""Arguments and checks of `megatron-rl serve`: an engine server for another run's fleet."""

import argparse
from typing import Any

from megatron_rl.commands import command, recipe_arguments, recipe_file
from megatron_rl.config import load
from megatron_rl.config.schema import Format


def add(commands: Any) -> None:
    about = "run one engine server for a run on another machine"
    serve = command(commands, "serve", _serve, about)
    recipe_arguments(serve)
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0: all interfaces (default: %(default)s)",
    )
    serve.add_argument(
        "--port", type=int, default=8000, help="port to listen on (default: %(default)s)"
    )
    serve.add_argument(
        "--format",
        choices=list(map(str, Format)),
        help="weight format (default: the recipe's quantization.format)",
    )


def _serve(options: argparse.Namespace) -> int:
    config = load(recipe_file(options.recipe), options.overrides)
    from megatron_rl.preflight.checks import check_served
    from megatron_rl.preflight.downloads import with_small_files
    from megatron_rl.preflight.machine import detect
    from megatron_rl.sampler.engine_settings import EngineSettings
    from megatron_rl.serve import serve

    detect(config.run.device)
    config = with_small_files(config)
    check_served(config.model)

    settings = EngineSettings.from_config(config).with_format(
        Format(options.format or config.quantization.format)
    )
    return serve(settings, config.model.folder, options.host, options.port)
