"""Offload of a rank's optimizer to pinned CPU memory while engines sample on its GPU, and its
return for an update.

Masters and moments are copied, gradients are dropped: every update begins with zeros. Weights stay,
since a sync and the probe need them while the engine has its cache. Whole tensors replace those of
the optimizer: a checkpoint that is saved meanwhile reads the CPU copies unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# bytes; torch rounds what it pins up to a power of two, so that one block of all would cost up to
# twice
BLOCK = 1 << 30
ALIGNMENT = 64

# a tensor of the optimizer, and how another one is put in its place
Held = tuple[Tensor, Callable[[Tensor], None]]


class OptimizerOffload:
    """Moves the optimizer to CPU memory (`leave`) and back (`take_back`) on all ranks; repeated
    calls do nothing.
    """

    def __init__(self, optimizer: Any, chunks: Sequence[Any], device: torch.device) -> None:
        """`optimizer`, `chunks`: megatron-core's."""
        self.away = False
        self._optimizer = optimizer
        self._chunks = chunks
        self._device = device
        self._places: list[Tensor] = []  # in CPU memory, reused each time

    def leave(self) -> None:
        if self.away:
            return
        held = list(self._held())
        if len(self._places) != len(held):  # moments come with the first update
            self._places = _places([one for one, _ in held], pinned=self._device.type != "cpu")
        for place, (tensor, _) in zip(self._places, held, strict=True):
            place.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        for place, (_, put) in zip(self._places, held, strict=True):
            put(place)
        for chunk in self._chunks:
            chunk.offload_grad_buffers()
        self.away = True

    def take_back(self) -> None:
        if not self.away:
            return
        for chunk in self._chunks:
            chunk.restore_grad_buffers()
        for place, put in self._held():
            there = torch.empty_like(place, device=self._device)
            there.copy_(place, non_blocking=True)
            put(there)
        torch.cuda.synchronize()
        self.away = False

    def _held(self) -> Iterator[Held]:
        """Tensors of the optimizer alone; in FP32 its masters are the weights, which stay."""
        weights = {
            parameter.untyped_storage().data_ptr()
            for chunk in self._chunks
            for parameter in chunk.parameters()
        }
        for each in self._optimizer.chained_optimizers:
            if each.optimizer is None:  # this rank has no parameters of a kind, such as experts
                continue
            for group in each.optimizer.param_groups:
                for master in group["params"]:
                    if master.untyped_storage().data_ptr() not in weights:
                        yield master.data, partial(setattr, master, "data")
                    state = each.optimizer.state.get(master, {})
                    for name, value in state.items():
                        if isinstance(value, Tensor) and value.numel() > 1:  # counts of steps stay
                            yield value, partial(state.__setitem__, name)


def _places(tensors: Sequence[Tensor], pinned: bool) -> list[Tensor]:
    """Allocate CPU memory for each of the tensors, in blocks that hold many."""
    places: list[Tensor] = []
    block = torch.empty(0, dtype=torch.uint8)
    at = 0
    for tensor in tensors:
        if at + tensor.nbytes > len(block):
            block = torch.empty(max(BLOCK, tensor.nbytes), dtype=torch.uint8, pin_memory=pinned)
            at = 0
        places.append(block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places
