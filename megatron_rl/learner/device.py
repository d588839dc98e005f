"""Allocator setting that lets the learner return GPU memory at syncs to an engine that has slept."""

import os

import torch

from megatron_rl.config.schema import Sleep, Transport

GIVEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SETTINGS = "expandable_segments:True"


def keep_returnable(sleep: Sleep, transport: Transport) -> None:
    """Let torch return memory where an engine takes its share back at every sync; to be called
    before any allocation.

    Packs differ in length, so that plain segments stay half used, and those cannot be returned. Not
    told to the engine's process, which keeps what sleeps in a pool; not under `ipc`, which shares
    plain segments; not against the environment.
    """
    if (
        sleep == Sleep.none
        or transport != Transport.file
        or any(os.environ.get(name) for name in GIVEN)
    ):
        return
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
