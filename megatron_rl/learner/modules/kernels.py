"""Choice of the Triton kernels for tensors on GPUs; elsewhere torch computes the same."""

import functools
import importlib
import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

INTERPRET = "TRITON_INTERPRET"  # Triton's own: its kernels run in numpy


def kernels_for(matrix: Tensor) -> Any:
    """Return the module of kernels that read this matrix; None: there is none for it here."""
    if torch.version.cuda:
        here = matrix.is_cuda
    else:
        here = os.environ.get(INTERPRET) == "1"
    if here and matrix.stride(1) == 1:
        return _kernels()
    return None


@functools.cache
def _kernels() -> Any:
    if find_spec("triton") is None:
        return None
    return importlib.import_module("megatron_rl.learner.modules.triton_kernels")
