"""Reader of torch_dist checkpoints without megatron: blocks of parameters or optimizer states, or
Hugging Face tensors, one at a time; `blocks`: a parameter's block made of such tensors, for an
import to write.

The index is read as data (pickled.py), each tensor by torch.load(weights_only=True).
"""

import io
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from operator import sub
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.checkpoint.torch_dist import index
from megatron_rl.checkpoint.torch_dist.pickled import DAMAGED
from megatron_rl.checkpoint.torch_dist.writer import Block, part_of
from megatron_rl.files import open_regular
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import Param, adapters, params, stored_params
from megatron_rl.models.shape import ADAPTER_KEY, ModelShape
from megatron_rl.models.shards import assemble, common, cut, part
from megatron_rl.models.tensors import TensorSpec, torch_dtype


def blocks(param: Param, shape: ModelShape, tensors: Iterable[Tensor]) -> Iterator[Block]:
    """Blocks of a whole parameter in a checkpoint of any spelling (TE fuses norms)."""
    local = assemble(param, shape, Layout(), Place(), tensors)
    for entry in index.entries(param, shape, stacked=not shape.dense_layers):
        yield part_of(entry, tuple(local.shape), (0,) * local.ndim, local)


class Reader:
    """Tensors of a torch_dist checkpoint by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors = index.read_index(folder)
        self._prefix = index.prefix(self._tensors)

    @property
    def holds_adapters(self) -> bool:
        """True if it holds LoRA adapters without the model."""
        return any(ADAPTER_KEY in key for key in self._tensors)

    def find(self, param: Param, shape: ModelShape) -> index.Entry:
        entry = index.locate(self._tensors, self._prefix, param, shape)
        if entry is None:
            raise index.CheckpointError(
                f"{self.folder} lacks the parameter {param.megatron} ({param.hf[0]})"
            )
        return entry

    def dtype(self, entry: index.Entry) -> str:
        return self._tensors[self._prefix + entry.key].dtype

    def parameter(self, param: Param, shape: ModelShape) -> list[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) for each tensor behind one parameter."""
        entry = self.find(param, shape)
        wanted = param.local_shape(Layout())
        local = self.read(entry, (0,) * len(wanted), wanted, padded=True)
        slices = param.slices(shape, Layout(), Place())
        return [(piece.name, part.contiguous()) for piece, part in cut(param, local, slices)]

    def read(
        self,
        entry: index.Entry,
        offset: tuple[int, ...],
        size: tuple[int, ...],
        kind: str = "",
        padded: bool = False,
    ) -> Tensor:
        """Read a block of a parameter, or of its optimizer state (`kind`: optimizer.state.exp_avg).

        `padded`: the vocabulary may be padded, as in megatron-core's own checkpoints.
        """
        key = f"{kind}{self._prefix}{entry.key}"
        if key not in self._tensors:
            raise index.CheckpointError(f"{self.folder} lacks {key}")
        kept = self._tensors[key]
        # else a block is cut out of another tensor
        if problem := index.misfit(kept, entry, padded):
            raise index.CheckpointError(f"{key} of {self.folder} {problem}")
        whole = (*(at for at, _ in entry.axes), *offset), (*(1 for _ in entry.axes), *size)
        shared = [(chunk, common(whole, (chunk.offset, chunk.size))) for chunk in kept.chunks]
        parts = [(chunk, box) for chunk, box in shared if box is not None]
        if any(common(one, other) for (_, one), (_, other) in combinations(parts, 2)):
            raise index.CheckpointError(f"{key} of {self.folder} holds a part of it twice")
        covered = sum(math.prod(length) for _, (_, length) in parts)
        if covered != math.prod(size):
            raise index.CheckpointError(
                f"{key} of {self.folder} is incomplete: {covered} of {math.prod(size)} values"
            )
        if len(parts) == 1 and parts[0][0].size == whole[1]:
            return self._stored(key, kept, parts[0][0]).view(size)
        target = torch.empty(whole[1], dtype=torch_dtype(kept.dtype))
        for chunk, box in parts:
            values = part(
                self._stored(key, kept, chunk),
                map(sub, box[0], chunk.offset),
                box[1],
            )
            part(target, map(sub, box[0], whole[0]), box[1]).copy_(values)
        return target.view(size)

    def _stored(self, key: str, kept: index.IndexedTensor, chunk: index.Chunk) -> Tensor:
        try:
            return read_saved(
                self.folder / chunk.file, chunk.begin, chunk.nbytes, kept.dtype, chunk.size
            )
        except (OSError, ValueError) as error:
            raise index.CheckpointError(
                f"{key} of {self.folder} cannot be read: {error}"
            ) from error


def specs(reader: Reader, shape: ModelShape) -> dict[str, TensorSpec]:
    """Every Hugging Face tensor of the model, with the dtype that the checkpoint holds it in."""
    found: dict[str, TensorSpec] = {}
    for param in stored_params(shape):
        dtype = reader.dtype(reader.find(param, shape))
        found |= {name: TensorSpec(name, dtype, size) for name, size in param.sizes.items()}
    return found


def getter(reader: Reader, shape: ModelShape) -> Callable[[str], Tensor]:
    """`get_hf` over a checkpoint. The tensors of a parameter are read at once, and kept until the
    next one's are.
    """
    own = (
        (one for param in params(shape) for one in adapters(param, shape))
        if reader.holds_adapters
        else stored_params(shape)
    )
    behind = {name: param for param in own for name in param.hf}
    kept: dict[str, Tensor] = {}

    def get(name: str) -> Tensor:
        if name not in kept:
            kept.clear()
            kept.update(reader.parameter(behind[name], shape))
        return kept[name]

    return get


def read_saved(path: Path, begin: int, nbytes: int, dtype: str, size: tuple[int, ...]) -> Tensor:
    """ValueError where those bytes of the file do not hold such a tensor."""
    with open_regular(path) as file:
        file.seek(begin)
        content = io.BytesIO(file.read(nbytes))
    try:
        with zipfile.ZipFile(content) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("it is packed")
        content.seek(0)
        found = torch.load(content, map_location="cpu", weights_only=True)
    except (*DAMAGED, RuntimeError, zipfile.BadZipFile) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from None
    wanted = (torch_dtype(dtype), size, torch.strided)
    if type(found) is not Tensor or (found.dtype, found.shape, found.layout) != wanted:
        raise ValueError(f"it holds something else than {dtype} {list(size)}")
    return found
