"""vLLM's own transports as far as they go without a device. Their settings:
engine/trainer_cases.py.
"""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from megatron_rl.weight_sync import wire


def test_a_tensor_above_ipc_s_buffer_is_refused_by_vllm_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why the buffer follows from the largest tensor."""
    from vllm.distributed.weight_transfer import packed_tensor

    plain = torch.empty
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, ("arguments",)))
    monkeypatch.setattr(
        torch, "empty", lambda *size, **how: plain(*size, **{**how, "device": "cpu"})
    )
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    pair = ("model.embed_tokens.weight", plain(64, 64, dtype=torch.bfloat16))
    take = lambda item: item[1]  # noqa: E731
    with pytest.raises(ValueError, match="embed_tokens"):
        next(packed_tensor.packed_ipc_producer(iter([pair]), "GPU-0", take, 4096))
    assert next(packed_tensor.packed_ipc_producer(iter([pair]), "GPU-0", take, 8192))


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
