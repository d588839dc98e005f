"""CUDA IPC handles as plain data: how torch describes shared device memory, without pickle.

torch reduces a CUDA tensor to the arguments of `rebuild_cuda_tensor`, among them classes, a dtype and a size. Those
are written as text and looked up in a closed list on the other side; everything else is numbers and bytes already.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.weight_sync.manifest import WeightSyncError

CLASSES: dict[str, Any] = {
    "torch.Tensor": torch.Tensor,
    "torch.UntypedStorage": torch.UntypedStorage,
    "torch.TypedStorage": torch.storage.TypedStorage,
}
NAMES = {value: name for name, value in CLASSES.items()}
TYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
PLAIN = (bool, int, bytes, type(None))

Handle = dict[str, tuple[Any, ...]]  # physical device -> arguments of rebuild_cuda_tensor


def encode(handles: list[Handle] | Handle) -> Any:
    if isinstance(handles, list):
        return [encode(handle) for handle in handles]
    return {device: [_encode(value) for value in arguments] for device, arguments in handles.items()}


def decode(handles: Any) -> list[Handle] | Handle:
    if isinstance(handles, list):
        return [decode(handle) for handle in handles]  # type: ignore[misc]
    return {device: tuple(_decode(value) for value in arguments) for device, arguments in handles.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, (torch.Size, tuple, list)):
        return ["size", *(int(extent) for extent in value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, PLAIN):
        return value
    if value in NAMES:
        return ["class", NAMES[value]]
    raise WeightSyncError(f"an IPC handle holds a {type(value).__name__}, which does not travel")


def _decode(value: Any) -> Any:
    if not isinstance(value, list):
        return bytes(value) if isinstance(value, (bytearray, memoryview)) else value
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
