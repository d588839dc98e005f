"""A device that only pretends: host memory whose tensors refuse to meet others, as those of a GPU do.

`on_device(learner)` puts everything around the model there: packs, logits, the loss, what is collected of it. The
model itself, its gradients and its optimizer stay on the host. Values are real, so that every branch is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_rl.learner.learner import Learner
from megatron_rl.learner.packing import Pack

DEVICE = torch.device("meta")  # of those that torch has without hardware: elsewhere its tensors hold nothing
_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
_INDEXED = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)  # by what lies anywhere


class There(Tensor):
    """A tensor on the device; `held` has its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        place = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, held.size(), **place, dtype=held.dtype, device=DEVICE)
        made.held = held
        return made

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Device(TorchDispatchMode):
    """Makes what is asked for there, which no tensor among the arguments would show."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    wanted = kwargs.get("device")
    read = [args[0], *args[2:]] if func in _INDEXED else [args, kwargs]
    tensors = [value for value in tree_leaves(read) if isinstance(value, Tensor)]
    there = [isinstance(tensor, There) for tensor in tensors]
    if any(there) and func not in _COPIES and any(tensor.dim() and type(tensor) is not There for tensor in tensors):
        raise RuntimeError(f"{func}: values of the host and of the device in one operation")
    stays = any(there[:1] if func in _COPIES else there) if wanted is None else wanted == DEVICE
    given = kwargs if wanted is None else kwargs | {"device": torch.device("cpu")}
    plain_args, plain = tree_map_only(There, lambda tensor: tensor.held, (args, given))
    out = func(*plain_args, **plain)
    if func._schema.is_mutable and isinstance(out, Tensor):
        return kwargs.get("out", args[0])
    return tree_map_only(Tensor, There, out) if stays else out


class _Arrives(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Tensor) -> There:
        return There(held.detach())

    @staticmethod
    def backward(ctx: Any, grad: There) -> Tensor:
        return grad.held


@contextmanager
def on_device(learner: Learner) -> Iterator[None]:
    """Until it ends, nothing that the learner does may read a value of one side into a tensor of the other."""
    learner.device = DEVICE
    for module in learner.modules:
        module.forward = partial(_forward, module.forward)  # type: ignore[method-assign]
    with _Device():
        yield


def _forward(plain: Any, pack: Pack) -> Tensor:
    here = {name: value.held for name, value in vars(pack).items() if isinstance(value, There)}
    assert here, "a pack that nobody has moved"
    return _Arrives.apply(plain(pack=replace(pack, **here)))
