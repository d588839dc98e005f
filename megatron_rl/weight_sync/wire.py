"""Messages around the tensors of vLLM's transports (nccl, ipc): announcement, seal, ipc handles,
end.

The announcement adds version, format and staging to names, dtypes and shapes, and is compared with
the engine's expectation before any transfer; the seal adds a checksum of every tensor, computed on
its device (`checksum`), and is compared before the version is served; `abandon` ends an update.
They are `update_weights` messages of their own. So are the handles of shared device memory of
`ipc`: nothing received is ever unpickled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from megatron_rl.models.tensors import TensorSpec, as_bytes
from megatron_rl.weight_sync.manifest import WeightSyncError

# + sync.transport: the names of these transports in vLLM's registry of engines
BACKEND_PREFIX = "checked_"
ANNOUNCE = "announce"
SEAL = "seal"
ABANDON = "abandon"
WORD = torch.int32
CHUNK = 1 << 22  # words hashed at once: bounds the memory of the temporaries
PERIOD = 65521  # of the position weights, which detect reordered words
STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: offset of the position weights between chunks

# torch reduces a CUDA tensor to the arguments of `rebuild_cuda_tensor`: numbers, bytes, and among
# them classes, a dtype and a size. Those are sent as text, and looked up in closed lists
CLASSES: dict[str, Any] = {
    "Tensor": Tensor,
    "torch.UntypedStorage": torch.UntypedStorage,
    "torch.TypedStorage": torch.storage.TypedStorage,
}
CLASS_NAMES = {value: name for name, value in CLASSES.items()}
TYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
PLAIN = (bool, int, bytes, type(None))

Handle = dict[str, tuple[Any, ...]]  # physical device -> arguments of rebuild_cuda_tensor


@dataclass(frozen=True)
class Announcement:
    policy_version: int
    format: str
    tensors: tuple[TensorSpec, ...]

    def message(self) -> dict[str, Any]:
        return {ANNOUNCE: msgspec.to_builtins(self)}


@dataclass(frozen=True)
class Seal:
    policy_version: int
    checksums: dict[str, tuple[int, int]]

    def message(self) -> dict[str, Any]:
        return {SEAL: msgspec.to_builtins(self)}


def announcement(message: Mapping[str, Any]) -> Announcement:
    return msgspec.convert(message[ANNOUNCE], Announcement)


def seal(message: Mapping[str, Any]) -> Seal:
    return msgspec.convert(message[SEAL], Seal)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return two 64-bit sums over the tensor's bytes, on its device: of the words, and of the words
    weighted by position.

    Sums of integers modulo 2^64 do not depend on the order in which a device adds them.
    """
    data = as_bytes(tensor)
    words = torch.nn.functional.pad(data, (0, -len(data) % WORD.itemsize)).view(WORD)
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    placed = torch.zeros_like(plain)
    places = (
        torch.arange(min(len(words), CHUNK), dtype=torch.int64, device=words.device)
        .remainder_(PERIOD)
        .add_(1)
    )
    for number, chunk in enumerate(words.split(CHUNK)):
        wide = chunk.long()
        plain += wide.sum()
        placed += (wide * places[: len(wide)]).sum() + wide.sum() * (
            (number * STRIDE) & (2**62 - 1)
        )
    return torch.stack((plain, placed))


def read_checksums(sums: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Read all checksums in one copy to the CPU."""
    if not sums:
        return {}
    rows = torch.stack(list(sums.values())).tolist()
    return {name: (plain, placed) for name, (plain, placed) in zip(sums, rows, strict=True)}


def verify(sealed: Seal, announced: Announcement, arrived: Mapping[str, tuple[int, int]]) -> None:
    """Verify that the announced tensors have arrived, with the bytes that were sent."""
    if sealed.policy_version != announced.policy_version:
        raise WeightSyncError(
            f"the seal is of policy version {sealed.policy_version}, version "
            f"{announced.policy_version} was announced"
        )
    names = {tensor.name for tensor in announced.tensors}
    problems = [
        f"missing tensor {name}: announced, never arrived" for name in sorted(names - set(arrived))
    ]
    problems += [f"unexpected tensor {name}" for name in sorted(set(arrived) - names)]
    problems += [
        f"corrupt tensor {name}: its bytes do not match its checksum"
        for name in sorted(names & set(arrived))
        if tuple(sealed.checksums.get(name, ())) != arrived[name]
    ]
    if problems:
        raise WeightSyncError("; ".join(problems[:8]))


def encode_handles(handles: list[Handle] | Handle) -> Any:
    if isinstance(handles, list):
        return [encode_handles(handle) for handle in handles]
    return {
        device: [_encode(value) for value in arguments] for device, arguments in handles.items()
    }


def decode_handles(handles: Any) -> list[Handle] | Handle:
    if isinstance(handles, list):
        return [decode_handles(handle) for handle in handles]  # type: ignore[misc]
    return {
        device: tuple(_decode(value) for value in arguments)
        for device, arguments in handles.items()
    }


def _encode(value: Any) -> Any:
    if isinstance(value, (torch.Size, tuple, list)):
        return ["size", *(int(extent) for extent in value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, PLAIN):
        return value
    if value in CLASS_NAMES:
        return ["class", CLASS_NAMES[value]]
    raise WeightSyncError(f"an IPC handle holds a {type(value).__name__}, which cannot be sent")


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        if isinstance(value, (bytearray, memoryview)):
            return bytes(value)
        return value
    kind, *content = value
    if kind == "size":
        return torch.Size(content)
    if kind == "dtype" and content[0] in TYPES:
        return TYPES[content[0]]
    if kind == "device":
        return torch.device(content[0])
    if kind == "class" and content[0] in CLASSES:
        return CLASSES[content[0]]
    raise WeightSyncError(f"an IPC handle names {kind} {content}, which is not on the list")
