"""Loads a rank's parameters from Hugging Face tensors or at random; swaps or re-rounds them
temporarily.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_rl.models.layout import Place
from megatron_rl.models.mapping import adapters, params
from megatron_rl.models.model import Model
from megatron_rl.models.shards import local_shard

# a unit in the last place has 12 times the mean square of a rounding, which is anywhere within half
# of one
ONE_IN = 12
BLOCK = 1 << 24  # weights, of which the pattern is held at once


@torch.no_grad()
def load(
    named: Iterable[tuple[str, Tensor]], model: Model, place: Place, get_hf: Callable[[str], Tensor]
) -> None:
    """Fill every local parameter (global names) from full tensors."""
    for name, parameter in named:
        parameter.copy_(local_shard(name, model.shape, model.layout, place, get_hf))


def random_tensors(model: Model, seed: int) -> Callable[[str], Tensor]:
    """`get_hf` over a random model: each tensor depends on the seed and its own name alone.

    Linear layers start normal with config.json's initializer_range, those that write into the
    residual stream narrower with depth; norms start at one and biases at zero.
    """
    shape = model.shape
    std = float(model.hf_config.get("initializer_range") or 0.02)
    wanted = {name: size for param in params(shape) for name, size in param.sizes.items()}
    residual = {name for param in params(shape) if param.row.split == "row" for name in param.hf}

    def get(name: str) -> Tensor:
        size = wanted[name]
        if len(size) == 1:
            if name.endswith(".bias"):
                return torch.zeros(size)
            return torch.ones(size)
        generator = _generator(seed, name)
        width = std / math.sqrt(2 * shape.layers) if name in residual else std
        return torch.randn(size, generator=generator) * width

    return get


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))


def with_new_adapters(
    get_hf: Callable[[str], Tensor], model: Model, seed: int
) -> Callable[[str], Tensor]:
    """`get_hf` plus adapters as PEFT initializes them: A uniform, by seed and name; B zero."""
    pairs = [pair for param in params(model.shape) if (pair := adapters(param, model.shape))]
    sizes = {name: size for pair in pairs for one in pair for name, size in one.sizes.items()}

    def get(name: str) -> Tensor:
        if name not in sizes:
            return get_hf(name)
        made = torch.zeros(sizes[name])
        if name.endswith("lora_A.weight"):
            generator = _generator(seed, name)
            made.uniform_(-1, 1, generator=generator).mul_(sizes[name][1] ** -0.5)
        return made

    return get


@contextmanager
def exchanged(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
    """Swap the values of the parameters inside the context."""
    present = [parameter.detach().clone() for parameter in parameters]
    _overwrite(parameters, others)
    try:
        yield
    finally:
        _overwrite(parameters, present)


@torch.no_grad()
def _overwrite(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@contextmanager
def rounded_again(parameters: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """Round every weight once more inside the context, to measure the effect on logprobs.

    So many weights move by one unit in the last place of BF16 that the mean square is that of a
    rounding. A last bit that is turned over twice is what it was: nothing is copied. Equal shards
    of several ranks stay equal.
    """
    turned: list[tuple[str, Tensor]] = []
    try:
        for name, parameter in parameters:
            turned.append((name, parameter))
            _turn_over(name, parameter)
        yield
    finally:
        for name, parameter in turned:
            _turn_over(name, parameter)


@torch.no_grad()
def _turn_over(name: str, parameter: Tensor) -> None:
    bits = (
        parameter.detach().view(-1).view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
    )
    last = 1 << (8 * parameter.element_size() - 16)  # of BF16: the upper half of an FP32 number
    draw = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
    for block in bits.split(BLOCK):
        pattern = torch.empty_like(block).random_(0, ONE_IN, generator=draw).eq_(0)
        block.bitwise_xor_(pattern.mul_(last))
