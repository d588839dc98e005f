"""vLLM's own transports as far as they go without a device. Their settings:
engine/trainer_cases.py.
"""

from typing import Any

import msgspec
import torch

from megatron_rl.weight_sync import wire


def test_handles_of_shared_memory_survive_a_message() -> None:
    """What torch makes of a CUDA tensor for another process."""
    handle: tuple[Any, ...] = (
        torch.Tensor,
        torch.Size([4, 2]),
        (2, 1),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        0,
        b"h" * 64,
        128,
        0,
        False,
        b"r" * 64,
        0,
        b"e" * 64,
        True,
    )
    sent = msgspec.msgpack.encode(wire.encode_handles([{"GPU-1": handle}]))
    (back,) = wire.decode_handles(msgspec.msgpack.decode(sent))
    assert tuple(back["GPU-1"]) == handle
    assert isinstance(back["GPU-1"][1], torch.Size)
