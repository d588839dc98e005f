"""`megatron-rl fetch`: downloads what a recipe names on the Hugging Face hub, such as on a login
node for a job whose nodes have no network.
"""

import argparse
from typing import Any

from megatron_rl.commands import command, recipe_arguments, recipe_file
from megatron_rl.config import ConfigError, load


def add(commands: Any) -> None:
    about = "download the model and the data that a recipe names on the Hugging Face hub"
    recipe_arguments(command(commands, "fetch", _fetch, about))


def _fetch(options: argparse.Namespace) -> int:
    from megatron_rl.data.hub_sets import named_in
    from megatron_rl.models.model import read_hf_config
    from megatron_rl.models.shape import ModelShape
    from megatron_rl.preflight import downloads, files
    from megatron_rl.preflight.checks import refuse

    recipe = recipe_file(options.recipe)
    config = downloads.with_small_files(load(recipe, options.overrides))
    config = downloads.with_data(config)
    data = named_in(config)
    for path, key in data.items():
        print(f"{path} ({key}): complete")
    named = downloads.references(config)
    if not named:
        if not data:
            print(f"{options.recipe}: names nothing on the hub")
        return 0
    # before gigabytes are downloaded
    try:
        shape = ModelShape.from_hf(read_hf_config(config.model.folder))
    except ValueError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from None
    downloads.fetch(downloads.outstanding(config), print)
    refuse(files.weights(config.model, shape))
    for one in named:
        print(f"{one.id} ({one.key}): complete")
    return 0
