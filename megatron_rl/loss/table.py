"""Table of policy losses (ppo, gspo, cispo, dppo, ...): formula per token, keys, demands on recipe.

A new loss is a function here and a row of `LOSSES`; `loss.name`, the checks of the config and the
default reduction follow the table. The config reads it too, which loads no torch: formulas call the
methods of their tensors, and what needs torch itself is a method of `Terms`.

A formula returns the weighted loss of every token, and where its clip was active. Positions outside
the mask may hold anything: the reduction drops them. a: anchor logprob, x = pi - a, r = exp(x).

Shape legend: B sequences, T response positions; B1 broadcasts along T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.config.schema import LossConfig
    from megatron_rl.loss.terms import Terms

    Result = tuple[Tensor, dict[str, Tensor]]

SHARED_EXPONENT_LIMIT = 10.0  # of a ratio that several tokens share
# vespo
LOWEST_LOG_WEIGHT = math.log(1e-8)
HIGHEST_LOG_WEIGHT = 20.0


@dataclass(frozen=True)
class Loss:
    formula: Callable[[Terms, LossConfig], Result]
    reads: tuple[str, ...] = ()  # keys of the `loss` section that only some losses read
    params: tuple[str, ...] = ()  # keys of `loss.params`: fields of LossParams
    ratio: bool = True  # r is a factor: what lies between pi and the anchor is corrected for
    # r is bounded by 1 - clip_low and 1 + clip_high; open: dropped there too
    band: Literal["", "closed", "open"] = ""
    per_row: bool = False  # one ratio for each answer: a mean over answers, not over tokens
    # tokens by covariance: the highest ones, or drawn inside a band
    selects: Literal["", "highest", "drawn"] = ""
    against_sampler: bool = False  # its anchor has to be the sampler
    # what clip_low and clip_high are between in use; outside, a note says so
    clips: tuple[float, float] = (0.02, 1.0)
    # of the data set's own answers: no anchor, and advantages do not matter
    supervised: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the `loss` section that belong to this loss."""
        return (*self.reads, *(f"params.{name}" for name in self.params))


def _clipped_surrogate(terms: Terms, ratio_BT: Tensor, config: LossConfig) -> Result:
    """The unweighted PPO loss for a given ratio."""
    a_B1 = terms.advantages_B1
    plain_BT = -a_B1 * ratio_BT
    bounded_BT = -a_B1 * ratio_BT.clamp(*_band(config))
    loss_BT = plain_BT.maximum(bounded_BT)
    active_BT = bounded_BT > plain_BT
    clipped = {
        "clip_fraction_high": active_BT & (a_B1 > 0),
        "clip_fraction_low": active_BT & (a_B1 < 0),
    }
    dual_clip = config.params["dual_clip"]
    if dual_clip is not None:
        ceiling_BT = (-dual_clip * a_B1).expand_as(loss_BT)
        clipped["dual_clip_fraction"] = (a_B1 < 0) & (loss_BT > ceiling_BT)
        loss_BT = loss_BT.minimum(ceiling_BT).where(a_B1 < 0, loss_BT)
    return loss_BT, clipped


def _band(config: LossConfig) -> tuple[float, float]:
    return 1.0 - config.clip_low, 1.0 + config.clip_high


def _ratio(terms: Terms, config: LossConfig) -> Tensor:
    if config.level == "token":
        return terms.ratio_BT
    return terms.shared_ratio_BT(config.level, config.aggregate, SHARED_EXPONENT_LIMIT)


def ppo(terms: Terms, config: LossConfig) -> Result:
    loss_BT, clipped = _clipped_surrogate(terms, _ratio(terms, config), config)
    return loss_BT * terms.weights_BT, clipped


def gspo(terms: Terms, config: LossConfig) -> Result:
    """The row's geometric ratio at every token; each token still carries its own gradient."""
    logprobs_BT = terms.logprobs_BT
    row_B1 = terms.row_mean(terms.shift_BT).detach()
    exponent_BT = (row_B1 + logprobs_BT - logprobs_BT.detach()).clamp(max=SHARED_EXPONENT_LIMIT)
    loss_BT, clipped = _clipped_surrogate(terms, exponent_BT.exp(), config)
    return loss_BT * terms.weights_BT, clipped


def cispo(terms: Terms, config: LossConfig) -> Result:
    """Clips the weight of the gradient, never the gradient itself."""
    ratio_BT = _ratio(terms, config).detach()
    low: float | None
    low, high = _band(config)
    if config.params["absolute"]:
        low = None
        high = config.clip_high
    clipped = {"clip_fraction_high": ratio_BT > high}
    if low is not None:
        clipped["clip_fraction_low"] = ratio_BT < low
    loss_BT = -ratio_BT.clamp(min=low, max=high) * terms.advantages_B1 * terms.logprobs_BT
    return loss_BT * terms.weights_BT, clipped


def sapo(terms: Terms, config: LossConfig) -> Result:
    # filled in the advantages' dtype: two plain numbers would make a float32 tensor
    tau_B1 = terms.advantages_B1.new_full(terms.advantages_B1.shape, config.params["tau_negative"])
    tau_B1 = tau_B1.masked_fill(terms.advantages_B1 > 0, config.params["tau_positive"])
    gate_BT = (tau_B1 * (terms.ratio_BT - 1.0)).sigmoid() * 4.0 / tau_B1
    return -terms.advantages_B1 * gate_BT * terms.weights_BT, {}


def gmpo(terms: Terms, config: LossConfig) -> Result:
    """GMPO: a loss per row, at each of its tokens; token weights enter as their geometric mean."""
    sign_B1 = terms.advantages_B1.sign()
    shift_BT = terms.shift_BT
    plain_BT = sign_B1 * shift_BT
    bounded_BT = sign_B1 * shift_BT.clamp(-config.clip_low, config.clip_high)
    row_B1 = terms.row_mean(sign_B1 * plain_BT.minimum(bounded_BT))
    weight_B1 = terms.row_mean(terms.weights_BT.masked_fill(~terms.mask_BT, 1.0).log()).exp()
    active_BT = bounded_BT < plain_BT
    clipped = {
        "clip_fraction_high": active_BT & (sign_B1 > 0),
        "clip_fraction_low": active_BT & (sign_B1 < 0),
    }
    loss_B1 = -terms.advantages_B1 * terms.exp(row_B1) * weight_B1
    return loss_B1.expand_as(shift_BT), clipped


def dppo(terms: Terms, config: LossConfig) -> Result:
    """DPPO: a token counts inside a trust region of probabilities, or if its step leads back."""
    logprobs_BT = terms.logprobs_BT.detach()
    anchor_BT = terms.anchor_BT
    prob_BT = logprobs_BT.clamp(max=0.0).exp()
    anchor_prob_BT = anchor_BT.clamp(max=0.0).exp()
    gap_BT = prob_BT - anchor_prob_BT
    if config.params["trust_region"] == "total_variation":
        too_high_BT = gap_BT > config.clip_high
        too_low_BT = gap_BT < -config.clip_low
    else:
        coins = (anchor_prob_BT, anchor_BT.clamp(max=0.0), prob_BT, logprobs_BT.clamp(max=0.0))
        kl_BT = _binary_kl(*coins, terms.rounding)
        too_high_BT = (kl_BT > config.clip_high) & (gap_BT > 0)
        too_low_BT = (kl_BT > config.clip_low) & (gap_BT < 0)
    positive_B1 = terms.advantages_B1 > 0
    leaving_BT = too_high_BT.where(positive_B1, too_low_BT)
    clipped = {
        "clip_fraction_high": leaving_BT & positive_B1,
        "clip_fraction_low": leaving_BT & ~positive_B1,
    }
    return -terms.advantages_B1 * terms.ratio_BT * ~leaving_BT * terms.weights_BT, clipped


def _binary_kl(
    p_BT: Tensor, log_p_BT: Tensor, q_BT: Tensor, log_q_BT: Tensor, tiny: float
) -> Tensor:
    """KL between Bernoulli p and q. Tails use log1p, bounded where a probability rounds to 1."""
    log_tail_p_BT = (-p_BT.clamp(max=1.0 - tiny)).log1p()
    log_tail_q_BT = (-q_BT.clamp(max=1.0 - tiny)).log1p()
    return p_BT * (log_p_BT - log_q_BT) + (1.0 - p_BT) * (log_tail_p_BT - log_tail_q_BT)


def _selected(terms: Terms, name: str) -> Tensor:
    if terms.selected_BT is None:
        raise ValueError(
            f"loss.name {name} needs LossInputs.selected_BT: select_by_covariance on the global "
            "batch"
        )
    return terms.selected_BT


def clip_cov(terms: Terms, config: LossConfig) -> Result:
    """PPO whose selected tokens, drawn from a band of covariances, give no gradient."""
    selected_BT = _selected(terms, "clip_cov")
    loss_BT, clipped = _clipped_surrogate(terms, terms.ratio_BT, config)
    loss_BT = loss_BT.detach().where(selected_BT, loss_BT)
    return loss_BT * terms.weights_BT, clipped | {"selected_fraction": selected_BT}


def kl_cov(terms: Terms, config: LossConfig) -> Result:
    """PPO whose selected tokens pay for their distance from the anchor."""
    selected_BT = _selected(terms, "kl_cov")
    loss_BT, clipped = _clipped_surrogate(terms, terms.ratio_BT, config)
    loss_BT = loss_BT + config.params["cov_kl_coef"] * terms.shift_BT.abs() * selected_BT
    return loss_BT * terms.weights_BT, clipped | {"selected_fraction": selected_BT}


def reinforce(terms: Terms, config: LossConfig) -> Result:
    return -terms.advantages_B1 * terms.logprobs_BT * terms.weights_BT, {}


def vespo(terms: Terms, config: LossConfig) -> Result:
    """The row's product W as a soft weight W^k exp(l - l W), 1 on policy and small far from it; k,
    l by the sign.
    """
    log_w_B1 = (
        terms.shift_BT.detach()
        .clamp(-HIGHEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
        .sum(dim=1, keepdim=True)
    )
    log_w_B1 = log_w_B1.clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
    fall_B1 = 1.0 - log_w_B1.exp()
    soft = [
        (k * log_w_B1 + rate * fall_B1).exp()
        for k, rate in (config.params["gamma_positive"], config.params["gamma_negative"])
    ]
    weight_BT = soft[0].where(terms.advantages_B1 >= 0, soft[1])
    return -weight_BT * terms.advantages_B1 * terms.logprobs_BT * terms.weights_BT, {}


def rollout_is(terms: Terms, config: LossConfig) -> Result:
    """The ratio as a detached weight inside an open band, nothing outside."""
    ratio_BT = terms.ratio_BT.detach()
    high_BT = ratio_BT >= 1.0 + config.clip_high
    low_BT = ratio_BT <= 1.0 - config.clip_low
    loss_BT = -ratio_BT * ~(high_BT | low_BT) * terms.advantages_B1 * terms.logprobs_BT
    return loss_BT * terms.weights_BT, {"clip_fraction_high": high_BT, "clip_fraction_low": low_BT}


def cross_entropy(terms: Terms, config: LossConfig) -> Result:
    return -terms.logprobs_BT * terms.weights_BT, {}


CLIP = ("clip_low", "clip_high")
SHARED = ("level", "aggregate")
DUAL = ("dual_clip",)
LOSSES = {
    "ppo": Loss(ppo, (*CLIP, *SHARED), DUAL, band="closed"),
    "gspo": Loss(gspo, CLIP, DUAL, band="closed", per_row=True, clips=(1e-5, 0.02)),
    "cispo": Loss(
        cispo,
        (*CLIP, *SHARED),
        ("absolute",),
        band="closed",
        clips=(0.02, 10.0),
    ),
    "sapo": Loss(sapo, (), ("tau_positive", "tau_negative")),
    "gmpo": Loss(gmpo, CLIP, per_row=True),
    "dppo": Loss(dppo, CLIP, ("trust_region",), clips=(1e-3, 1.0)),
    "clip_cov": Loss(
        clip_cov,
        CLIP,
        (*DUAL, "cov_fraction", "cov_low", "cov_high"),
        band="closed",
        selects="drawn",
    ),
    "kl_cov": Loss(
        kl_cov, CLIP, (*DUAL, "cov_fraction", "cov_kl_coef"), band="closed", selects="highest"
    ),
    "vespo": Loss(vespo, (), ("gamma_positive", "gamma_negative"), against_sampler=True),
    "reinforce": Loss(reinforce, ratio=False),
    "rollout_is": Loss(rollout_is, CLIP, band="open", clips=(0.02, 10.0), against_sampler=True),
    "cross_entropy": Loss(cross_entropy, ratio=False, supervised=True),
}


def losses(holds: Callable[[Loss], object]) -> tuple[str, ...]:
    """Names of the losses for which `holds` is true."""
    return tuple(name for name, loss in LOSSES.items() if holds(loss))
