"""Peak bytes of a learner's rank: storages, and tensors that autograd saves."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.learner import Learner


class Saved:
    """Storages saved for a backward pass, counted once; parameters and logits separately."""

    def __init__(self, learner: Learner) -> None:
        self._parameters = {
            parameter.untyped_storage().data_ptr()
            for module in learner.modules
            for parameter in module.parameters()
        }
        self._columns = learner.layout.padded_vocab(learner.shape.vocab) // learner.layout.tp
        self._holders: Counter[int] = Counter()
        self._live = {"activations": 0, "logits": 0}
        self.peak = dict(self._live)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Holder(self, tensor), lambda holder: holder.tensor
        ):
            yield

    def kind(self, tensor: Tensor) -> str | None:
        if tensor.untyped_storage().data_ptr() in self._parameters:
            return None
        return "logits" if tensor.dim() == 2 and tensor.shape[1] == self._columns else "activations"

    def count(self, kind: str, pointer: int, nbytes: int, change: int) -> None:
        before = self._holders[pointer] > 0
        self._holders[pointer] += change
        self._live[kind] += nbytes * ((self._holders[pointer] > 0) - before)
        self.peak[kind] = max(self.peak[kind], self._live[kind])


class _Holder:
    """Lives as long as autograd keeps the tensor."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.tensor = tensor
        self._saved = saved
        self._kind = saved.kind(tensor)
        self._storage = tensor.untyped_storage()
        if self._kind:
            saved.count(
                self._kind,
                self._storage.data_ptr(),
                self._storage.nbytes(),
                1,
            )

    def __del__(self) -> None:
        if self._kind:
            self._saved.count(
                self._kind,
                self._storage.data_ptr(),
                self._storage.nbytes(),
                -1,
            )


def buffers(learner: Learner) -> list[Any]:
    """Megatron-core's buffers of weights and gradients."""
    return [
        buffer
        for chunk in learner.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def static(learner: Learner) -> dict[str, int]:
    """Weights and gradients in their buffers, and the optimizer's own tensors."""
    held = buffers(learner)
    optimizer = 0
    for each in learner.optimizer.chained_optimizers:
        masters = [one for group in each.shard_fp32_from_float16_groups for one in group]
        moments = [value for state in each.optimizer.state.values() for value in state.values()]
        optimizer += sum(_nbytes(value) for value in (*masters, *moments))
    return {
        "weights": sum(_nbytes(buffer.param_data) for buffer in held),
        "gradients": sum(_nbytes(buffer.grad_data) for buffer in held),
        "optimizer": optimizer,
    }


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
