"""What other projects' formulas are made of, on data with ragged rows: plain float64, nothing of ours.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Native = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -2.0, -1.0, 1.0, -1.0, 2.0])


def data(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mu_BT = -torch.rand(10, 6, generator=generator, dtype=torch.float64) * 3
    noise_BT = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    d_BT = spread * (noise_BT + torch.randn(10, 1, generator=generator, dtype=torch.float64))
    lengths_B = torch.randint(1, 7, (10,), generator=generator)
    return mu_BT + d_BT, mu_BT, torch.arange(6)[None] < lengths_B[:, None]


def rho(p: Tensor, mu: Tensor) -> Tensor:
    return (p - mu).exp()


def row_sum(x: Tensor, m: Tensor) -> Tensor:
    return (x * m).sum(1, keepdim=True)


def row_mean(x: Tensor, m: Tensor) -> Tensor:
    return row_sum(x, m) / m.sum(1, keepdim=True).clamp(min=1)


def row_max(x: Tensor, m: Tensor) -> Tensor:
    return x.masked_fill(~m, -math.inf).amax(1, keepdim=True)


def over_rows(x_B1: Tensor, m: Tensor) -> Tensor:
    """The mean over rows with a token."""
    return x_B1[m.any(1)].mean()


def k2(p: Tensor, mu: Tensor) -> Tensor:
    return (p - mu) ** 2 / 2


def k3(p: Tensor, mu: Tensor) -> Tensor:
    return rho(p, mu) - 1 - (p - mu)


def band(values: Tensor, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)


def kept(multiplier: Native) -> Native:
    """Rejected tokens leave the denominator too."""

    def with_denominator(p: Tensor, mu: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        weights, mask = multiplier(p, mu, m)
        return weights * (mask & m), mask & m

    return with_denominator


def plain(multiplier: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Native:
    """The denominator counts the response mask."""
    return lambda p, mu, m: (multiplier(p, mu, m) * m, m)


def verl_rs(option: str, threshold: str) -> dict[str, Any]:
    return {"rollout_rs": option, "rollout_rs_threshold": threshold}


def slime_mis(**keys: Any) -> dict[str, Any]:
    path = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    return {"use_tis": True, "custom_tis_function_path": path, **keys}
