"""Selection of the tokens that the losses `clip_cov` and `kl_cov` act on: once, on the global
batch, before any update.

The covariance of a token is (A - mean A) (p - mean p): a large one drives entropy down fastest.

Shape legend: N response tokens, B rows.
"""

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batch import Replicas, Share
from megatron_rl.config.schema import LossConfig
from megatron_rl.loss.table import LOSSES


@torch.no_grad()
def select_by_covariance(
    share: Share,
    prox_logprobs_N: Tensor | None,
    advantages_B: Tensor,
    mask_N: Tensor,
    config: LossConfig,
    seed: int,
) -> Tensor | None:
    """bool [N], or None for losses that select nothing.

    kl_cov takes the highest covariances, and draws among equal ones; clip_cov draws among those
    between cov_low and cov_high. The draw is a function of the seed and of each token's own
    numbers, not of the order of rows or of who has them.
    """
    selects = LOSSES[config.name].selects
    if not selects:
        return None
    assert prox_logprobs_N is not None, "the config has made sure"
    rows = share.batch.responses
    prox_N = prox_logprobs_N.double().masked_fill(~mask_N, 0.0)
    advantages_N = rows.at_tokens(advantages_B.double()).masked_fill(~mask_N, 0.0)
    sums = torch.stack((mask_N.sum().double(), prox_N.sum(), advantages_N.sum()))
    tokens, prox_sum, advantage_sum = share.replicas.sum(sums).tolist()
    selected_N = torch.zeros_like(mask_N)
    if tokens == 0:
        return selected_N
    # rounded, as equal advantages leave only a rounding error, which must not decide
    centred_N = prox_N - prox_sum / tokens
    covariance_N = ((advantages_N - advantage_sum / tokens) * centred_N).round(decimals=9)
    quota = max(1, int(config.params["cov_fraction"] * tokens))
    eligible_N = mask_N
    if selects == "drawn":
        above_N = covariance_N > config.params["cov_low"]
        eligible_N = mask_N & above_N & (covariance_N < config.params["cov_high"])
    places = eligible_N.nonzero().flatten()
    drawn = _draws(prox_N, covariance_N, rows.place_N.double(), seed)[places]
    row_N = rows.at_tokens(share.own).double()
    keys = [drawn, row_N[places]]  # identical rows draw the same
    if selects == "highest":
        keys.insert(0, -covariance_N[places])
    selected_N[places[_first(torch.stack(keys), quota, share.replicas)]] = True
    return selected_N


def _first(keys: Tensor, count: int, replicas: Replicas) -> Tensor:
    """This replica's places among the first `count` of all replicas, in the order of keys [K, n]."""
    own = _ordered(keys)[:count]
    offers = replicas.gather(keys[:, own])
    whose = torch.repeat_interleave(
        torch.arange(len(offers)), torch.tensor([offer.shape[1] for offer in offers])
    )
    chosen = whose[_ordered(torch.cat(offers, dim=1))[:count]]
    return own[: int((chosen == replicas.place).sum())]


def _ordered(keys: Tensor) -> Tensor:
    return torch.from_numpy(np.lexsort(keys.flip(0).numpy()))


def _draws(prox_N: Tensor, covariance_N: Tensor, place_N: Tensor, seed: int) -> Tensor:
    """A pseudo-random number in [0, 1) per token, from seed, position and the token's values."""
    mixed_N = torch.sin(
        prox_N * 12.9898 + covariance_N * 78.233 + place_N * 37.719 + (seed % 100003) * 4.581
    )
    return (mixed_N * 43758.5453).frac().abs()
