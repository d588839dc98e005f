"""Other projects' settings, with their formulas in plain float64.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -2.0, -1.0, 1.0, -1.0, 2.0])


class Theirs:
    """Parts of their formulas, from logprobs `p` of a policy and `mu` of the sampler."""

    def __init__(self, p: Tensor, mu: Tensor, m: Tensor) -> None:
        self.p = p
        self.mu = mu
        self.m = m
        self.a = ADVANTAGES[:, None].double()
        self.d = p - mu
        self.rho = self.d.exp()
        self.k2 = self.d**2 / 2
        self.k3 = self.rho - 1 - self.d
        # probabilities of the token
        self.heads = p.clamp(max=-1e-9).exp()
        self.sampled = mu.clamp(max=-1e-9).exp()
        # ratios of a row
        self.product, self.mean = (
            self.sum(self.d).exp(),
            self.average(self.d).exp(),
        )

    def sum(self, x: Tensor) -> Tensor:
        return (x * self.m).sum(1, keepdim=True)

    def average(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.m.sum(1, keepdim=True).clamp(min=1)

    def max(self, x: Tensor) -> Tensor:
        return x.masked_fill(~self.m, -math.inf).amax(1, keepdim=True)

    def all(self, x: Tensor) -> Tensor:
        return (x | ~self.m).all(1, keepdim=True)

    def binary_kl(self, one: Tensor, other: Tensor) -> Tensor:
        return one * (one / other).log() + (1 - one) * ((1 - one) / (1 - other)).log()

    def surrogate(self, x: Tensor) -> Tensor:
        """PPO's loss of a token with the default clip range of 0.2."""
        return torch.maximum(-self.a * x.exp(), -self.a * x.exp().clamp(0.8, 1.2))


def data(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mu_BT = -torch.rand(10, 6, generator=generator, dtype=torch.float64) * 3
    noise_BT = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    d_BT = 0.3 * (
        noise_BT
        + torch.randn(
            10,
            1,
            generator=generator,
            dtype=torch.float64,
        )
    )
    lengths_B = torch.randint(1, 7, (10,), generator=generator)
    return (
        (mu_BT + d_BT).clamp(max=-1e-3),
        mu_BT,
        torch.arange(6)[None]
        < lengths_B[
            :,
            None,
        ],
    )


def band(values: Tensor, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)


def prefixed(prefix: str, **keys: Any) -> dict[str, Any]:
    return {prefix + name: value for name, value in keys.items()}


trl = partial(prefixed, "vllm_importance_sampling_")
nemo = partial(prefixed, "truncated_importance_sampling_")  # beside NEMO_ON
openrlhf = partial(prefixed, "is_correction_")
OLD = "mask_offpolicy_in_partial_rollout"
TOKEN_MASK = {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
NEMO_ON, NEMO_OFF = ({"use_importance_sampling_correction": on} for on in (True, False))
ICEPOP = {"custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function"}
MIS = {
    "custom_tis_function_path": "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
}
AGG = "actor_rollout_ref.actor.loss_agg_mode"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"


def areal(**keys: Any) -> dict[str, Any]:
    return {"rejection_sampling": keys}


def skyrl(algorithm: dict[str, Any], **correction: Any) -> dict[str, Any]:
    return {"trainer.algorithm": {**algorithm, "off_policy_correction": correction}}


def slime_mis(**keys: Any) -> dict[str, Any]:
    return {"use_tis": True, **MIS, **keys}


def verl_rs(option: str, threshold: str) -> dict[str, Any]:
    return {"rollout_rs": option, "rollout_rs_threshold": threshold}


def verl_run(correction: dict[str, Any], **about: Any) -> dict[str, Any]:
    """The settings in a run's configuration; `about`: use_v1, agg, loss."""
    names = {"use_v1": "trainer.use_v1", "agg": AGG, "loss": LOSS}
    return {"algorithm.rollout_correction": correction} | {
        names[name]: value for name, value in about.items()
    }


def verl_in_loss(loss_mode: str = "bypass_mode", **settings: Any) -> dict[str, Any]:
    """Bypass as in verl's documentation of its default trainer: settings inside the loss."""
    policy_loss = {"loss_mode": loss_mode, "rollout_correction": settings}
    return {
        "actor_rollout_ref": {"actor": {"use_rollout_log_probs": True, "policy_loss": policy_loss}}
    }


# the multiplier of each token's loss; where rejected tokens leave the denominator too, beside it
# those that stay
Formula = Callable[[Theirs], Tensor | tuple[Tensor | float, Tensor]]
CASES: dict[str, list[tuple[str, dict[str, Any], Formula]]] = {
    "verl": [
        (
            "lo_hi masks",
            prefixed(
                "algorithm.rollout_correction.", rollout_is="token", rollout_is_threshold="0.5_1.5"
            ),
            lambda x: x.rho * band(x.rho, 0.5, 1.5),
        ),
        (
            "batch normalize",
            {
                "rollout_is": "token",
                "rollout_is_threshold": 1.5,
                "rollout_is_batch_normalize": True,
            },
            lambda x: x.rho.clamp(max=1.5) / x.rho.clamp(max=1.5)[x.m].mean(),
        ),
        (
            "seq_mean_k1 acts on 1 / rho",
            verl_rs("seq_mean_k1", "0.7_1.1"),
            lambda x: (1.0, band(1 / x.mean, 0.7, 1.1)),
        ),
        (
            "token_k1",
            verl_rs("token_k1", "0.6_1.2"),
            lambda x: (1.0, band(1 / x.rho, 0.6, 1.2)),
        ),
        (
            "chained",
            verl_rs("token_k2,seq_max_k3", "0.1,0.3"),
            lambda x: (1.0, (x.k2 <= 0.1) & (x.max(x.k3) <= 0.3)),
        ),
        (
            "seq_sum_k2 and token TIS",
            {**verl_rs("seq_sum_k2", "0.2"), "rollout_is": "token"},
            lambda x: (x.rho.clamp(max=2.0), x.sum(x.k2) <= 0.2),
        ),
        (
            "sequence weights normalized over rows",
            {
                "rollout_is": "sequence",
                "rollout_is_threshold": "1.5",
                "rollout_is_batch_normalize": "true",
            },
            lambda x: x.product.clamp(max=1.5) / x.product.clamp(max=1.5)[x.m.any(1)].mean(),
        ),
        (
            "all tokens count under the new trainer",
            {
                "algorithm": {
                    "adv_estimator": "grpo",
                    "rollout_correction": verl_rs("token_k2", "0.05"),
                },
                "trainer": {"use_v1": True, "n_gpus_per_node": 8},
                "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean", "clip_ratio": 0.2}},
            },
            lambda x: (x.k2 <= 0.05) * 1.0,
        ),
        (
            "all rows count with a mean over sequences",
            verl_run(verl_rs("seq_mean_k1", "1.1"), use_v1=False, agg="seq-mean-token-mean"),
            lambda x: band(x.mean, 1 / 1.1, 1.1) * 1.0,
        ),
        (
            "the legacy trainer counts what is left",
            verl_run(verl_rs("token_k1", "0.8_1.3"), use_v1=False, agg="token-mean"),
            lambda x: (1.0, band(1 / x.rho, 0.8, 1.3)),
        ),
        (
            "removed settings that are null are off",
            {"rollout_is": "token", "rollout_is_veto_threshold": None, "rollout_is_level": "null"},
            lambda x: x.rho.clamp(max=2.0),
        ),
    ],
    "skyrl": [
        ("token TIS", {"tis_ratio_type": "token"}, lambda x: x.rho.clamp(max=2.0)),
        (
            "deprecated keys",
            skyrl({"use_tis": True, "tis_imp_ratio_cap": 1.3}),
            lambda x: x.rho.clamp(max=1.3),
        ),
        (
            "sequence TIS",
            {"trainer.algorithm.off_policy_correction.tis_ratio_type": "sequence"},
            lambda x: x.product.clamp(max=5.0),
        ),
        (
            "geometric mask",
            {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.2},
            lambda x: band(x.mean, 0.9, 1.2) * 1.0,
        ),
        (
            "product mask with its defaults",
            {"sequence_mask_metric": "product"},
            lambda x: band(x.product, 0.5, 2.0) * 1.0,
        ),
        (
            "outliers on both sides",
            prefixed("outlier_token_is_threshold_", low=0.6, high=1.5),
            lambda x: x.all(band(x.rho, 0.6, 1.5)) * 1.0,
        ),
        (
            "token mask with token TIS and outliers",
            {
                "tis_ratio_type": "token",
                "token_tis_ratio_clip_high": 1.2,
                "outlier_token_is_threshold_high": 2.0,
            }
            | prefixed("token_mask_is_threshold_", low=0.7, high=1.4),
            lambda x: x.rho.clamp(max=1.2) * band(x.rho, 0.7, 1.4) * x.all(x.rho <= 2.0),
        ),
    ],
    "trl": [
        ("defaults: sequence_mask 3", {}, lambda x: x.product * (x.product <= 3.0)),
        (
            "token_truncate with both bounds",
            trl(mode="token_truncate", clip_min=0.8, clip_max=1.3),
            lambda x: x.rho.clamp(0.8, 1.3),
        ),
        (
            "token_truncate with the former name of the cap",
            trl(mode="token_truncate", cap=1.4, clip_max=9.0, clip_min=0.0),
            lambda x: x.rho.clamp(max=1.4),
        ),
        (
            "sequence_truncate",
            trl(mode="sequence_truncate", clip_max=2.0),
            lambda x: x.product.clamp(max=2.0),
        ),
        (
            "off-policy sequence mask",
            {"use_vllm": False, "off_policy_mask_threshold": 0.1},
            lambda x: ((x.a >= 0) | (-x.mean.log() <= 0.1)) * 1.0,
        ),
        (
            "0.23 to 0.25: a cap without a mode truncates tokens",
            {"use_vllm": True, "beta": 0.1, **trl(correction=True, cap=1.3)},
            lambda x: x.rho.clamp(max=1.3),
        ),
        (
            "a cap without a mode beside a later key masks rows",
            {**trl(cap=1.3), "num_generations_eval": 4},
            lambda x: x.product * (x.product <= 1.3),
        ),
    ],
    "nemo_rl": [
        ("off", {"loss_fn": NEMO_OFF}, lambda x: x.m * 1.0),
        ("unbounded", {"loss_fn.use_importance_sampling_correction": True}, lambda x: x.rho),
        (
            "icepop per sequence",
            {
                "sequence_level_importance_ratios": True,
                **nemo(type="icepop", ratio=1.5, ratio_min=0.7),
            },
            lambda x: x.product * band(x.product, 0.7, 1.5),
        ),
        (
            "the error threshold alone",
            {"ppo": {"seq_logprob_error_threshold": 1.4}, "loss_fn": NEMO_OFF},
            lambda x: (1.0, x.average(x.d.abs().exp()) <= 1.4),
        ),
        (
            "icepop and the error threshold",
            {
                "grpo": {"seq_logprob_error_threshold": 1.5},
                "loss_fn": NEMO_ON | nemo(type="icepop", ratio=1.5, ratio_min=0.5),
            },
            lambda x: (x.rho * band(x.rho, 0.5, 1.5), x.average(x.d.abs().exp()) <= 1.5),
        ),
        (
            "seq-mask-tis",
            NEMO_ON | nemo(type="seq-mask-tis", ratio=1.2, ratio_min=0.8),
            lambda x: x.rho * band(x.mean, 0.8, 1.2),
        ),
    ],
    "areal": [
        (
            "token mask",
            areal(upper=1.5, lower=0.7),
            lambda x: x.rho * band(x.rho, 0.7, 1.5),
        ),
        (
            "token clamp",
            {"actor": {"use_decoupled_loss": True, **areal(action="clamp", upper=1.2)}},
            lambda x: x.rho.clamp(max=1.2),
        ),
        (
            "sequence mask",
            areal(level="sequence", upper=1.1, lower=0.9),
            lambda x: x.mean * band(x.mean, 0.9, 1.1),
        ),
        (
            "its k1 is +d",
            areal(level="sequence", metric="kl_k1", upper=0.1, lower=-0.3),
            lambda x: x.rho * band(x.mean.log(), -0.3, 0.1),
        ),
        (
            "the largest +d",
            areal(level="sequence", metric="kl_k1", agg="max", upper=0.3, lower=0.05),
            lambda x: x.rho * band(x.max(x.d), 0.05, 0.3),
        ),
        (
            "the sum of +d, with a bound whose exponential is infinite",
            areal(level="sequence", metric="kl_k1", agg="sum", upper=1000, lower=-0.4),
            lambda x: x.rho * (x.sum(x.d) >= -0.4),
        ),
        (
            "token k2",
            {
                "actor.rejection_sampling": {"metric": "kl_k2", "upper": 0.04},
                "actor.use_decoupled_loss": True,
            },
            lambda x: x.rho * (x.k2 <= 0.04),
        ),
        (
            "the largest ratio decides, the mean weighs",
            areal(level="sequence", agg="max", upper=1.5, lower=1.05),
            lambda x: x.mean * band(x.max(x.rho), 1.05, 1.5),
        ),
        (
            "the product decides, the mean is clamped",
            areal(level="sequence", agg="sum", action="clamp", upper=1.1, lower=0.95),
            lambda x: torch.where(
                band(x.product, 0.95, 1.1),
                x.mean,
                x.mean.clamp(0.95, 1.1),
            ),
        ),
        (
            "KPop: the larger KL of the two directions",
            areal(metric="binary_kl", upper=0.02),
            lambda x: (
                x.rho
                * (
                    torch.maximum(x.binary_kl(x.heads, x.sampled), x.binary_kl(x.sampled, x.heads))
                    <= 0.02
                )
            ),
        ),
        ("decoupled, nothing else", {"use_decoupled_loss": True}, lambda x: x.m * 1.0),
    ],
    "slime": [
        (
            "TIS",
            {"--use-tis": True, "--tis-clip": 1.5},
            lambda x: x.rho.clamp(0, 1.5),
        ),
        (
            "CIS",
            {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.8},
            lambda x: x.rho.clamp(0.8, 1.5),
        ),
        (
            "icepop",
            {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.8, **ICEPOP},
            lambda x: x.rho * band(x.rho, 0.8, 1.5),
        ),
        (
            "mis: truncate, reject and veto",
            slime_mis(
                tis_upper_bound=1.5,
                use_rs=True,
                rs_level="geometric",
                rs_lower_bound=0.9,
                rs_veto_threshold=0.5,
            ),
            lambda x: x.rho.clamp(max=1.5) * band(x.mean, 0.9, 1.5) * x.all(x.rho >= 0.5),
        ),
        (
            "mis: clip by sequence, normalized",
            slime_mis(
                tis_level="sequence", tis_mode="clip", tis_upper_bound=2.0, tis_batch_normalize=True
            ),
            lambda x: x.product.clamp(0.5, 2.0) / x.product.clamp(0.5, 2.0).mean(),
        ),
        (
            "icepop that is only asked for metrics weighs all the same",
            {"get_mismatch_metrics": True, "tis_clip": 1.5, **ICEPOP},
            lambda x: x.rho * (x.rho <= 1.5),
        ),
        (
            "mis: geometric clip, product rejection with its own upper bound",
            slime_mis(
                tis_level="geometric",
                tis_mode="clip",
                tis_upper_bound=1.1,
                use_rs=True,
                rs_level="sequence",
                rs_upper_bound=1.7,
            ),
            lambda x: x.mean.clamp(1 / 1.1, 1.1) * band(x.product, 1 / 1.1, 1.7),
        ),
        (
            "mis: mask",
            slime_mis(tis_mode="mask", tis_upper_bound=1.4, tis_lower_bound=0.6),
            lambda x: x.rho * band(x.rho, 0.6, 1.4),
        ),
    ],
    "openrlhf": [
        (
            "tis with its defaults",
            {"--algo.advantage.is_correction_enable": True},
            lambda x: x.rho.clamp(0.5, 5.0),
        ),
        (
            "icepop under its old names",
            {
                "enable_vllm_is_correction": True,
                "vllm_is_truncated_threshold": [0.7, 1.3],
                "vllm_is_correction_type": "icepop",
            },
            lambda x: x.rho * band(x.rho, 0.7, 1.3),
        ),
        (
            "seq-mask-tis",
            openrlhf(enable=True, type="seq-mask-tis", threshold=[0.9, 1.2]),
            lambda x: x.rho * band(x.mean, 0.9, 1.2),
        ),
        (
            "token / clip",
            {
                "algo": {"advantage": openrlhf(level="token", mode="clip")},
                **openrlhf(gating="ratio", threshold="0.9 1.1"),
            },
            lambda x: x.rho.clamp(0.9, 1.1),
        ),
        (
            "seq / mask with an upper bound alone",
            openrlhf(level="seq", threshold=[1.05]),
            lambda x: x.rho * (x.mean <= 1.05),
        ),
        (
            "tokens gated by the binary KL",
            openrlhf(level="token", gating="binary_kl", threshold=[0.01]),
            lambda x: x.rho * (x.binary_kl(x.sampled, x.heads) <= 0.01),
        ),
        (
            "tokens gated by total variation",
            openrlhf(level="token", gating="tv", threshold=[0, 0.1]),
            lambda x: x.rho * ((x.heads - x.sampled).abs() <= 0.1),
        ),
        (
            "the cap of its first version",
            {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": 1.2},
            lambda x: x.rho.clamp(max=1.2),
        ),
    ],
    "fireworks": [
        (
            "inside a provision file",
            {
                "common": {"base_model": "m"},
                "recipe": {"rl": {"trainer": "policy", "tis": {"cap": 1.2}}},
            },
            lambda x: x.rho.clamp(max=1.2),
        ),
        ("defaults", {}, lambda x: x.rho.clamp(max=5.0)),
        (
            "sequence",
            {"tis": {"cap": 1.1, "level": "sequence"}},
            lambda x: x.mean.clamp(max=1.1),
        ),
        (
            "icepop above the cap",
            {"tis": {"icepop_threshold": 2.0, "cap": 1.2}, "anchor_logp": "old_policy"},
            lambda x: x.rho.clamp(max=1.2) * band(x.rho, 0.5, 2.0),
        ),
    ],
}


def prime_dppo(x: Theirs) -> Tensor:
    gap = x.p.clamp(max=0.0).exp() - x.mu.exp()
    return -x.a * x.rho * ~torch.where(x.a > 0, gap > 0.2, gap < -0.2)


def trl_vespo(x: Theirs) -> Tensor:
    k = torch.where(x.a >= 0, 2.0, 2.0)
    rate = torch.where(x.a >= 0, 3.0, 2.0)
    return -x.a * x.p * (rate + k * x.product.log() - rate * x.product).exp()


# settings that anchor the loss on the sampler, and a token's loss; every loss is divided by all
# response tokens
TWO_POLICIES: list[tuple[str, dict[str, Any], str, Callable[[Theirs], Tensor]]] = [
    (
        "verl",
        {"bypass_mode": True, **verl_rs("seq_mean_k1", "0.8_1.1")},
        "ppo",
        lambda x: x.surrogate(x.d) * band(1 / x.mean, 0.8, 1.1),
    ),
    (
        "verl",
        {
            "bypass_mode": True,
            "loss_type": "reinforce",
            "rollout_is": "sequence",
            **verl_rs("token_k2", "0.1"),
        },
        "reinforce",
        lambda x: -x.a * x.p * x.product.clamp(max=2.0) * (x.k2 <= 0.1),
    ),
    (
        "verl",
        verl_run({"bypass_mode": True, "loss_type": "ppo_clip"})
        | verl_in_loss(
            loss_type="reinforce", rollout_is="token", **verl_rs("seq_mean_k1", "0.8_1.1")
        ),
        "reinforce",
        lambda x: -x.a * x.p * x.rho.clamp(max=2.0) * band(1 / x.mean, 0.8, 1.1),
    ),
    (
        "verl",
        {"trainer.use_v1": True, **verl_in_loss(rollout_is="token", **verl_rs("token_k2", "0.05"))},
        "ppo",
        lambda x: x.surrogate(x.d) * (x.k2 <= 0.05),
    ),
    ("areal", {"use_decoupled_loss": False}, "ppo", lambda x: x.surrogate(x.d)),
    (
        "slime",
        {"use_rollout_logprobs": True, "use_opsm": True, "opsm_delta": 0.1},
        "ppo",
        lambda x: x.surrogate(x.d) * ~((x.a < 0) & (-x.mean.log() > 0.1)),
    ),
    ("fireworks", {"anchor_logp": "rollout"}, "ppo", lambda x: x.surrogate(x.d)),
    (
        "openrlhf",
        {"policy_loss_type": "gspo", **openrlhf(enable=True)},
        "gspo",
        lambda x: x.surrogate(x.mean.log()).expand_as(x.d),
    ),
    (
        "skyrl",
        {"trainer.algorithm.policy_loss_type": "rollout_is", "trainer.algorithm.eps_clip_low": 0.2},
        "rollout_is",
        lambda x: -x.a * x.p * x.rho * ((x.rho > 0.8) & (x.rho < 1.2)),
    ),
    (
        "skyrl",
        skyrl(
            {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout"},
            outlier_token_is_threshold_high=1.6,
        ),
        "cispo",
        lambda x: -x.a * x.p * x.rho.clamp(0.8, 1.2) * (x.max(x.rho) <= 1.6),
    ),
    (
        "prime_rl",
        {"trainer.loss": {"type": "default", "kl_tau": 0.0, "adv_tau": 1.0, "dppo_mask_low": 0.2}},
        "dppo",
        prime_dppo,
    ),
    (
        "prime_rl",
        {},
        "dppo",
        lambda x: prime_dppo(x) + 1e-3 * x.d**2,
    ),
    (
        "prime_rl",
        {"loss": {"type": "ipo", "ipo_threshold": 0.05, "kl_tau": 0.01}},
        "dppo",
        lambda x: -x.a * x.rho * ((x.heads - x.sampled).abs() <= 0.05) + 0.01 * x.d**2,
    ),
    (
        "trl",
        {"loss_type": "vespo", "vespo_k_neg": 2.0, **trl(mode="token_truncate", clip_max=50.0)},
        "vespo",
        trl_vespo,
    ),
    (
        "verl",
        verl_run({"bypass_mode": True}, loss="dro", use_v1=True) | {"policy_loss.dro_beta": 0.1},
        "reinforce",
        lambda x: -x.a * x.p + 0.05 * x.d**2,
    ),
]
ALL = [(framework, mapping) for framework, cases in CASES.items() for _, mapping, _ in cases]
ALL += [(framework, mapping) for framework, mapping, _, _ in TWO_POLICIES]
