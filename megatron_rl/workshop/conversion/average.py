"""The weighted average of checkpoints of one model, as people make it of the last ones of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_rl.models.tensors import torch_dtype
from megatron_rl.workshop.conversion.sources import Source
from megatron_rl.workshop.conversion.to_folder import Beside, write_folder
from megatron_rl.workshop.conversion.weights import Get, Weights, digest

AT_ONCE = 1 << 17  # values that are widened to FP32


def average_folder(
    sources: Sequence[Source], shares: Sequence[float], target: Path, note: Callable[[str], None]
) -> None:
    """`shares`: how much of each; they need not add up to 1."""
    if len(shares) != len(sources):
        raise ValueError(f"--weights names {len(shares)} numbers for {len(sources)} models; give one for each")
    if not all(math.isfinite(share) for share in shares) or not sum(shares) > 0:
        raise ValueError(f"--weights {' '.join(map(str, shares))}: expected numbers whose sum is above 0")
    total = math.fsum(shares)
    parts = [share / total for share in shares]
    write_folder(
        averaged([source.plain for source in sources], parts, [source.path for source in sources]),
        target,
        Beside(sources[0].folder),
        command="average",
        job={"of": [source.job for source in sources], "parts": parts},
        inputs=[source.path for source in sources],
        note=note,
        parts=parts,
    )


def averaged(models: Sequence[Weights], parts: Sequence[float], names: Sequence[Path]) -> Weights:
    """In FP32, rounded to the dtype that the first one has."""
    first = models[0].specs
    for other, where in zip(models[1:], names[1:], strict=True):
        odd = sorted(first.keys() ^ other.specs.keys())
        if odd:
            raise ValueError(
                f"{odd[0]} is only in one of {names[0]} and {where}; only models of one shape are averaged"
            )
        for name, spec in other.specs.items():
            if spec.shape != first[name].shape:
                raise ValueError(
                    f"{name} is {list(first[name].shape)} in {names[0]} and {list(spec.shape)} in {where}; only models "
                    "of one shape are averaged"
                )
    made_of: dict[str, list[dict[str, str]]] = {}

    def opened() -> Get:
        gets = [model.open() for model in models]

        def made(name: str) -> torch.Tensor:
            total, read = torch.full((math.prod(first[name].shape),), -0.0), []  # a sum of nothing that leaves -0 alone
            for get, part in zip(gets, parts, strict=True):
                tensor = get(name)
                read.append({name: digest(tensor)})
                for some, values in zip(total.split(AT_ONCE), tensor.flatten().split(AT_ONCE), strict=True):
                    some.add_(values.float().mul_(part))
                del tensor, values  # before the next one is read
            made_of[name] = read
            return total.to(torch_dtype(first[name].dtype)).view(first[name].shape)

        return made

    return Weights(first, opened, made_of)
