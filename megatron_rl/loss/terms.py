"""The per-token formula of each policy loss.

Each function returns the loss of every token, weighted, and where its clip was active. Positions outside
the mask may hold anything: the reduction drops them. a: anchor logprob, x = pi - a, r = exp(x).

Shape legend: B sequences, T response positions; B1 broadcasts along T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.schema import Divergence, LossConfig, LossName, TrustRegion
from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT, bounded_exp

GSPO_EXPONENT_LIMIT = 10.0


@dataclass(frozen=True)
class Terms:
    """Inputs of one loss, 0 outside the mask."""

    logprobs_BT: Tensor  # pi, carries the gradient
    anchor_BT: Tensor
    advantages_B1: Tensor
    weights_BT: Tensor
    mask_BT: Tensor
    selected_BT: Tensor | None

    @property
    def shift_BT(self) -> Tensor:
        return self.logprobs_BT - self.anchor_BT

    @property
    def ratio_BT(self) -> Tensor:
        return bounded_exp(self.shift_BT)

    def row_mean(self, values_BT: Tensor) -> Tensor:
        counts_B1 = self.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return values_BT.masked_fill(~self.mask_BT, 0.0).sum(dim=1, keepdim=True) / counts_B1


Result = tuple[Tensor, dict[str, Tensor]]


def divergence(estimator: Divergence, logprobs_BT: Tensor, ref_BT: Tensor) -> Tensor:
    """Estimates of KL(pi || ref) per token."""
    shift_BT = logprobs_BT - ref_BT
    if estimator == Divergence.k1:
        return shift_BT
    if estimator == Divergence.abs:
        return shift_BT.abs()
    if estimator == Divergence.k2:
        return 0.5 * shift_BT.square()
    if estimator == Divergence.k3:
        return (-shift_BT).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).expm1() + shift_BT
    raise ValueError(f"loss.kl_estimator is {estimator!r}; one of {', '.join(Divergence)}")


def _clipped_surrogate(terms: Terms, ratio_BT: Tensor, config: LossConfig) -> Result:
    """The unweighted PPO loss for a given ratio."""
    a_B1 = terms.advantages_B1
    plain_BT = -a_B1 * ratio_BT
    bounded_BT = -a_B1 * ratio_BT.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    active_BT = bounded_BT > plain_BT
    clipped = {"clip_fraction_high": active_BT & (a_B1 > 0), "clip_fraction_low": active_BT & (a_B1 < 0)}
    if config.dual_clip is not None:
        ceiling_BT = (-config.dual_clip * a_B1).expand_as(loss_BT)
        clipped["dual_clip_fraction"] = (a_B1 < 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(a_B1 < 0, torch.minimum(loss_BT, ceiling_BT), loss_BT)
    return loss_BT, clipped


def ppo(terms: Terms, config: LossConfig) -> Result:
    loss_BT, clipped = _clipped_surrogate(terms, terms.ratio_BT, config)
    return loss_BT * terms.weights_BT, clipped


def gspo(terms: Terms, config: LossConfig) -> Result:
    """The row's geometric ratio at every token; each token still carries its own gradient."""
    logprobs_BT = terms.logprobs_BT
    row_B1 = terms.row_mean(terms.shift_BT).detach()
    exponent_BT = (row_B1 + logprobs_BT - logprobs_BT.detach()).clamp(max=GSPO_EXPONENT_LIMIT)
    loss_BT, clipped = _clipped_surrogate(terms, exponent_BT.exp(), config)
    return loss_BT * terms.weights_BT, clipped


def cispo(terms: Terms, config: LossConfig) -> Result:
    """Clips the weight of the gradient, never the gradient itself."""
    ratio_BT = terms.ratio_BT.detach()
    low = None if config.absolute else 1.0 - config.clip_low
    high = config.clip_high if config.absolute else 1.0 + config.clip_high
    clipped = {"clip_fraction_high": ratio_BT > high}
    if low is not None:
        clipped["clip_fraction_low"] = ratio_BT < low
    loss_BT = -ratio_BT.clamp(min=low, max=high) * terms.advantages_B1 * terms.logprobs_BT
    return loss_BT * terms.weights_BT, clipped


def sapo(terms: Terms, config: LossConfig) -> Result:
    # filled in the advantages' dtype: two plain numbers would make a float32 tensor
    tau_B1 = torch.full_like(terms.advantages_B1, config.tau_negative)
    tau_B1 = tau_B1.masked_fill(terms.advantages_B1 > 0, config.tau_positive)
    gate_BT = torch.sigmoid(tau_B1 * (terms.ratio_BT - 1.0)) * 4.0 / tau_B1
    return -terms.advantages_B1 * gate_BT * terms.weights_BT, {}


def gmpo(terms: Terms, config: LossConfig) -> Result:
    """One loss per row, spread over its tokens; token weights enter as their geometric mean."""
    sign_B1 = torch.sign(terms.advantages_B1)
    shift_BT = terms.shift_BT
    plain_BT = sign_B1 * shift_BT
    bounded_BT = sign_B1 * shift_BT.clamp(-config.clip_low, config.clip_high)
    row_B1 = terms.row_mean(sign_B1 * torch.minimum(plain_BT, bounded_BT))
    weight_B1 = terms.row_mean(terms.weights_BT.masked_fill(~terms.mask_BT, 1.0).log()).exp()
    active_BT = bounded_BT < plain_BT
    clipped = {"clip_fraction_high": active_BT & (sign_B1 > 0), "clip_fraction_low": active_BT & (sign_B1 < 0)}
    loss_B1 = -terms.advantages_B1 * bounded_exp(row_B1) * weight_B1
    return loss_B1.expand_as(shift_BT), clipped


def dppo(terms: Terms, config: LossConfig) -> Result:
    """A token counts inside a trust region of probabilities, or when its step leads back towards it."""
    logprobs_BT, anchor_BT = terms.logprobs_BT.detach(), terms.anchor_BT
    prob_BT = logprobs_BT.clamp(max=0.0).exp()
    anchor_prob_BT = anchor_BT.clamp(max=0.0).exp()
    gap_BT = prob_BT - anchor_prob_BT
    if config.trust_region == TrustRegion.total_variation:
        too_high_BT, too_low_BT = gap_BT > config.clip_high, gap_BT < -config.clip_low
    elif config.trust_region == TrustRegion.binary_kl:
        kl_BT = _binary_kl(anchor_prob_BT, anchor_BT.clamp(max=0.0), prob_BT, logprobs_BT.clamp(max=0.0))
        too_high_BT, too_low_BT = (kl_BT > config.clip_high) & (gap_BT > 0), (kl_BT > config.clip_low) & (gap_BT < 0)
    else:
        raise ValueError(f"loss.trust_region is {config.trust_region!r}; one of {', '.join(TrustRegion)}")
    positive_B1 = terms.advantages_B1 > 0
    leaving_BT = torch.where(positive_B1, too_high_BT, too_low_BT)
    clipped = {"clip_fraction_high": leaving_BT & positive_B1, "clip_fraction_low": leaving_BT & ~positive_B1}
    return -terms.advantages_B1 * terms.ratio_BT * ~leaving_BT * terms.weights_BT, clipped


def _binary_kl(p_BT: Tensor, log_p_BT: Tensor, q_BT: Tensor, log_q_BT: Tensor) -> Tensor:
    """KL between two coins, heads p and q. Tails use log1p, bounded where a probability rounds to 1."""
    tiny = torch.finfo(p_BT.dtype).eps
    log_tail_p_BT = torch.log1p(-p_BT.clamp(max=1.0 - tiny))
    log_tail_q_BT = torch.log1p(-q_BT.clamp(max=1.0 - tiny))
    return p_BT * (log_p_BT - log_q_BT) + (1.0 - p_BT) * (log_tail_p_BT - log_tail_q_BT)


def _selected(terms: Terms, name: str) -> Tensor:
    if terms.selected_BT is None:
        raise ValueError(f"loss.name {name} needs LossInputs.selected_BT: select_by_covariance on the global batch")
    return terms.selected_BT


def clip_cov(terms: Terms, config: LossConfig) -> Result:
    """PPO whose selected tokens, those with the highest covariance, give no gradient."""
    selected_BT = _selected(terms, "clip_cov")
    loss_BT, clipped = _clipped_surrogate(terms, terms.ratio_BT, config)
    loss_BT = torch.where(selected_BT, loss_BT.detach(), loss_BT)
    return loss_BT * terms.weights_BT, clipped | {"selected_fraction": selected_BT}


def kl_cov(terms: Terms, config: LossConfig) -> Result:
    """PPO whose selected tokens pay for their distance from the anchor."""
    selected_BT = _selected(terms, "kl_cov")
    loss_BT, clipped = _clipped_surrogate(terms, terms.ratio_BT, config)
    loss_BT = loss_BT + config.cov_kl_coef * terms.shift_BT.abs() * selected_BT
    return loss_BT * terms.weights_BT, clipped | {"selected_fraction": selected_BT}


def reinforce(terms: Terms, config: LossConfig) -> Result:
    return -terms.advantages_B1 * terms.logprobs_BT * terms.weights_BT, {}


def rollout_is(terms: Terms, config: LossConfig) -> Result:
    """The ratio as a detached weight inside an open band, nothing outside."""
    ratio_BT = terms.ratio_BT.detach()
    high_BT, low_BT = ratio_BT >= 1.0 + config.clip_high, ratio_BT <= 1.0 - config.clip_low
    loss_BT = -ratio_BT * ~(high_BT | low_BT) * terms.advantages_B1 * terms.logprobs_BT
    return loss_BT * terms.weights_BT, {"clip_fraction_high": high_BT, "clip_fraction_low": low_BT}


def cross_entropy(terms: Terms, config: LossConfig) -> Result:
    return -terms.logprobs_BT * terms.weights_BT, {}


TERMS: dict[LossName, Callable[[Terms, LossConfig], Result]] = {
    LossName.ppo: ppo,
    LossName.gspo: gspo,
    LossName.cispo: cispo,
    LossName.sapo: sapo,
    LossName.gmpo: gmpo,
    LossName.dppo: dppo,
    LossName.clip_cov: clip_cov,
    LossName.kl_cov: kl_cov,
    LossName.reinforce: reinforce,
    LossName.rollout_is: rollout_is,
    LossName.cross_entropy: cross_entropy,
}
