"""Allocator setting that lets the learner release GPU memory to a colocated engine at syncs."""

import os

import torch

from megatron_rl.config.schema import Sleep, Transport

GIVEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SETTINGS = "expandable_segments:True"


def enable_expandable_segments(sleep: Sleep, transport: Transport) -> None:
    """Let torch release memory when an engine wakes up for a sync; call it before any allocation.

    Packs differ in length, so that plain segments stay half used and cannot be returned. The
    engine's process is left alone: it keeps sleeping memory in a pool. Not applied with `ipc`,
    which shares plain segments, nor against the user's environment.
    """
    if (
        sleep == Sleep.none
        or transport != Transport.file
        or any(os.environ.get(name) for name in GIVEN)
    ):
        return
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
