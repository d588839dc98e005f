"""Memory for tensors that are read or made one after another, large ones: the pages of one serve the next.

An allocator gives those of a large tensor back when it goes, and has new ones cleared for the next. That takes longer
than to read a tensor, and hash it.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import torch

SMALL, LARGE = 1 << 20, 1 << 27  # what is smaller is an allocator's business; what is larger is too much to keep
_THREAD = threading.local()


def reuse() -> None:
    """From now on, until this thread ends, `empty` gives it what tensors held that are gone."""
    if not hasattr(_THREAD, "blocks"):
        _THREAD.blocks = []


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    blocks: list[np.ndarray] | None = getattr(_THREAD, "blocks", None)
    if blocks is None or not SMALL <= nbytes <= LARGE:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(_block(blocks, nbytes)[:nbytes]).view(dtype).view(shape)


def _block(blocks: list[np.ndarray], nbytes: int) -> np.ndarray:
    """The smallest that is free and large enough; where there is none, a new one instead of those that are free."""
    free = {place for place in range(len(blocks)) if sys.getrefcount(blocks[place]) == 2}  # the list's, the question's
    fitting = [place for place in free if blocks[place].nbytes >= nbytes]
    if fitting:
        return blocks[min(fitting, key=lambda place: blocks[place].nbytes)]
    blocks[:] = [block for place, block in enumerate(blocks) if place not in free]
    blocks.append(np.empty(nbytes, np.uint8))
    return blocks[-1]
