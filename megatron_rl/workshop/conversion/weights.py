"""A model's weights by Hugging Face name, whatever holds them: what every conversion reads, and what it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from megatron_rl.checkpoint.torch_dist import reader as torch_dist
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import DTYPES, TensorSpec, dtype_name

Get = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """Names, dtypes and shapes of all tensors, in the order in which reading them is cheap; nothing is read yet."""

    specs: Mapping[str, TensorSpec]
    open: Callable[[], Get]  # each gives its own `get`, which may hold on to what it has read last
    # of tensors that are made of others, by their names, once they are made
    made_of: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # of each input: name -> digest
    errors: dict[str, float] = field(default_factory=dict)  # relative, of what was quantized

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def each(self) -> Iterator[tuple[str, torch.Tensor]]:
        get = self.open()
        return ((name, get(name)) for name in self.specs)


def of_folder(folder: HfFolder) -> Weights:
    return Weights({name: folder.spec(name) for name in folder.names}, lambda: folder.read)


def of_checkpoint(reader: torch_dist.Reader, shape: ModelShape) -> Weights:
    specs = {spec.name: spec for spec in torch_dist.specs(reader, shape)}
    return Weights(specs, lambda: torch_dist.getter(reader, shape))


def watched(weights: Weights, seen: dict[str, str]) -> Weights:
    """`seen` gets the digest of whatever is read."""

    def opened() -> Get:
        get = weights.open()

        def read(name: str) -> torch.Tensor:
            tensor = get(name)
            seen[name] = digest(tensor)
            return tensor

        return read

    return Weights(weights.specs, opened)


def digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bytes, wherever they lie."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    about = f"{DTYPES[dtype_name(tensor.dtype)][0]} {'x'.join(map(str, tensor.shape))}"
    return f"{about} {xxhash.xxh3_64_hexdigest(flat.numpy().data)}"


def content_digest(digests: Mapping[str, str]) -> str:
    """Of a whole model: the same for every folder that holds the same numbers, in however many files."""
    lines = (f"{name} {digests[name]}\n" for name in sorted(digests))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def files_of(folder: Path) -> dict[str, list[int]]:
    """Name -> bytes and time of its last change: whether this is the folder that was read before."""
    about = {str(path.relative_to(folder)): path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in about.items()}
