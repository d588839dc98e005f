"""Patches of torch and megatron-core, made on import, to run without CUDA; refusal of a recipe that
wants CUDA there.

megatron-core asks for the current CUDA device, creates tensors on "cuda", compares names of tensor
types and keeps CUDA random states; each gets the CPU's. Where CUDA exists `install` only keeps
FlashInfer out.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Device
from megatron_rl.processes import gpu_driver
from megatron_rl.quantization import cpu_matmul

# megatron-core warns at import about every optional package (Apex, Transformer Engine) it cannot
# find
_NOISE = "Apex is not installed|Transformer Engine and Apex|Failed to import Transformer Engine"

# constructors that megatron-core calls with device="cuda"
_CONSTRUCTORS = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)


class _Inert:
    """Stands for a CUDA stream or event, or for work: on CPUs it is in order and already done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait(self, *args: Any, **kwargs: Any) -> None:
        pass

    wait_stream = wait_event = record = synchronize = wait

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def query(self) -> bool:
        return True


_STREAM = _Inert()


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int) or str(device).startswith("cuda"):
        return torch.device("cpu")
    return device


def _placed_on_host(constructor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(constructor)
    def construct(*args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return constructor(*args, **kwargs)

    return construct


def _cuda_named_type(plain_type: Callable[..., Any]) -> Callable[..., Any]:
    """A `tensor.type()` that returns the CUDA name, by which the optimizers sort parameters."""

    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        if isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_of


def _rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _patch_torch() -> None:
    cpu = torch.device("cpu")
    for kind in ("Float", "Half", "BFloat16", "Int", "Long", "Byte"):
        setattr(torch.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": _rng_state,
        "set_rng_state": _set_rng_state,
        "Stream": _Inert,
        "Event": _Inert,
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = _rng_state
    torch.cuda.random.set_rng_state = _set_rng_state
    # `with torch.device(...)` remembers, at its first use, which functions are constructors: it
    # must see the true ones
    with torch.device("cpu"):
        torch.empty(0)
    for name in _CONSTRUCTORS:
        setattr(torch, name, _placed_on_host(getattr(torch, name)))
    Tensor.type = _cuda_named_type(Tensor.type)  # type: ignore[method-assign]
    Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]


def _gloo_all_to_all() -> None:
    """Give gloo plain lists of split sizes, which its binding wants even where all are equal."""
    plain = torch.distributed.all_to_all_single

    @functools.wraps(plain)
    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        to, of = (
            None if splits is None else [int(size) for size in splits]
            for splits in (output_split_sizes, input_split_sizes)
        )
        return plain(output, input, to, of, group=group, async_op=async_op)

    torch.distributed.all_to_all_single = all_to_all_single


def _unless_alone(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`plain`, skipped on a group of one rank, where gloo's copies take a sixth of an update."""

    @functools.wraps(plain)
    def exchange(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        here = (output.data_ptr(), output.numel()) == (input.data_ptr(), input.numel())
        if here and torch.distributed.get_world_size(kwargs.get("group")) == 1:
            if kwargs.get("async_op"):
                return _Inert()
            return None
        return plain(output, input, *args, **kwargs)

    return exchange


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    megatron_random._get_cuda_rng_state = _rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state
    # named only where Transformer Engine is there, but looked at everywhere
    moe_utils.te_general_gemm = None


@functools.cache
def install() -> bool:
    """Make megatron-core importable and runnable; return True if it runs on the CPU."""
    warnings.filterwarnings("ignore", message=_NOISE)
    if torch.cuda.is_available():
        # imported, it makes a context on every GPU; megatron-core looks for it, for an inference of
        # its own alone
        sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]
        return False
    cpu_matmul.install()
    _patch_torch()
    _gloo_all_to_all()
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(torch.distributed, name, _unless_alone(getattr(torch.distributed, name)))
    # functions that megatron-core marks for compilation would spend seconds in a compiler for
    # nothing
    from torch import _dynamo

    _dynamo.config.disable = True
    _patch_megatron()
    return True


def require(wanted: Device) -> None:
    """Raise if the recipe wants CUDA and torch sees none: a learner on CPUs is another learner."""
    if ON_CPU and wanted == Device.cuda:
        raise ConfigError(
            f"run.device: cuda, but {gpu_driver.unseen()}; set run.device=cpu to run on the CPU"
        )


ON_CPU = install()
