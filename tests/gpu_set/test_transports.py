"""vLLM's own transports as far as they go without a device: settings, messages, the names that its third one needs."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.distributed.weight_transfer.m2n_common import SUPPORTED_DTYPES, import_m2n

from megatron_rl.config.schema import Transport
from megatron_rl.weight_sync import buckets, wire
from megatron_rl.weight_sync.vllm_push import init_info

EMBEDDING = 151_936 * 4096 * 2  # bytes, of Qwen3-8B
PLACE = "127.0.0.1", 12345


@pytest.mark.parametrize("transport", [Transport.ipc, Transport.nccl])
def test_settings_of_a_transport(transport: Transport) -> None:
    info = init_info(transport, 4, 0, PLACE, EMBEDDING)
    assert info.is_sender
    assert not init_info(transport, 4, 1, PLACE, EMBEDDING).is_sender or transport == Transport.ipc
    wanted = EMBEDDING if transport == Transport.ipc else buckets.BUCKET_BYTES
    assert info.packed_buffer_size_bytes == wanted


def test_a_tensor_above_ipc_s_buffer_is_refused_by_vllm_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the buffer follows from the largest tensor."""
    from vllm.distributed.weight_transfer import packed_tensor

    plain = torch.empty
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, ("arguments",)))
    monkeypatch.setattr(torch, "empty", lambda *size, **how: plain(*size, **{**how, "device": "cpu"}))
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
        torch.Tensor, torch.Size([4, 2]), (2, 1), 0, torch.storage.TypedStorage, torch.uint8, 0, b"h" * 64, 128, 0,
        False, b"r" * 64, 0, b"e" * 64, True,
    )  # fmt: skip
    sent = msgspec.msgpack.encode(wire.encode_handles([{"GPU-1": handle}]))
    (back,) = wire.decode_handles(msgspec.msgpack.decode(sent))
    assert tuple(back["GPU-1"]) == handle
    assert isinstance(back["GPU-1"][1], torch.Size)


def test_the_names_of_vllm_s_m2n() -> None:
    m2n, names = import_m2n(), ("Handle", "Config", "reshard", "Mesh", "Shard", "Replicate")
    assert [name for name in names if not hasattr(m2n, name)] == []
    assert {torch.int8, torch.float8_e4m3fn, torch.bfloat16} <= set(SUPPORTED_DTYPES)
