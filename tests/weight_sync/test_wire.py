"""Messages beside the tensors of vLLM's transports: checksums, announcements, handles of shared
memory.
"""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.models.tensors import TensorSpec
from megatron_rl.weight_sync import wire
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.wire import Announcement, Seal


def sums(tensor: torch.Tensor) -> tuple[int, int]:
    return wire.read_checksums({"x": wire.checksum(tensor)})["x"]


@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_changed_byte_and_any_swap_of_words_changes_the_checksum(content, data):
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    before = sums(tensor)
    place = data.draw(st.integers(0, len(content) - 1))
    changed = tensor.clone()
    changed[place] ^= data.draw(st.integers(1, 255))
    assert sums(changed) != before
    words = tensor[: len(tensor) // 4 * 4].view(-1, 4)
    if len(words) > 1 and not torch.equal(words[0], words[-1]):
        swapped = words.clone()
        swapped[[0, -1]] = swapped[[-1, 0]]
        assert sums(swapped) != sums(words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_checksums_read_bytes_on_any_device(dtype, monkeypatch):
    tensor = torch.randn(37, 11).to(dtype)
    wanted = sums(tensor)
    assert sums(tensor.t().contiguous().t()) == wanted
    assert sums(tensor.clone()) == wanted
    assert sums(torch.zeros(0, dtype=dtype)) == (0, 0)
    monkeypatch.setattr(wire, "CHUNK", 16)
    first = sums(tensor)
    assert first[0] == wanted[0]
    bytes_ = tensor.reshape(-1).view(torch.uint8)
    swapped = tensor.clone().reshape(-1).view(torch.uint8)
    # two whole chunks
    swapped[:64] = bytes_[64:128]
    swapped[64:128] = bytes_[:64]
    assert sums(swapped) != first


ANNOUNCED = Announcement(
    7, "int8", (TensorSpec("a", "int8", (2, 3)), TensorSpec("b", "float32", (2, 1)))
)


@pytest.mark.parametrize(
    ("sealed", "arrived", "message"),
    [
        (Seal(8, {}), {}, "policy version 8, version 7"),
        (
            Seal(7, {"a": (1, 2), "b": (3, 4)}),
            {"a": (1, 2)},
            "missing tensor b",
        ),
        (
            Seal(7, {"a": (1, 2), "b": (3, 4)}),
            {"a": (1, 2), "b": (3, 5)},
            "corrupt tensor b",
        ),
        (
            Seal(7, {}),
            {"a": (1, 2), "b": (3, 4), "c": (5, 6)},
            "unexpected tensor c",
        ),
    ],
)
def test_what_does_not_fit_is_named(sealed, arrived, message):
    with pytest.raises(WeightSyncError, match=message):
        wire.verify(sealed, ANNOUNCED, arrived)


def test_handles_travel_without_pickle():
    # the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor, in its order
    arguments = (
        torch.Tensor,
        torch.Size([4, 3]),
        (3, 1),
        5,
        torch.UntypedStorage,
        torch.bfloat16,
        0,
        b"\x00\xffhandle",
        4096,
        128,
        False,
        b"counter",
        64,
        b"event",
        True,
    )
    for handles in (
        {"GPU-1": (*arguments, torch.storage.TypedStorage)},
        [{"GPU-1": arguments, "GPU-2": arguments}, {"GPU-1": arguments}],
    ):
        sent = msgspec.msgpack.encode(wire.encode_handles(handles))
        assert wire.decode_handles(msgspec.msgpack.decode(sent)) == handles
    with pytest.raises(WeightSyncError, match="function"):
        wire.encode_handles({"GPU-1": (print, test_handles_travel_without_pickle)})
    with pytest.raises(WeightSyncError, match="not on the list"):
        wire.decode_handles({"GPU-1": [["class", "os.system"]]})
