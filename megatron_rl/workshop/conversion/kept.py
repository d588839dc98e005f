"""What an imported checkpoint keeps of the Hugging Face folder that it came from, so that an export gives it back.

CHECKPOINT/hf/
  config.json, tokenizer, ...    as they were
  model.safetensors.index.json   where there was one
  headers/                       of each file of weights: which tensor lies where in it
  extras/                        tensors that no model needs: a Hugging Face folder of its own
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import KEPT
from megatron_rl.models.hf_folder import HfFolder, copy_companions, write_folder
from megatron_rl.models.weight_files import INDEX, LARGEST_HEADER, is_plain_name, refuse_links_out
from megatron_rl.workshop.conversion.to_folder import Beside
from megatron_rl.workshop.conversion.weights import Get, Weights, of_folder

HEADERS, EXTRAS = "headers", "extras"


def keep(folder: HfFolder, extras: Sequence[str], hf_config: Mapping[str, Any], checkpoint: Path) -> None:
    kept = checkpoint / KEPT
    copy_companions(folder.path, kept)
    if (folder.path / INDEX).is_file():
        shutil.copyfile(folder.path / INDEX, kept / INDEX)
    (kept / HEADERS).mkdir()
    for file, header in folder.headers.items():
        (kept / HEADERS / f"{file}.header").write_bytes(header)
    if extras:
        write_folder(kept / EXTRAS, {name: folder.read(name) for name in extras}, hf_config)


def beside(kept: Path) -> Beside:
    """ValueError for headers that are none, and for what leads elsewhere."""
    refuse_links_out(kept, [INDEX, EXTRAS])
    files = sorted((kept / HEADERS).glob("*.header"))
    refuse_links_out(kept, [f"{HEADERS}/{file.name}" for file in files])
    for file in files:
        if not is_plain_name(file.name.removesuffix(".header")) or file.stat().st_size > LARGEST_HEADER:
            raise ValueError(f"{file} is not the header of a file of weights; import the model again")
    headers = {file.name.removesuffix(".header"): file.read_bytes() for file in files}
    return Beside(kept, headers=headers, index=kept / INDEX if headers and (kept / INDEX).is_file() else None)


def with_extras(weights: Weights, kept: Path) -> Weights:
    """And the tensors that the checkpoint itself has no place for."""
    if not (kept / EXTRAS).is_dir():
        return weights
    folder = HfFolder(kept / EXTRAS)
    refuse_links_out(folder.path, folder.files)
    extras = of_folder(folder)
    both = extras.specs.keys() & weights.specs.keys()
    if both:
        raise ValueError(f"{folder.path} holds {min(both)}, which the checkpoint has itself; import the model again")

    def opened() -> Get:
        get = weights.open()
        return lambda name: folder.read(name) if name in extras.specs else get(name)

    return Weights({**weights.specs, **extras.specs}, opened)
