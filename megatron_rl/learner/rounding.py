"""How far does one rounding move this policy's logprobs? Told by the learner alone, whatever its sampler does.

Two programs that compute the same model in BF16 differ by roundings. One more is put on every weight: so many of them
move by one unit in the last place of BF16 that the mean square is that of a rounding. A last bit that is turned over
twice is what it was, so that nothing is copied and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import torch
from torch import Tensor

ONE_IN = 12  # a unit in the last place has 12 times the mean square of a rounding, which is anywhere within half of one
BLOCK = 1 << 24  # weights, of which the pattern is held at once


@contextmanager
def rounded_again(parameters: Iterator[tuple[str, Tensor]]) -> Iterator[None]:
    """The pattern is made from a parameter's name: what several ranks hold alike stays alike."""
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
    bits = parameter.detach().view(-1).view({2: torch.int16, 4: torch.int32}[parameter.element_size()])
    last = 1 << (8 * parameter.element_size() - 16)  # of BF16: the upper half of an FP32 number
    draw = torch.Generator(parameter.device).manual_seed(crc32(name.encode()))
    for block in bits.split(BLOCK):
        pattern = torch.empty_like(block).random_(0, ONE_IN, generator=draw).eq_(0)
        block.bitwise_xor_(pattern.mul_(last))
