"""Table of policy losses (ppo, gspo, cispo, dppo, ...): formula per token, keys, demands on recipe.

A new loss is a function here and a row of `LOSSES`; `loss.name`, the checks of the config and the
default reduction follow the table. The config reads it too, which loads no torch: formulas call the
methods of their tensors, and what needs torch itself is a method of `Terms`.

A formula returns the weighted loss of every token, and where its clip was active. Positions outside
the mask may hold anything: the reduction drops them. a: anchor logprob, x = pi - a, r = exp(x).

Shape legend: N response tokens.
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
    # weighted loss of each token, and masks of active clips by metric name
    formula: Callable[[Terms, LossConfig], Result]
    # keys of the `loss` section that the formula reads, of clip_low, clip_high, level, aggregate
    reads: tuple[str, ...] = ()
    # keys of `loss.params` that it reads; each is a field of LossParams with its default
    params: tuple[str, ...] = ()
    # True if the loss multiplies by pi / anchor, detached or not. With correction.anchor=sampler
    # that ratio is the correction, and the config refuses a rollout weight beside it
    ratio: bool = True
    # effect of clip_low and clip_high on the ratio, for the config's checks of the two; closed: it
    # is clipped to [1 - clip_low, 1 + clip_high]; open: tokens at or beyond these bounds have no
    # loss; empty for a clip on one side
    band: Literal["", "closed", "open"] = ""
    # True if all tokens of a response share a ratio: the default reduction is seq_mean_token_mean,
    # and token_mean is refused
    per_row: bool = False
    # tokens in `terms.selected_N`, by covariance of logprob and advantage: the highest, or a random
    # draw between cov_low and cov_high; the anchor has to be prox
    selects: Literal["", "highest", "drawn"] = ""
    against_sampler: bool = False  # True if correction.anchor has to be sampler
    # usual range of clip_low and clip_high; a note warns outside of it
    clips: tuple[float, float] = (0.02, 1.0)
    # True if a token's clip depends on the sign of its advantage, which correction.center leaves out
    by_sign: bool = False
    # True if the loss trains on the data set's answers, without anchor and advantages
    supervised: bool = False
    # True if, at level token, the loss of a token is a function of its own numbers alone, which
    # correction.center needs
    elementwise: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the `loss` section that belong to this loss."""
        return (*self.reads, *(f"params.{name}" for name in self.params))


def _clipped_surrogate(terms: Terms, ratio_N: Tensor, config: LossConfig) -> Result:
    """The unweighted PPO loss for a given ratio."""
    a_N = terms.advantages_N
    plain_N = -a_N * ratio_N
    bounded_N = -a_N * ratio_N.clamp(*_band(config))
    loss_N = plain_N.maximum(bounded_N)
    clipped = _by_sign(bounded_N > plain_N, a_N)
    dual_clip = config.params["dual_clip"]
    if dual_clip is not None:
        ceiling_N = -dual_clip * a_N
        clipped["dual_clip_fraction"] = (a_N < 0) & (loss_N > ceiling_N)
        loss_N = loss_N.minimum(ceiling_N).where(a_N < 0, loss_N)
    return loss_N, clipped


def _by_sign(active_N: Tensor, advantages_N: Tensor) -> dict[str, Tensor]:
    """Split the mask of active clips by the sign of the advantage."""
    return {
        "clip_fraction_high": active_N & (advantages_N > 0),
        "clip_fraction_low": active_N & (advantages_N < 0),
    }


def _band(config: LossConfig) -> tuple[float, float]:
    return 1.0 - config.clip_low, 1.0 + config.clip_high


def _ratio(terms: Terms, config: LossConfig) -> Tensor:
    if config.level == "token":
        return terms.ratio_N
    return terms.shared_ratio_N(config.level, config.aggregate, SHARED_EXPONENT_LIMIT)


def ppo(terms: Terms, config: LossConfig) -> Result:
    loss_N, clipped = _clipped_surrogate(terms, _ratio(terms, config), config)
    return loss_N * terms.weights_N, clipped


def gspo(terms: Terms, config: LossConfig) -> Result:
    """The row's geometric ratio at every token; each token still carries its own gradient."""
    logprobs_N = terms.logprobs_N
    row_N = terms.row_mean(terms.shift_N)
    exponent_N = (row_N + logprobs_N - logprobs_N.detach()).clamp(max=SHARED_EXPONENT_LIMIT)
    loss_N, clipped = _clipped_surrogate(terms, exponent_N.exp(), config)
    return loss_N * terms.weights_N, clipped


def cispo(terms: Terms, config: LossConfig) -> Result:
    """Clips the weight of the gradient, never the gradient itself."""
    ratio_N = _ratio(terms, config).detach()
    low: float | None
    low, high = _band(config)
    if config.params["absolute"]:
        low = None
        high = config.clip_high
    clipped = {"clip_fraction_high": ratio_N > high}
    if low is not None:
        clipped["clip_fraction_low"] = ratio_N < low
    loss_N = -ratio_N.clamp(min=low, max=high) * terms.advantages_N * terms.logprobs_N
    return loss_N * terms.weights_N, clipped


def sapo(terms: Terms, config: LossConfig) -> Result:
    # filled in the advantages' dtype: two plain numbers would make a float32 tensor
    tau_N = terms.advantages_N.new_full(terms.advantages_N.shape, config.params["tau_negative"])
    tau_N = tau_N.masked_fill(terms.advantages_N > 0, config.params["tau_positive"])
    gate_N = (tau_N * (terms.ratio_N - 1.0)).sigmoid() * 4.0 / tau_N
    return -terms.advantages_N * gate_N * terms.weights_N, {}


def gmpo(terms: Terms, config: LossConfig) -> Result:
    """GMPO: a loss per row, at each of its tokens; token weights enter as their geometric mean."""
    sign_N = terms.advantages_N.sign()
    shift_N = terms.shift_N
    plain_N = sign_N * shift_N
    bounded_N = sign_N * shift_N.clamp(-config.clip_low, config.clip_high)
    step_N = sign_N * plain_N.minimum(bounded_N)
    # the token carries its own part of the gradient and no other's
    row_N = terms.row_mean(step_N) + step_N - step_N.detach()
    weight_N = terms.row_mean(terms.weights_N.masked_fill(~terms.mask_N, 1.0).log()).exp()
    clipped = _by_sign(bounded_N < plain_N, sign_N)
    return -terms.advantages_N * terms.exp(row_N) * weight_N, clipped


def dppo(terms: Terms, config: LossConfig) -> Result:
    """DPPO: a token counts inside a trust region of probabilities, or if its step leads back."""
    logprobs_N = terms.logprobs_N.detach()
    anchor_N = terms.anchor_N
    prob_N = logprobs_N.clamp(max=0.0).exp()
    anchor_prob_N = anchor_N.clamp(max=0.0).exp()
    gap_N = prob_N - anchor_prob_N
    if config.params["trust_region"] == "total_variation":
        too_high_N = gap_N > config.clip_high
        too_low_N = gap_N < -config.clip_low
    else:
        coins = (anchor_prob_N, anchor_N.clamp(max=0.0), prob_N, logprobs_N.clamp(max=0.0))
        kl_N = _binary_kl(*coins, terms.rounding)
        too_high_N = (kl_N > config.clip_high) & (gap_N > 0)
        too_low_N = (kl_N > config.clip_low) & (gap_N < 0)
    positive_N = terms.advantages_N > 0
    leaving_N = too_high_N.where(positive_N, too_low_N)
    clipped = {
        "clip_fraction_high": leaving_N & positive_N,
        "clip_fraction_low": leaving_N & ~positive_N,
    }
    return -terms.advantages_N * terms.ratio_N * ~leaving_N * terms.weights_N, clipped


def _binary_kl(p_N: Tensor, log_p_N: Tensor, q_N: Tensor, log_q_N: Tensor, tiny: float) -> Tensor:
    """KL between Bernoulli p and q. Tails use log1p, bounded where a probability rounds to 1."""
    log_tail_p_N = (-p_N.clamp(max=1.0 - tiny)).log1p()
    log_tail_q_N = (-q_N.clamp(max=1.0 - tiny)).log1p()
    return p_N * (log_p_N - log_q_N) + (1.0 - p_N) * (log_tail_p_N - log_tail_q_N)


def clip_cov(terms: Terms, config: LossConfig) -> Result:
    """PPO whose selected tokens, drawn from a band of covariances, give no gradient."""
    assert terms.selected_N is not None
    loss_N, clipped = _clipped_surrogate(terms, terms.ratio_N, config)
    loss_N = loss_N.detach().where(terms.selected_N, loss_N)
    return loss_N * terms.weights_N, clipped | {"selected_fraction": terms.selected_N}


def kl_cov(terms: Terms, config: LossConfig) -> Result:
    """PPO whose selected tokens pay for their distance from the anchor."""
    assert terms.selected_N is not None
    loss_N, clipped = _clipped_surrogate(terms, terms.ratio_N, config)
    loss_N = loss_N + config.params["cov_kl_coef"] * terms.shift_N.abs() * terms.selected_N
    return loss_N * terms.weights_N, clipped | {"selected_fraction": terms.selected_N}


def reinforce(terms: Terms, config: LossConfig) -> Result:
    return -terms.advantages_N * terms.logprobs_N * terms.weights_N, {}


def vespo(terms: Terms, config: LossConfig) -> Result:
    """The row's product W as a soft weight W^k exp(l - l W), 1 on policy and small far from it; k,
    l by the sign.
    """
    bounded_N = terms.shift_N.detach().clamp(-HIGHEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
    log_w_N = terms.row_sum(bounded_N).clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
    fall_N = 1.0 - log_w_N.exp()
    soft = [
        (k * log_w_N + rate * fall_N).exp()
        for k, rate in (config.params["gamma_positive"], config.params["gamma_negative"])
    ]
    weight_N = soft[0].where(terms.advantages_N >= 0, soft[1])
    return -weight_N * terms.advantages_N * terms.logprobs_N * terms.weights_N, {}


def rollout_is(terms: Terms, config: LossConfig) -> Result:
    """The ratio as a detached weight inside an open band, nothing outside."""
    ratio_N = terms.ratio_N.detach()
    high_N = ratio_N >= 1.0 + config.clip_high
    low_N = ratio_N <= 1.0 - config.clip_low
    loss_N = -ratio_N * ~(high_N | low_N) * terms.advantages_N * terms.logprobs_N
    return loss_N * terms.weights_N, {"clip_fraction_high": high_N, "clip_fraction_low": low_N}


def cross_entropy(terms: Terms, config: LossConfig) -> Result:
    return -terms.logprobs_N * terms.weights_N, {}


CLIP = ("clip_low", "clip_high")
SHARED = ("level", "aggregate")
DUAL = ("dual_clip",)
LOSSES = {
    "ppo": Loss(ppo, (*CLIP, *SHARED), DUAL, band="closed", by_sign=True),
    "gspo": Loss(
        gspo, CLIP, DUAL, band="closed", per_row=True, clips=(1e-5, 0.02), elementwise=False
    ),
    "cispo": Loss(
        cispo,
        (*CLIP, *SHARED),
        ("absolute",),
        band="closed",
        clips=(0.02, 10.0),
    ),
    "sapo": Loss(sapo, (), ("tau_positive", "tau_negative"), by_sign=True),
    "gmpo": Loss(gmpo, CLIP, per_row=True, elementwise=False),
    "dppo": Loss(dppo, CLIP, ("trust_region",), clips=(1e-3, 1.0), by_sign=True),
    "clip_cov": Loss(
        clip_cov,
        CLIP,
        (*DUAL, "cov_fraction", "cov_low", "cov_high"),
        band="closed",
        selects="drawn",
        elementwise=False,
    ),
    "kl_cov": Loss(
        kl_cov,
        CLIP,
        (*DUAL, "cov_fraction", "cov_kl_coef"),
        band="closed",
        selects="highest",
        elementwise=False,
    ),
    "vespo": Loss(
        vespo, (), ("gamma_positive", "gamma_negative"), against_sampler=True, elementwise=False
    ),
    "reinforce": Loss(reinforce, ratio=False),
    "rollout_is": Loss(rollout_is, CLIP, band="open", clips=(0.02, 10.0), against_sampler=True),
    "cross_entropy": Loss(cross_entropy, ratio=False, supervised=True, elementwise=False),
}


def losses(holds: Callable[[Loss], object]) -> tuple[str, ...]:
    """Names of the losses for which `holds` is true."""
    return tuple(name for name, loss in LOSSES.items() if holds(loss))
