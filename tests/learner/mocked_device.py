"""Mocked device: CPU memory whose tensors claim to be on a GPU, and refuse to mix with CPU ones.

Its tensors are ordinary ones, so that views, `.data`, autograd and C++ code alias as ever. A mark
on their storage places them on the device: queries (`.device`, `device=`, `.cpu()`) read the mark,
and every operation, collectives among them, compares the marks of its arguments and marks its
results. While `on_device()` is open a learner is built and used as on a GPU; the layers that
compute are those of the CPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron_rl.learner import policy
from megatron_rl.learner.modules import cpu, layers, linear, model
from megatron_rl.learner.modules.packing import Pack
from megatron_rl.learner.parallel import LearnerRank
from megatron_rl.quantization import vllm_operators

HOST = torch.device("cpu")
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
_MARK = "there"
_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
# where the device's values are found or put by indices, which may lie anywhere
_INDEXED = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)
_BYTES = (Tensor.numpy, Tensor.__array__)
# by name of a megatron-core group: true for device tensors, false for CPU tensors
_speaks: dict[str, bool] = {}
_on_its_way: list[tuple[Tensor, Tensor]] = []  # copies to CPU memory without a synchronization yet


def lies_there(tensor: Tensor) -> bool:
    return bool(getattr(tensor.untyped_storage(), _MARK, False))


_ANSWERS = {
    Tensor.device.__get__: lambda tensor: DEVICE if lies_there(tensor) else HOST,
    Tensor.is_cuda.__get__: lies_there,
    Tensor.is_cpu.__get__: lambda tensor: not lies_there(tensor),
}


class _Call(threading.local):
    """The Python call that torch is executing."""

    there: bool | None = None  # where the result is wanted, if that was said
    given = ()


_call = _Call()


class _Asked(TorchFunctionMode):
    """Reports a tensor's device, and creates tensors on the CPU, as torch lacks this device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _ANSWERS:
            return _ANSWERS[func](args[0])
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _BYTES and not kwargs.get("force") and lies_there(args[0]):
            raise TypeError(f"{func}: memory of the device is not the host's")
        drawn = kwargs.get("generator")
        if (
            isinstance(drawn, _Generator)
            and args
            and drawn.there != any(map(lies_there, _tensors(args)))
        ):
            raise RuntimeError(f"{func}: random numbers of another device")
        there = _wanted(func, args, kwargs)
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = HOST
        before = _call.there, _call.given
        _call.there = there
        _call.given = (args, kwargs)
        try:
            out = func(*(HOST if _is_place(func, value) else value for value in args), **kwargs)
            return out if there is None else tree_map_only(Tensor, partial(_moved, there), out)
        finally:
            _call.there, _call.given = before


def _moved(there: bool, made: Tensor) -> Tensor:
    """Copied, where torch has seen no reason to."""
    if lies_there(made) == there:
        return made
    return _ATEN._to_copy.default(made)


def _is_place(func: Any, value: Any) -> bool:
    return isinstance(value, torch.device) or (func is Tensor.to and isinstance(value, str))


def _wanted(func: Any, args: Any, kwargs: dict[str, Any]) -> bool | None:
    if func is Tensor.cpu:
        return False
    named = next((value for value in args[1:] if _is_place(func, value)), kwargs.get("device"))
    if func is Tensor.to and named is None:
        like = next(
            (value for value in (*args[1:], kwargs.get("other")) if isinstance(value, Tensor)), None
        )
        return None if like is None else lies_there(like)
    return None if named is None else torch.device(named).type != "cpu"


class _Run(TorchDispatchMode):
    """Looks at what each operation is given, and marks what it makes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "_C":  # vLLM's kernels for hosts
            return func(*args, **kwargs)
        tensors = _tensors([args, kwargs])
        there = [lies_there(tensor) for tensor in tensors]
        changes = func._schema.is_mutable
        if func in _COPIES:
            if (
                changes
                and there == [False, True]
                and (kwargs.get("non_blocking") or True in args[2:])
            ):
                _on_its_way.append((args[0], args[1].clone()))
                return args[0].zero_()
        elif any(there):
            _compare(func, args, kwargs, changes)
        if func.namespace == "c10d":
            _require_its_group(func, args, any(there))
        out = func(*args, **kwargs)
        if not changes and _makes_there(func, there):
            for made in _tensors(out):
                setattr(made.untyped_storage(), _MARK, True)
        return out


def _makes_there(func: Any, there: list[bool]) -> bool:
    """Return True if the result is on the device. `there`: places of the arguments."""
    if _call.there is not None:
        return _call.there
    if not there:
        return any(map(lies_there, _tensors(_call.given)))
    return there[0] if func in _COPIES else any(there)


def _compare(func: Any, args: Any, kwargs: dict[str, Any], changes: bool) -> None:
    """Raise if an argument is on the CPU, except numbers that are only read, and indices."""
    read = [args[0], *args[2:]] if func in _INDEXED and lies_there(args[0]) else [args, kwargs]
    for tensor in _tensors(read):
        number = (
            not tensor.dim() and func.namespace != "c10d" and not (changes and tensor is args[0])
        )
        if not lies_there(tensor) and not number:
            raise RuntimeError(f"{func}: values of the host and of the device in one operation")


def _require_its_group(func: Any, args: Any, there: bool) -> None:
    """Raise where a group is not for such values. The world's is for both: NCCL moves the device's,
    gloo the host's.
    """
    place = [argument.name for argument in func._schema.arguments].index("process_group")
    if _speaks.get(dist.ProcessGroup.unbox(args[place]).group_name, there) != there:
        mine, its = ("device", "hosts") if there else ("host", "devices")
        raise RuntimeError(f"{func}: values of the {mine} for a group of {its}")


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    )
    return [tensor for part in parts for tensor in _tensors(part)]


@contextmanager
def _looking() -> Iterator[None]:
    with _Run(), _Asked():
        yield


def _backward(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch's backward pass, whose own calls are allowed during `torch.autograd.backward`."""
    with _Asked():
        return plain(*args, **kwargs)


def _synchronize(device: Any = None) -> None:
    while _on_its_way:
        to, values = _on_its_way.pop(0)
        to.copy_(values)


class _Generator(torch.Generator):
    """Random numbers of the device: those of the host."""

    there: bool

    def __new__(cls, device: Any = HOST) -> _Generator:
        made = super().__new__(cls, HOST)
        made.there = torch.device(device).type != "cpu"
        return made


def _blindly(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for hosts that asks where its tensors lie: here, where it is run."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return kernel(*args, **kwargs)

    return run


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """By its name, as the optimizers and the clipping of gradients look at it."""
    with torch._C.DisableTorchFunction():
        answer = torch._C.TensorBase.type(tensor, *args, **kwargs)
    named = isinstance(answer, str) and lies_there(tensor)
    return answer.replace("torch.", "torch.cuda.", 1) if named else answer


def _rank(*args: Any) -> LearnerRank:
    """The rank of a learner on a GPU, but that gloo has to stand for NCCL."""
    join = dist.init_process_group
    form = dist.new_group

    def formed(*args: Any, **kwargs: Any) -> Any:
        group = form(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            _speaks[group.group_name] = kwargs.get("backend") != "gloo"
        return group

    with (
        patch.object(cpu, "ON_CPU", False),
        patch.object(dist, "init_process_group", lambda backend, **kwargs: join("gloo", **kwargs)),
        patch.object(dist, "new_group", formed),
    ):
        return LearnerRank(*args)


def _rows(pack: Pack) -> layers.PackedRows:
    """Those of the host's attention, with what it alone reads of a pack moved, too."""
    names = ("padded_index_X", "packed_index_S", "blanks")
    moved = {name: getattr(pack, name).to(DEVICE, non_blocking=True) for name in names}
    return layers.PackedRows(replace(pack, **moved))


@contextmanager
def on_device() -> Iterator[None]:
    """Until it ends, learners are built there, and nothing may read a value of one side into a
    tensor of the other.
    """
    _speaks.clear()
    plain_run = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _looking():
            plain_run(thread)

    with ExitStack() as stack:
        for owner, name, value in (
            (cpu, "_on_cpu", lambda device: device),
            (torch.cuda, "current_device", lambda: DEVICE),
            (torch.cuda, "synchronize", _synchronize),
            (torch, "Generator", _Generator),
            (Tensor, "type", _type),
            (Tensor, "cuda", lambda tensor, *args, **kwargs: tensor.to(DEVICE)),
            (
                torch.autograd,
                "_engine_run_backward",
                partial(_backward, torch.autograd._engine_run_backward),
            ),
            (policy, "LearnerRank", _rank),
            (model, "PackedRows", _rows),
            (layers, "narrowed", _blindly(layers.narrowed)),
            (linear, "wide_product", _blindly(linear.wide_product)),
            (vllm_operators, "rotary", _blindly(vllm_operators.rotary)),
            (threading.Thread, "run", run),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_looking())
        yield
