"""Megatron's torch_dist checkpoints through the mapping table: weights in, weights out.

Writing goes through megatron-core's own `dist_checkpointing.save`, so any learner layout can load the result.
Reading needs neither megatron nor a process group: tensors come one at a time, in pieces of any shape. The
checkpoint's index is a pickle; it is decoded by an unpickler that knows only the index's own classes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.files import read_json
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import Param, params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import assemble, cut
from megatron_rl.models.table import Split
from megatron_rl.models.tensors import TensorSpec, dtype_name
from megatron_rl.models.weight_files import BACKEND_FILE, INDEX_FILE, refuse_links_out

# everything that an index written by torch or megatron-core refers to
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {
        "Size", "bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool",
        "float8_e4m3fn", "float8_e5m2",
    },
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}  # fmt: skip


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, incomplete, or not what it claims to be."""


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


def save(folder: Path, shape: ModelShape, get_hf: Callable[[str], torch.Tensor]) -> None:
    """Write the model as a torch_dist checkpoint into an empty folder. Call it under a `__main__` guard.

    Where there is no CUDA, `learner.host.install` comes before.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing import save as megatron_save

    state: dict[str, Any] = {}
    for param in _own(shape):
        whole = [get_hf(name) for name in param.hf]
        if len({tensor.dtype for tensor in whole}) > 1:
            raise CheckpointError(f"{', '.join(param.hf)} have different dtypes but share one megatron parameter")
        local = assemble(param, shape, Layout(), Place(), whole)
        # in every spelling: Transformer Engine fuses some norms into the linear layer that follows
        for entry in entries(param, shape, stacked=not shape.dense_layers):
            state[f"{entry.key} {entry.axes}"] = ShardedTensor.from_rank_offsets(
                entry.key,
                local,
                *((axis, index, length) for axis, (index, length) in enumerate(entry.axes)),
                prepend_axis_num=len(entry.axes),
                allow_shape_mismatch=param.row.split is Split.vocab,
            )
    with _alone():
        megatron_save(state, str(folder))


class Reader:
    """Tensors of a torch_dist checkpoint by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; give a torch_dist checkpoint")
        if not (folder / BACKEND_FILE).is_file():
            raise CheckpointError(
                f"{folder} has no {BACKEND_FILE}: not a torch_dist checkpoint, or one whose writing never finished"
            )
        try:
            backend = read_json(folder / BACKEND_FILE).get("sharded_backend")
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        if backend != "torch_dist":
            raise CheckpointError(f"{folder} holds a checkpoint of the kind {backend!r}; only torch_dist is read")
        self._metadata = read_index(folder / INDEX_FILE)
        _check_places(folder, self._metadata)
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._tensors = {
            key: value
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        root = "embedding.word_embeddings.weight"
        self._prefix = next((key.removesuffix(root) for key in self._tensors if key.endswith(root)), "")

    def find(self, param: Param, shape: ModelShape) -> Entry:
        for stacked in (True, False):
            for entry in entries(param, shape, stacked):
                if self._prefix + entry.key in self._tensors:
                    return entry
        raise CheckpointError(f"{self.folder} lacks the parameter {param.megatron} ({param.hf[0]})")

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._tensors[self._prefix + entry.key].properties.dtype

    def parameter(self, param: Param, shape: ModelShape) -> list[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) for each tensor behind one parameter."""
        entry = self.find(param, shape)
        wanted = param.local_shape(Layout())
        stored = tuple(self._tensors[self._prefix + entry.key].size)[len(entry.axes) :]
        padded = param.row.split is Split.vocab and stored[0] >= wanted[0]
        if stored[1:] != wanted[1:] or (stored[0] != wanted[0] and not padded):
            raise CheckpointError(f"{entry.key} of {self.folder} has shape {stored}, config.json says {wanted}")
        local = self.read(entry, (0,) * len(wanted), wanted)
        slices = param.slices(shape, Layout(), Place())
        return [(piece.name, part.contiguous()) for piece, part in cut(param, local, slices)]

    def read(self, entry: Entry, offset: tuple[int, ...], size: tuple[int, ...], kind: str = "") -> torch.Tensor:
        """A block of one parameter, or of what an optimizer keeps of it: `kind` is then optimizer.state.exp_avg."""
        key = self._key(entry, kind)
        if key not in self._tensors:
            raise CheckpointError(f"{self.folder} lacks {key}")
        target = torch.empty((*(1 for _ in entry.axes), *size), dtype=self._tensors[key].properties.dtype)
        offsets = torch.Size((*(index for index, _ in entry.axes), *offset))
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=target.size())
        items = create_read_items_for_chunk_list(key, self._tensors[key], [chunk])
        covered = sum(torch.Size(item.lengths).numel() for item in items)
        if covered != target.numel():
            raise CheckpointError(f"{key} of {self.folder} is incomplete: {covered} of {target.numel()} values")
        try:
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{key} of {self.folder} cannot be read: {error}") from error
        return target.view(size)

    def _key(self, entry: Entry, kind: str = "") -> str:
        return f"{kind}{self._prefix}{entry.key}"


def _check_places(folder: Path, metadata: Metadata) -> None:
    """The index names files of its own folder, and no links to others."""
    try:
        files = {str(place.relative_path) for place in (metadata.storage_data or {}).values()}
        elsewhere = [file for file in files if Path(file).name != file]
        if elsewhere:
            raise ValueError(f"it names {elsewhere[0]!r}, which is no file of its folder")
        refuse_links_out(folder, files)
    except (AttributeError, ValueError) as error:
        raise CheckpointError(f"{folder / INDEX_FILE} is not an index to be read: {error}") from None


class _Into(LoadPlanner):
    """Reads land in one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError("only tensors are read from a checkpoint")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise CheckpointError(f"the checkpoint's index refers to {module}.{name}, which no index needs: not loaded")
        return super().find_class(module, name)


def read_index(path: Path) -> Metadata:
    try:
        metadata = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    # what a damaged pickle can raise, according to the documentation of `pickle`
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{path} is unreadable: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} does not hold a checkpoint index")
    return metadata


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process only, for the time of a save, unless there is one already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model, in the order of `tensors`."""
    return {name: size for p in _own(shape) for name, size in zip(p.hf, p.shapes, strict=True)}


def specs(reader: Reader, shape: ModelShape) -> list[TensorSpec]:
    """The same, each with the dtype that the checkpoint holds it in."""
    found = []
    for param in _own(shape):
        dtype = dtype_name(reader.dtype(reader.find(param, shape)))
        found += [TensorSpec(name, dtype, size) for name, size in zip(param.hf, param.shapes, strict=True)]
    return found


def tensors(reader: Reader, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    for param in _own(shape):
        yield from reader.parameter(param, shape)


def getter(reader: Reader, shape: ModelShape) -> Callable[[str], torch.Tensor]:
    """`get_hf` over a checkpoint. The tensors of a parameter are read at once, and kept until the next one's are."""
    behind = {name: param for param in _own(shape) for name in param.hf}
    kept: dict[str, torch.Tensor] = {}

    def get(name: str) -> torch.Tensor:
        if name not in kept:
            kept.clear()
            kept.update(reader.parameter(behind[name], shape))
        return kept[name]

    return get


def _own(shape: ModelShape) -> Iterator[Param]:
    return (param for param in params(shape) if not param.row.copy)
