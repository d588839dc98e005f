"""Which parameters a quantized engine holds quantized, and what tensors each of them becomes. Torch-free.

Runs are (start, length) along the split dimension of a full tensor. O output features, I input features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import Format
from megatron_rl.models.mapping import HfSlice

BLOCK = 128
BY_FORMAT = "by_format"  # the key of an update whose content differs from engine to engine, by their formats
QUANTIZED_DTYPES = {Format.int8: "int8", Format.fp8: "float8_e4m3fn", Format.fp8_block: "float8_e4m3fn"}
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1}

# the last module name of every linear layer that quantized engines hold quantized;
# w1, w2, w3 are Mixtral's experts. Routers ("gate"), norms and embeddings are in no format.
LINEAR_NAMES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
EXPERT_NAMES = frozenset({"w1", "w2", "w3"})


def is_ignored(module: str, ignore: Sequence[str]) -> bool:
    """Whether an ignore entry names this module: in full, or as a `re:` pattern matched from the start."""
    return any(re.match(entry[3:], module) if entry.startswith("re:") else entry == module for entry in ignore)


def is_quantized(hf_name: str, format: Format, ignore: Sequence[str] = ()) -> bool:
    """Whether the engine of this format holds the parameter `hf_name` quantized."""
    if format == Format.none or not hf_name.endswith(".weight"):
        return False
    module = hf_name.removesuffix(".weight")
    last = module.rpartition(".")[2]
    linear = last in LINEAR_NAMES or (last in EXPERT_NAMES and ".experts." in module)
    return linear and not is_ignored(module, ignore)


@dataclass(frozen=True)
class Output:
    """One tensor the sampler receives, and the part of it that comes from one rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the full tensor
    dim: int | None  # None: every rank of the group holds the whole of it
    runs: tuple[tuple[int, int], ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        length = sum(length for _, length in self.runs)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    @property
    def part_bytes(self) -> int:
        return _nbytes(self.part_shape, self.dtype)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, self.dtype)


def outputs(piece: HfSlice, format: Format, ignore: Sequence[str], dtype: str, split: bool) -> list[Output]:
    """The tensors that one rank's part of a Hugging Face tensor becomes; `split` where the group shares it."""
    runs, dim = _runs(piece), piece.dim if split else None
    if not is_quantized(piece.name, format, ignore):
        return [Output(piece.name, dtype, piece.shape, dim, runs)]
    weight = Output(piece.name, QUANTIZED_DTYPES[format], piece.shape, dim, runs)
    stem = piece.name.removesuffix("weight")
    rows, columns = piece.shape
    if format == Format.fp8_block:
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        return [weight, Output(stem + "weight_scale", "float32", blocks, dim, _block_runs(piece, runs))]
    # one scale per output row: shards of the input dimension share it
    return [weight, Output(stem + "weight_scale", "float32", (rows, 1), None if dim == 1 else dim, runs)]


def _runs(piece: HfSlice) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for span in piece.spans:
        if merged and sum(merged[-1]) == span.full:
            merged[-1] = (merged[-1][0], merged[-1][1] + span.length)
        else:
            merged.append((span.full, span.length))
    return tuple(merged)


def _block_runs(piece: HfSlice, runs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    total = piece.shape[piece.dim]
    for start, length in runs:
        if start % BLOCK or (length % BLOCK and start + length != total):
            raise ValueError(
                f"{piece.name}: a tensor-parallel share covers {length} of {total} from {start} on, "
                f"which cuts a {BLOCK}x{BLOCK} block"
            )
    return tuple((start // BLOCK, -(-length // BLOCK)) for start, length in runs)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    size = ITEMSIZE[dtype]
    for extent in shape:
        size *= extent
    return size
