"""Headers of a folder's safetensors files: which hold its weights, where each tensor lies, how they
misfit config.json; other files that a copy of the folder takes; torch_dist checkpoints.

A folder may come from anywhere: names must stay inside of it, headers be small. Torch-free.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.files import open_regular, read_json
from megatron_rl.models.mapping import stored_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import DTYPES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PARITY = "parity.json"  # of the folder that it lies in, and of no copy: what was proven of it
# of a torch_dist checkpoint
BACKEND_FILE = "metadata.json"
INDEX_FILE = ".metadata"
LARGEST_HEADER = 32 << 20  # some 200,000 tensors

EMBEDDING = "model.embed_tokens.weight"
TIED_COPY = "lm_head.weight"
HARMLESS = ".rotary_emb.inv_freq"  # of old Llama models: nothing reads it
FLOATS = ("F64", "F32", "BF16", "F16")  # what a policy's weights may be held in
_ITEM_BYTES = dict(DTYPES.values())
_COMPARED = 1 << 20  # bytes at the start, in the middle and at the end


@dataclass(frozen=True)
class Stored:
    """A tensor's place in a safetensors file: dtype, shape and byte range."""

    file: Path
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    start: int  # of its bytes, in the file
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.start + offset)
            return file.read(min(nbytes, self.nbytes - offset))


def is_checkpoint(folder: Path) -> bool:
    """True if the folder holds a complete torch_dist checkpoint."""
    return all((folder / name).is_file() for name in (BACKEND_FILE, INDEX_FILE))


def weight_files(folder: Path) -> list[str]:
    """Names of the files; FileNotFoundError and ValueError say what is wrong with the folder."""
    if (folder / INDEX).is_file():
        placed = read_json(folder / INDEX).get("weight_map")
        names = list(placed.values()) if isinstance(placed, dict) else []
        if not names or not all(isinstance(name, str) and is_plain_name(name) for name in names):
            raise ValueError(
                f"{folder / INDEX} has no weight_map of tensors to names of files in its folder"
            )
        files = sorted(set(names))
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder / INDEX} names {missing[0]}, which is not there ({len(missing)} missing)"
            )
        return files
    if (folder / SINGLE).is_file():
        return [SINGLE]
    raise FileNotFoundError(
        f"{folder} holds neither {SINGLE} nor {INDEX}; weights in pickle files (.bin) are not "
        "read, save them as safetensors"
    )


def companions(folder: Path) -> list[str]:
    """Files of a model's folder but weights and their index; ValueError if one lies elsewhere."""
    names = [
        entry.name
        for entry in sorted(folder.iterdir())
        if entry.is_file()
        and entry.name not in (INDEX, PARITY)
        and entry.suffix not in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    ]
    refuse_links_out(folder, names)
    return names


def refuse_links_out(folder: Path, names: Iterable[str]) -> None:
    """Raise if a file is a link out of the folder, or of the hub's cache around it."""
    here = folder.resolve()
    if here.parent.name == "snapshots":
        roots = [here, here.parents[1] / "blobs"]
    else:
        roots = [here]
    for name in names:
        try:
            file = (folder / name).resolve()
        except RuntimeError as error:
            raise ValueError(str(error)) from None  # a link to itself
        if not any(file.is_relative_to(root) for root in roots):
            raise ValueError(
                f"{folder / name} is a link out of its folder, to {file}; put the file itself there"
            )


def is_plain_name(name: str) -> bool:
    return Path(name).name == name and name.endswith(".safetensors")


def read_header(path: Path) -> bytes:
    """The JSON header of a safetensors file, padding included, as it stands."""
    if not path.is_file():
        raise ValueError(f"{path} is no file: missing, a folder or a pipe")
    size = path.stat().st_size
    with open_regular(path) as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if length > size:
            raise ValueError(f"{path} is not a safetensors file or is cut off ({size} bytes)")
        if length > LARGEST_HEADER:
            raise ValueError(
                f"{path} has a header of {length} bytes, expected at most {LARGEST_HEADER}"
            )
        raw = file.read(length)
    last = max((one.end for one in placed(raw, path).values()), default=8 + length)
    if last != size:
        raise ValueError(f"{path} is cut off or padded: {size} bytes, its header describes {last}")
    return raw


def stored_tensors(path: Path) -> dict[str, Stored]:
    return placed(read_header(path), path)


def placed(raw: bytes, path: Path) -> dict[str, Stored]:
    """Tensors of a safetensors file by name, located from the file's raw header: their bytes must
    follow each other.
    """
    last = 8 + len(raw)
    try:
        found = {
            name: _stored(path, last, name, entry)
            for name, entry in json.loads(raw).items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} has no readable safetensors header: {error}") from None
    for name, one in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if one.start != last:
            raise ValueError(
                f"{path}: the bytes of {name} begin at {one.start}, those before it end at {last}"
            )
        last = one.end
    return found


def _stored(path: Path, base: int, name: str, entry: Mapping[str, Any]) -> Stored:
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, start, end]
    if not isinstance(dtype, str) or not all(
        type(number) is int and number >= 0 for number in numbers
    ):
        raise ValueError(f"{name} has no dtype, shape and place")
    if dtype in _ITEM_BYTES and end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"{name} is {dtype} {shape}, but has {end - start} bytes")
    return Stored(path, dtype, tuple(shape), base + start, end - start)


def weight_errors(folder: Path, shape: ModelShape) -> Iterator[str]:
    """Differences between the headers of a folder's weights and config.json."""
    try:
        held: dict[str, Stored] = {}
        for file in weight_files(folder):
            held |= stored_tensors(folder / file)
    except (OSError, ValueError) as error:
        yield str(error)
        return
    wanted = {name: size for param in stored_params(shape) for name, size in param.sizes.items()}
    layers = 1 + max((int(found[1]) for name in held if (found := _LAYER.match(name))), default=-1)
    if layers != shape.layers:
        yield f"num_hidden_layers of config.json is {shape.layers}, but {folder} holds the weights of {layers}"
        wanted = {name: size for name, size in wanted.items() if not _beyond(name, layers)}
        held = {name: one for name, one in held.items() if not _beyond(name, shape.layers)}
    missing = [name for name in wanted if name not in held]
    if missing:
        yield f"{folder} lacks {some(missing)}; config.json promises {'it' if len(missing) == 1 else 'them'}"
    yield from _unknown(folder, shape, [name for name in held if name not in wanted], held)
    both = [name for name in wanted if name in held]
    wrong = [name for name in both if held[name].shape != wanted[name]]
    if wrong:
        first = f"{list(held[wrong[0]].shape)}, config.json says {list(wanted[wrong[0]])}"
        yield f"{folder}: the shape of {some(wrong)} is another: {first}"
    other = [name for name in both if held[name].dtype not in FLOATS]
    if other:
        first = held[other[0]].dtype
        yield f"{folder} holds {some(other)} as {first}, expected one of {', '.join(FLOATS)}; name the BF16 model"


def _unknown(
    folder: Path, shape: ModelShape, names: list[str], held: Mapping[str, Stored]
) -> Iterator[str]:
    names = [name for name in names if not name.endswith(HARMLESS)]
    if shape.tied and TIED_COPY in names:
        names.remove(TIED_COPY)
        if EMBEDDING in held and not _alike(held[TIED_COPY], held[EMBEDDING]):
            yield (
                f"tie_word_embeddings of config.json is true, but the {TIED_COPY} of {folder} "
                f"differs from {EMBEDDING}; set it to false"
            )
    if names:
        yield f"{folder} holds {some(names)}, which a {shape.family} model of this config.json does not have"


def _alike(one: Stored, other: Stored) -> bool:
    """True if three pieces of two tensors are equal; tensors trained apart differ in them."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    places = (0, max(0, one.nbytes // 2), max(0, one.nbytes - _COMPARED))
    return all(one.read(place, _COMPARED) == other.read(place, _COMPARED) for place in places)


_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


def _beyond(name: str, layers: int) -> bool:
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= layers


def some(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more tensors"
