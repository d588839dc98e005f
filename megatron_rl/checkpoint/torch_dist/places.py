"""Where a torch_dist checkpoint keeps a model's parameters, and whether they fit its config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.checkpoint.torch_dist.index import CheckpointError, Kept, read_index
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import Param, params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Split
from megatron_rl.models.tensors import DTYPES
from megatron_rl.models.weight_files import FLOATS, some

_ROOT = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Entry:
    """Where a checkpoint keeps one parameter: a key, and its index along the leading axes stacked there."""

    key: str
    axes: tuple[tuple[int, int], ...]  # (index, length) of each leading axis


def entries(param: Param, shape: ModelShape, stacked: bool) -> list[Entry]:
    """Where megatron-core keeps it, in each spelling of its name; layers that are alike are `stacked` in one key."""
    found: dict[str, Entry] = {}
    for spelling in param.row.megatron:
        key, axes = spelling, []
        if param.layer is not None:
            axes += [(param.layer, shape.layers)] if stacked else []
            key = key.replace("layers.{L}.", "layers." if stacked else f"layers.{param.layer}.")
        if param.expert is not None:
            axes.append((param.expert, shape.experts))
            key = key.replace(".local_experts.{E}.", ".experts.")
            key = key.replace("mlp.experts.linear_fc", "mlp.experts.experts.linear_fc").removesuffix("{E}")
        found[key] = Entry(key, tuple(axes))
    return list(found.values())


def prefix(tensors: Mapping[str, Kept]) -> str:
    """Before every name: a checkpoint may hold more than a policy."""
    return next((key.removesuffix(_ROOT) for key in tensors if key.endswith(_ROOT)), "")


def locate(tensors: Mapping[str, Kept], before: str, param: Param, shape: ModelShape) -> Entry | None:
    """`before`: the prefix of its names."""
    both = (entry for stacked in (True, False) for entry in entries(param, shape, stacked))
    return next((entry for entry in both if before + entry.key in tensors), None)


def misfit(kept: Kept, entry: Entry, param: Param) -> str | None:
    """How a stored parameter differs from what config.json promises; the vocabulary may be padded."""
    axes, wanted = len(entry.axes), param.local_shape(Layout())
    stacked, stored = kept.size[:axes], kept.size[axes:]
    if stacked != tuple(length for _, length in entry.axes):
        return f"stacks {list(stacked)}, config.json says {[length for _, length in entry.axes]} (layers, experts)"
    padded = param.row.split is Split.vocab and stored[1:] == wanted[1:] and stored[0] >= wanted[0]
    if stored != wanted and not padded:
        return f"has shape {stored}, config.json says {wanted}"
    return None


def misfits(folder: Path, shape: ModelShape) -> Iterator[str]:
    """How a checkpoint differs from what config.json promises, as far as its index says."""
    try:
        tensors = read_index(folder)
    except CheckpointError as error:
        yield str(error)
        return
    before, missing, wrong, others = prefix(tensors), [], {}, {}
    for param in params(shape):
        if param.row.copy:
            continue
        entry = locate(tensors, before, param, shape)
        if entry is None:
            missing.append(param.megatron)
            continue
        kept = tensors[before + entry.key]
        if problem := misfit(kept, entry, param):
            wrong[entry.key] = problem
        elif DTYPES.get(kept.dtype, ("?", 0))[0] not in FLOATS:
            others[entry.key] = kept.dtype
    if missing:
        yield f"{folder} lacks {some(missing)}; config.json promises {'it' if len(missing) == 1 else 'them'}"
    if wrong:
        yield f"{folder}: {some(list(wrong))}: {next(iter(wrong.values()))}"
    if others:
        first = next(iter(others.values()))
        yield f"{folder} holds {some(list(others))} as {first}, expected one of {', '.join(FLOATS)}"
