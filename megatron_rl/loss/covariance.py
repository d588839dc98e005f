"""Selection of the tokens that the losses `clip_cov` and `kl_cov` act on: once, on the global
batch, before any update.

The covariance of a token is (A - mean A) (p - mean p): a large one drives entropy down fastest.

Shape legend: B sequences, T response positions.
"""

import torch
from torch import Tensor

from megatron_rl.config.schema import LossConfig
from megatron_rl.loss.table import LOSSES


@torch.no_grad()
def select_by_covariance(
    prox_logprobs_BT: Tensor | None,
    advantages_B: Tensor,
    mask_BT: Tensor,
    config: LossConfig,
    seed: int,
) -> Tensor | None:
    """bool [B, T], or None for losses that select nothing.

    kl_cov takes the highest covariances, and draws among equal ones; clip_cov draws among those
    between cov_low and cov_high. The draw is a function of the seed and of each token's own
    numbers, not of the order of rows or of padding.
    """
    selects = LOSSES[config.name].selects
    if not selects:
        return None
    if prox_logprobs_BT is None:
        raise ValueError(f"loss.name {config.name} selects by the proximal logprobs; they are None")
    mask_BT = mask_BT.bool()
    tokens = int(mask_BT.sum())
    selected_BT = torch.zeros_like(mask_BT)
    if tokens == 0:
        return selected_BT
    prox_BT = prox_logprobs_BT.double().masked_fill(~mask_BT, 0.0)
    advantages_BT = advantages_B.double()[:, None].expand_as(prox_BT).masked_fill(~mask_BT, 0.0)
    centred_BT = prox_BT - prox_BT.sum() / tokens
    # rounded, as equal advantages leave only a rounding error, which must not decide
    covariance_BT = ((advantages_BT - advantages_BT.sum() / tokens) * centred_BT).round(decimals=9)
    quota = max(1, int(config.params["cov_fraction"] * tokens))
    eligible_BT = mask_BT
    if selects == "drawn":
        above_BT = covariance_BT > config.params["cov_low"]
        eligible_BT = mask_BT & above_BT & (covariance_BT < config.params["cov_high"])
    places = eligible_BT.flatten().nonzero().flatten()
    places = places[_draws(prox_BT, covariance_BT, seed).flatten()[places].argsort()]
    if selects == "highest":
        places = places[covariance_BT.flatten()[places].argsort(descending=True, stable=True)]
    selected_BT.view(-1)[places[:quota]] = True
    return selected_BT


def _draws(prox_BT: Tensor, covariance_BT: Tensor, seed: int) -> Tensor:
    """A pseudo-random number in [0, 1) per token, from seed, position and the token's values."""
    column_T = torch.arange(prox_BT.shape[1], device=prox_BT.device, dtype=torch.float64)
    mixed_BT = torch.sin(
        prox_BT * 12.9898 + covariance_BT * 78.233 + column_T * 37.719 + (seed % 100003) * 4.581
    )
    return (mixed_BT * 43758.5453).frac().abs()
