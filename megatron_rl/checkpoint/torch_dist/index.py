"""Reader of a torch_dist checkpoint's index: dtype, shape and place in the files of each tensor,
which of them hold a model's parameters, and how those misfit config.json. It is read as data, never
unpickled (pickled.py), and every number in it is held against the files. Torch-free.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.torch_dist.pickled import Items, Made, read_pickle
from megatron_rl.files import read_bounded, read_json
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import Param, stored_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Split
from megatron_rl.models.tensors import DTYPES
from megatron_rl.models.weight_files import BACKEND_FILE, FLOATS, INDEX_FILE, refuse_links_out, some

LARGEST_INDEX = 1 << 30
_ROOT = "embedding.word_embeddings.weight"
_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_METADATA = f"{_DCP}.metadata"
_INDEXES = (f"{_METADATA}.Metadata", f"{_MEGATRON}.MCoreMetadata")
_CLASSES = {
    _METADATA: "TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex "
    "StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    f"{_DCP}.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": " ".join(("Size", *DTYPES, "int16", "float8_e5m2")),
    "collections": "OrderedDict",
    "builtins": "set",
    _MEGATRON: "MCoreSavePlan",
}
# everything that an index written by torch or megatron-core refers to
_NAMES = {
    *_INDEXES,
    *(f"{module}.{name}" for module, names in _CLASSES.items() for name in names.split()),
}


# tensor and offset -> file, first byte, bytes
_Places = dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, or not what it claims to be."""


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, `size` long from `offset` on, and the bytes of a file that hold it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True)
class IndexedTensor:
    """A whole tensor, as the index describes it."""

    dtype: str  # as torch calls it
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_index(folder: Path) -> dict[str, IndexedTensor]:
    """Tensors of a checkpoint by key; raises CheckpointError with the defect."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a torch_dist checkpoint")
    if not (folder / BACKEND_FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {BACKEND_FILE}: not a torch_dist checkpoint, or one whose writing "
            "never finished"
        )
    try:
        refuse_links_out(folder, [BACKEND_FILE, INDEX_FILE])
        backend = read_json(folder / BACKEND_FILE).get("sharded_backend")
        if backend != "torch_dist":
            raise CheckpointError(
                f"{folder} holds a checkpoint of another kind; only torch_dist is read"
            )
        content = _content(folder / INDEX_FILE)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder / INDEX_FILE} is missing: the checkpoint is incomplete"
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(str(error)) from None
    try:
        places = _places(folder, content)
        described = dict(_state(content, "state_dict_metadata").named())
        tensor = f"{_METADATA}.TensorStorageMetadata"
        return {
            key: _kept(key, about, places) for key, about in described.items() if _is(about, tensor)
        }
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{folder / INDEX_FILE} is not an index to be read: {error}"
        ) from None


def _content(path: Path) -> Made:
    content = read_bounded(path, LARGEST_INDEX)
    try:
        found = read_pickle(content, _NAMES)
    except ValueError as error:
        raise ValueError(f"{path} is unreadable: {error}") from None
    if not any(_is(found, name) for name in _INDEXES):
        raise ValueError(f"{path} does not hold a checkpoint index")
    return found


def _places(folder: Path, content: Made) -> _Places:
    """The places of all parts: in files of the folder, and in these no further than they reach."""
    places: _Places = {}
    sizes: dict[str, int] = {}
    for key, info in _state(content, "storage_data"):
        name, offset = _fields(key, "fqn", "offset")
        file, begin, nbytes, transforms = _fields(
            info, "relative_path", "offset", "length", "transform_descriptors"
        )
        if not isinstance(name, str) or not isinstance(file, str) or transforms:
            raise ValueError("a place in it is none")
        if file not in sizes:
            refuse_links_out(folder, [file])
            sizes[file] = (folder / file).stat().st_size
        if not (_is_count(begin) and _is_count(nbytes)) or begin + nbytes > sizes[file]:
            raise ValueError(f"it places {name} beyond the {sizes[file]} bytes of {file}")
        place = name, () if offset is None else _numbers(offset)
        if place in places:
            raise ValueError(f"it places a part of {name} twice")
        places[place] = file, begin, nbytes
    return places


def _kept(key: str, about: Made, places: _Places) -> IndexedTensor:
    properties, size, chunks = _fields(about, "properties", "size", "chunks")
    whole = _numbers(size)
    dtype = _dtype(properties)
    item_bytes = DTYPES.get(dtype, ("", 1))[1]
    if not isinstance(chunks, list):
        raise ValueError(f"the parts of {key} are none")
    found = []
    for chunk in chunks:
        offset, length = map(_numbers, _fields(chunk, "offsets", "sizes"))
        inside = len(offset) == len(length) == len(whole)
        if not inside or any(o + n > w for o, n, w in zip(offset, length, whole, strict=True)):
            raise ValueError(f"a part of {key} lies outside of its shape {list(whole)}")
        if (key, offset) not in places:
            raise ValueError(f"it has no place for a part of {key}")
        file, begin, nbytes = places[key, offset]
        if math.prod(length) * item_bytes > nbytes:
            raise ValueError(f"a part of {key} is {dtype} {list(length)}, but has {nbytes} bytes")
        found.append(Chunk(offset, length, file, begin, nbytes))
    return IndexedTensor(dtype, whole, tuple(found))


def _dtype(properties: Any) -> str:
    try:
        return str(properties.state[0].name).removeprefix("torch.")
    except (LookupError, TypeError, AttributeError):
        raise ValueError("a tensor in it has no dtype") from None


def _state(content: Made, name: str) -> Items:
    (found,) = content.fields(name)
    if isinstance(found, Items):
        return found
    return Items()


def _fields(value: Any, *names: str) -> list[Any]:
    if not isinstance(value, Made):
        raise ValueError("it is damaged")
    return value.fields(*names)


def _numbers(value: Any) -> tuple[int, ...]:
    """The numbers that a torch.Size would be made from."""
    if _is(value, "torch.Size") and len(value.arguments) == 1:
        numbers = value.arguments[0]
    else:
        numbers = None
    if not isinstance(numbers, tuple) or not all(map(_is_count, numbers)):
        raise ValueError("a shape in it is none")
    return numbers


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Made) and value.name == name


@dataclass(frozen=True)
class Entry:
    """A parameter's place in a checkpoint: key, and index along the leading axes stacked there."""

    key: str
    axes: tuple[tuple[int, int], ...]  # (index, length) of each leading axis
    param: Param | None = None  # whose whole size the tensor has to have


def entries(param: Param, shape: ModelShape, stacked: bool) -> list[Entry]:
    """Places of a parameter in megatron-core's checkpoints by spelling; like layers `stacked`."""
    found: dict[str, Entry] = {}
    for spelling in param.row.megatron:
        key = spelling
        axes = []
        if param.layer is not None:
            place = f"layers.{param.layer}."
            if stacked:
                axes.append((param.layer, shape.layers))
                place = "layers."
            key = key.replace("layers.{L}.", place)
        if param.expert is not None:
            axes.append((param.expert, shape.experts))
            key = key.replace(".local_experts.{E}.", ".experts.")
            key = key.replace(
                "mlp.experts.linear_fc", "mlp.experts.experts.linear_fc"
            ).removesuffix("{E}")
        found[key] = Entry(key, tuple(axes), param)
    return list(found.values())


def prefix(tensors: Mapping[str, IndexedTensor]) -> str:
    """Prefix of every parameter name in the keys: a checkpoint may hold more than a policy."""
    return next((key.removesuffix(_ROOT) for key in tensors if key.endswith(_ROOT)), "")


def locate(
    tensors: Mapping[str, IndexedTensor], before: str, param: Param, shape: ModelShape
) -> Entry | None:
    """`before`: the prefix of its names."""
    both = (entry for stacked in (True, False) for entry in entries(param, shape, stacked))
    return next((entry for entry in both if before + entry.key in tensors), None)


def misfit(kept: IndexedTensor, entry: Entry, padded: bool) -> str | None:
    """Difference of a stored tensor from config.json. `padded`: the vocabulary may be padded."""
    if (param := entry.param) is None:
        return None
    axes = len(entry.axes)
    wanted = param.local_shape(Layout())
    stacked = kept.size[:axes]
    stored = kept.size[axes:]
    if stacked != tuple(length for _, length in entry.axes):
        return f"stacks {list(stacked)}, config.json says {[length for _, length in entry.axes]} (layers, experts)"
    longer = param.row.split is Split.vocab and stored[1:] == wanted[1:] and stored[0] > wanted[0]
    if stored != wanted and not (padded and longer):
        return f"has shape {list(stored)}, config.json and learner.lora say {list(wanted)}"
    return None


def weight_errors(folder: Path, shape: ModelShape) -> Iterator[str]:
    """Differences between a checkpoint's index and config.json."""
    try:
        tensors = read_index(folder)
    except CheckpointError as error:
        yield str(error)
        return
    before = prefix(tensors)
    missing = []
    wrong = {}
    others = {}
    for param in stored_params(shape):
        entry = locate(tensors, before, param, shape)
        if entry is None:
            missing.append(param.megatron)
            continue
        kept = tensors[before + entry.key]
        if problem := misfit(kept, entry, padded=True):
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
