"""How a rank keeps its device's memory, where an engine takes its share of it back at every sync.

Packs differ in length, so that segments of torch's allocator stay half used, and those cannot be returned. Segments
that grow and shrink by pages can. The engine's process is not told: vLLM keeps what sleeps in a pool without them.
"""

from __future__ import annotations

import os

import torch

from megatron_rl.config.schema import Sleep, Transport

GIVEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SETTINGS = "expandable_segments:True"


def keep_returnable(sleep: Sleep, transport: Transport) -> None:
    """Before the first allocation. What the environment says of the allocator stays; `ipc` shares plain segments."""
    if sleep == Sleep.none or transport != Transport.file or any(os.environ.get(name) for name in GIVEN):
        return
    torch._C._accelerator_setAllocatorSettings(SETTINGS)
