"""Settings that anchor the loss on the sampler: native keys, and the loss of a token as they compute it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from translation_oracle import band, row_max, row_mean, row_sum, verl_rs


def verl_in_loss(loss_mode: str = "bypass_mode", **settings: Any) -> dict[str, Any]:
    """Bypass as verl's documentation writes it for its default trainer: the settings inside the loss."""
    policy_loss = {"loss_mode": loss_mode, "rollout_correction": settings}
    return {"actor_rollout_ref": {"actor": {"use_rollout_log_probs": True, "policy_loss": policy_loss}}}


BYPASSES: list[tuple[str, dict[str, Any]]] = [
    ("verl", {"bypass_mode": True, "rollout_is": "token"}),
    ("verl", {"algorithm": {"rollout_correction": {"bypass_mode": True}}, "trainer": {"use_v1": True}}),
    ("verl", {"actor_rollout_ref.actor.policy_loss.loss_mode": "bypass_mode"}),
    ("verl", {"algorithm.rollout_correction.bypass_mode": True, **verl_in_loss(rollout_is="token")}),
    ("skyrl", {"trainer": {"algorithm": {"policy_loss_type": "rollout_is", "off_policy_correction": {}}}}),
    ("skyrl", {"trainer.algorithm": {"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}}}),
    ("areal", {"use_decoupled_loss": False}),
    ("slime", {"use_rollout_logprobs": True}),
    ("openrlhf", {"is_correction_enable": True, "policy_loss_type": "gspo"}),
    ("fireworks", {"anchor_logp": "rollout", "tis": {"cap": 2.0}}),
]


def surrogate(x: Tensor, advantages_B1: Tensor) -> Tensor:
    """PPO's loss of a token with the default clip range of 0.2."""
    return torch.maximum(-advantages_B1 * x.exp(), -advantages_B1 * x.exp().clamp(0.8, 1.2))


def verl_band(x: Tensor, m: Tensor, low: float, high: float) -> Tensor:
    return band(row_mean(-x, m).exp(), low, high)


def prime_dppo(x: Tensor, pi: Tensor, a: Tensor, m: Tensor) -> Tensor:
    gap = pi.clamp(max=0.0).exp() - (pi - x).exp()
    return -a * x.exp() * ~torch.where(a > 0, gap > 0.2, gap < -0.2)


# a token's loss from x = pi - mu, pi, advantages and mask; every loss is divided by all response tokens
TWO_POLICIES: list[tuple[str, dict[str, Any], str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = [
    ("verl", {"bypass_mode": True}, "ppo", lambda x, pi, a, m: surrogate(x, a)),
    ("verl", {"bypass_mode": True, **verl_rs("seq_mean_k1", "0.8_1.1")}, "ppo",
     lambda x, pi, a, m: surrogate(x, a) * verl_band(x, m, 0.8, 1.1)),
    ("verl", {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence", **verl_rs("token_k2", "0.1")},
     "reinforce", lambda x, pi, a, m: -a * pi * row_sum(x, m).exp().clamp(max=2.0) * (x**2 / 2 <= 0.1)),
    ("verl", {"algorithm.rollout_correction": {"bypass_mode": True, "loss_type": "ppo_clip"},
     **verl_in_loss(loss_type="reinforce", rollout_is="token", **verl_rs("seq_mean_k1", "0.8_1.1"))}, "reinforce",
     lambda x, pi, a, m: -a * pi * x.exp().clamp(max=2.0) * verl_band(x, m, 0.8, 1.1)),
    ("verl", {"trainer.use_v1": True, **verl_in_loss(rollout_is="token", **verl_rs("token_k2", "0.05"))}, "ppo",
     lambda x, pi, a, m: surrogate(x, a) * (x**2 / 2 <= 0.05)),
    ("areal", {"use_decoupled_loss": False}, "ppo", lambda x, pi, a, m: surrogate(x, a)),
    ("slime", {"use_rollout_logprobs": True, "use_opsm": True, "opsm_delta": 0.1}, "ppo",
     lambda x, pi, a, m: surrogate(x, a) * ~((a < 0) & (row_mean(-x, m) > 0.1))),
    ("fireworks", {"anchor_logp": "rollout"}, "ppo", lambda x, pi, a, m: surrogate(x, a)),
    ("openrlhf", {"is_correction_enable": True, "policy_loss_type": "gspo"}, "gspo",
     lambda x, pi, a, m: surrogate(row_mean(x, m), a).expand_as(x)),
    ("skyrl", {"trainer.algorithm.policy_loss_type": "rollout_is", "trainer.algorithm.eps_clip_low": 0.2}, "rollout_is",
     lambda x, pi, a, m: -a * pi * x.exp() * ((x.exp() > 0.8) & (x.exp() < 1.2))),
    ("skyrl", {"trainer.algorithm": {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout",
     "off_policy_correction": {"outlier_token_is_threshold_high": 1.6}}}, "cispo",
     lambda x, pi, a, m: -a * pi * x.exp().clamp(0.8, 1.2) * (row_max(x, m).exp() <= 1.6)),
    ("prime_rl", {"trainer.loss": {"type": "default", "kl_tau": 0.0, "adv_tau": 1.0, "dppo_mask_low": 0.2}}, "dppo",
     prime_dppo),
]  # fmt: skip
