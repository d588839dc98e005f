"""A Hugging Face folder -> a torch_dist checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.checkpoint.torch_dist import reader as torch_dist
from megatron_rl.checkpoint.torch_dist.index import CheckpointError
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import DTYPES
from megatron_rl.models.weight_files import EMBEDDING, FLOATS, HARMLESS, INDEX, TIED_COPY, companions, refuse_links_out
from megatron_rl.workshop.conversion import kept
from megatron_rl.workshop.conversion.sources import Source
from megatron_rl.workshop.conversion.to_checkpoint import write_checkpoint
from megatron_rl.workshop.conversion.weights import Weights, digest


def import_folder(source: Source, target: Path, note: Callable[[str], None]) -> None:
    if not source.is_folder:
        raise ValueError(f"{source.path} is a checkpoint already; import takes a Hugging Face folder")
    weights, shape = source.plain, source.shape
    folder = HfFolder(source.path)
    refuse_links_out(folder.path, [*companions(folder.path), INDEX])
    extras = refuse_others(weights, shape, folder.path)
    write_checkpoint(
        weights,
        shape,
        target,
        command="import",
        job=source.job,
        inputs=[source.path],
        note=note,
        keep=lambda path: kept.keep(folder, extras, source.hf_config, path),
    )


def refuse_others(weights: Weights, shape: ModelShape, where: Path) -> list[str]:
    """Refuses tensors that are missing, unknown, or of another shape; returns harmless ones, to be kept as they are."""
    wanted = torch_dist.hf_shapes(shape)
    missing = sorted(wanted.keys() - weights.specs.keys())
    if missing:
        raise CheckpointError(f"{where} lacks {len(missing)} tensors, first {missing[0]}")
    for name, size in wanted.items():
        spec = weights.specs[name]
        if spec.shape != size:
            raise CheckpointError(f"{where}: {name} has shape {spec.shape}, config.json says {size}")
        if DTYPES[spec.dtype][0] not in FLOATS:
            raise CheckpointError(
                f"{where} holds {name} as {DTYPES[spec.dtype][0]}, expected one of {', '.join(FLOATS)}"
            )
    extras = []
    for name in sorted(weights.specs.keys() - wanted.keys()):
        if name.endswith(HARMLESS):
            extras.append(name)
        elif name == TIED_COPY and shape.tied:
            get = weights.open()
            if digest(get(name)) != digest(get(EMBEDDING)):
                raise CheckpointError(
                    f"{where}: config.json ties the embeddings, but {TIED_COPY} differs from {EMBEDDING}"
                )
        else:
            raise CheckpointError(f"{where} holds {name}, which a {shape.family} model does not have")
    return extras
