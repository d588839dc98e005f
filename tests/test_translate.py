"""Every row of the table of other projects: their formula, written here as they compute it, against ours.

Each case holds native keys and a function of (prox, mu, mask) that gives the multiplier of every token's
loss and the number of tokens that count, in the words of that project. Equality is checked on random data.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megatron_rl.correction.checks import check_correction
from megatron_rl.rollout_correction import CorrectionConfig, apply_conditional_rules, rollout_correction
from megatron_rl.translate import FRAMEWORKS, TranslationError, translate, translate_file

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


CASES: list[tuple[str, str, dict[str, Any], Native]] = [
    (
        "verl",
        "token TIS",
        {"rollout_is": "token", "rollout_is_threshold": 1.5},
        plain(lambda p, u, m: rho(p, u).clamp(max=1.5)),
    ),
    (
        "verl",
        "sequence TIS",
        {"algorithm": {"rollout_correction": {"rollout_is": "sequence"}}},
        plain(lambda p, u, m: row_sum(p - u, m).exp().clamp(max=2.0)),
    ),
    (
        "verl",
        "lo_hi masks",
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": "0.5_1.5",
        },
        plain(lambda p, u, m: rho(p, u) * band(rho(p, u), 0.5, 1.5)),
    ),
    (
        "verl",
        "batch normalize",
        {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": True},
        plain(lambda p, u, m: rho(p, u).clamp(max=2.0) / rho(p, u).clamp(max=2.0)[m].mean()),
    ),
    (
        "verl",
        "seq_mean_k1 acts on 1 / rho",
        verl_rs("seq_mean_k1", "0.7_1.1"),
        kept(lambda p, u, m: (m * 1.0, band(row_mean(u - p, m).exp(), 0.7, 1.1))),
    ),
    (
        "verl",
        "one k1 number is its own mirror",
        verl_rs("seq_mean_k1", "1.2"),
        kept(lambda p, u, m: (m * 1.0, band(row_mean(u - p, m).exp(), 1 / 1.2, 1.2))),
    ),
    (
        "verl",
        "seq_sum_k1",
        verl_rs("seq_sum_k1", "0.5_3.0"),
        kept(lambda p, u, m: (m * 1.0, band(row_sum(u - p, m).exp(), 0.5, 3.0))),
    ),
    (
        "verl",
        "token_k1",
        verl_rs("token_k1", "0.6_1.2"),
        kept(lambda p, u, m: (m * 1.0, band((u - p).exp(), 0.6, 1.2))),
    ),
    (
        "verl",
        "chained",
        verl_rs("token_k2,seq_max_k3", "0.1,0.3"),
        kept(
            lambda p, u, m: (
                m * 1.0,
                ((p - u) ** 2 / 2 <= 0.1) & ((k3(p, u) * m).amax(1, keepdim=True) <= 0.3),
            )
        ),
    ),
    (
        "verl",
        "seq_sum_k2 and token TIS",
        {**verl_rs("seq_sum_k2", "0.2"), "rollout_is": "token"},
        kept(lambda p, u, m: (rho(p, u).clamp(max=2.0), row_sum((p - u) ** 2 / 2, m) <= 0.2)),
    ),
    (
        "verl",
        "seq_mean_k3",
        verl_rs("seq_mean_k3", "0.05"),
        kept(lambda p, u, m: (m * 1.0, row_mean(k3(p, u), m) <= 0.05)),
    ),
    (
        "verl",
        "token_k3 and seq_max_k2 share a threshold",
        verl_rs("token_k3,seq_max_k2", "0.08"),
        kept(lambda p, u, m: (m * 1.0, (k3(p, u) <= 0.08) & (row_max(k2(p, u), m) <= 0.08))),
    ),
    (
        "verl",
        "seq_sum_k3",
        verl_rs("seq_sum_k3", "0.15"),
        kept(lambda p, u, m: (m * 1.0, row_sum(k3(p, u), m) <= 0.15)),
    ),
    (
        "verl",
        "seq_mean_k2 twice is once",
        verl_rs("seq_mean_k2, seq_mean_k2", "0.04"),
        kept(lambda p, u, m: (m * 1.0, row_mean(k2(p, u), m) <= 0.04)),
    ),
    (
        "verl",
        "sequence weights masked by lo_hi",
        {"rollout_is": "sequence", "rollout_is_threshold": "0.6_1.8"},
        plain(lambda p, u, m: row_sum(p - u, m).exp() * band(row_sum(p - u, m).exp(), 0.6, 1.8)),
    ),
    (
        "verl",
        "sequence weights normalized over rows",
        {"rollout_is": "sequence", "rollout_is_threshold": "1.5", "rollout_is_batch_normalize": "true"},
        plain(
            lambda p, u, m: (
                row_sum(p - u, m).exp().clamp(max=1.5) / over_rows(row_sum(p - u, m).exp().clamp(max=1.5), m)
            )
        ),
    ),
    (
        "verl",
        "no weight where the threshold is null",
        {**verl_rs("token_k1", "1.2"), "rollout_is": "token", "rollout_is_threshold": None},
        kept(lambda p, u, m: (m * 1.0, band((u - p).exp(), 1 / 1.2, 1.2))),
    ),
    (
        "verl",
        "all tokens count under the new trainer",
        {
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": verl_rs("token_k2", "0.05")},
            "trainer": {"use_v1": True, "n_gpus_per_node": 8},
            "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean", "clip_ratio": 0.2}},
        },
        plain(lambda p, u, m: (k2(p, u) <= 0.05) * 1.0),
    ),
    (
        "verl",
        "all rows count with a mean over sequences",
        {
            "algorithm.rollout_correction": verl_rs("seq_mean_k1", "1.1"),
            "trainer.use_v1": False,
            "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        },
        plain(lambda p, u, m: band(row_mean(u - p, m).exp(), 1 / 1.1, 1.1) * 1.0),
    ),
    (
        "verl",
        "the legacy trainer counts what is left",
        {
            "algorithm.rollout_correction": verl_rs("token_k1", "0.8_1.3"),
            "trainer.use_v1": False,
            "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        },
        kept(lambda p, u, m: (m * 1.0, band((u - p).exp(), 0.8, 1.3))),
    ),
    ("skyrl", "token TIS", {"tis_ratio_type": "token"}, plain(lambda p, u, m: rho(p, u).clamp(max=2.0))),
    (
        "skyrl",
        "deprecated keys",
        {"trainer": {"algorithm": {"use_tis": True, "tis_imp_ratio_cap": 1.3, "off_policy_correction": {}}}},
        plain(lambda p, u, m: rho(p, u).clamp(max=1.3)),
    ),
    (
        "skyrl",
        "sequence TIS",
        {"trainer.algorithm.off_policy_correction.tis_ratio_type": "sequence"},
        plain(lambda p, u, m: row_sum(p - u, m).exp().clamp(max=5.0)),
    ),
    (
        "skyrl",
        "geometric mask",
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.2},
        plain(lambda p, u, m: band(row_mean(p - u, m).exp(), 0.9, 1.2) * 1.0),
    ),
    (
        "skyrl",
        "product mask with its defaults",
        {"sequence_mask_metric": "product"},
        plain(lambda p, u, m: band(row_sum(p - u, m).exp(), 0.5, 2.0) * 1.0),
    ),
    (
        "skyrl",
        "outliers on both sides",
        {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.5},
        plain(lambda p, u, m: (band(rho(p, u), 0.6, 1.5) | ~m).all(1, keepdim=True) * 1.0),
    ),
    (
        "skyrl",
        "outliers below",
        {"outlier_token_is_threshold_low": 0.6},
        plain(lambda p, u, m: ((rho(p, u) >= 0.6) | ~m).all(1, keepdim=True) * 1.0),
    ),
    (
        "skyrl",
        "token mask with token TIS and outliers",
        {
            "tis_ratio_type": "token",
            "token_tis_ratio_clip_high": 1.2,
            "token_mask_is_threshold_low": 0.7,
            "token_mask_is_threshold_high": 1.4,
            "outlier_token_is_threshold_high": 2.0,
        },
        plain(
            lambda p, u, m: (
                rho(p, u).clamp(max=1.2) * band(rho(p, u), 0.7, 1.4) * ((rho(p, u) <= 2.0) | ~m).all(1, keepdim=True)
            )
        ),
    ),
    (
        "trl",
        "defaults: sequence_mask 3",
        {},
        plain(lambda p, u, m: row_sum(p - u, m).exp() * (row_sum(p - u, m).exp() <= 3.0)),
    ),
    (
        "trl",
        "token_truncate with both bounds",
        {
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_min": 0.8,
            "vllm_importance_sampling_clip_max": 1.3,
        },
        plain(lambda p, u, m: rho(p, u).clamp(0.8, 1.3)),
    ),
    (
        "trl",
        "token_truncate with the former name of the cap",
        {
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_cap": 1.4,
            "vllm_importance_sampling_clip_max": 9.0,
            "vllm_importance_sampling_clip_min": 0.0,
        },
        plain(lambda p, u, m: rho(p, u).clamp(max=1.4)),
    ),
    (
        "trl",
        "sequence_mask with both bounds",
        {
            "use_vllm": True,
            "vllm_importance_sampling_clip_min": 0.6,
            "vllm_importance_sampling_clip_max": 1.6,
        },
        plain(lambda p, u, m: row_sum(p - u, m).exp() * band(row_sum(p - u, m).exp(), 0.6, 1.6)),
    ),
    (
        "trl",
        "a mask without bounds masks nothing",
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None},
        plain(lambda p, u, m: rho(p, u)),
    ),
    (
        "trl",
        "token_mask below only",
        {
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.8,
            "vllm_importance_sampling_clip_max": None,
        },
        lambda p, u, m: (rho(p, u) * (rho(p, u) >= 0.8) * m, m),
    ),
    (
        "trl",
        "sequence_truncate",
        {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 2.0},
        plain(lambda p, u, m: row_sum(p - u, m).exp().clamp(max=2.0)),
    ),
    (
        "trl",
        "off-policy sequence mask",
        {"use_vllm": False, "off_policy_mask_threshold": 0.1},
        plain(lambda p, u, m: ((ADVANTAGES[:, None] >= 0) | (row_mean(u - p, m) <= 0.1)) * 1.0),
    ),
    ("nemo_rl", "off", {"loss_fn": {"use_importance_sampling_correction": False}}, plain(lambda p, u, m: m * 1.0)),
    (
        "nemo_rl",
        "unbounded",
        {"loss_fn.use_importance_sampling_correction": True},
        plain(lambda p, u, m: rho(p, u)),
    ),
    (
        "nemo_rl",
        "a floor without a type bounds nothing",
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio_min": 0.9},
        plain(lambda p, u, m: rho(p, u)),
    ),
    (
        "nemo_rl",
        "icepop per sequence",
        {
            "sequence_level_importance_ratios": True,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio": 1.5,
            "truncated_importance_sampling_ratio_min": 0.7,
        },
        plain(lambda p, u, m: row_sum(p - u, m).exp() * band(row_sum(p - u, m).exp(), 0.7, 1.5)),
    ),
    (
        "nemo_rl",
        "the error threshold alone",
        {"ppo": {"seq_logprob_error_threshold": 1.4}, "loss_fn": {"use_importance_sampling_correction": False}},
        kept(lambda p, u, m: (m * 1.0, row_mean((p - u).abs().exp(), m) <= 1.4)),
    ),
    (
        "nemo_rl",
        "tis with a floor",
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 1.4,
            "truncated_importance_sampling_ratio_min": 0.7,
        },
        plain(lambda p, u, m: rho(p, u).clamp(0.7, 1.4)),
    ),
    (
        "nemo_rl",
        "tis per sequence",
        {
            "use_importance_sampling_correction": True,
            "sequence_level_importance_ratios": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 1.4,
        },
        plain(lambda p, u, m: row_sum(p - u, m).exp().clamp(max=1.4)),
    ),
    (
        "nemo_rl",
        "icepop and the error threshold",
        {
            "grpo": {"seq_logprob_error_threshold": 1.5},
            "loss_fn": {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 1.5,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
        },
        kept(
            lambda p, u, m: (
                rho(p, u) * band(rho(p, u), 0.5, 1.5),
                (row_mean((p - u).abs().exp(), m) <= 1.5).expand_as(m),
            )
        ),
    ),
    (
        "nemo_rl",
        "seq-mask-tis",
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio": 1.2,
            "truncated_importance_sampling_ratio_min": 0.8,
        },
        plain(lambda p, u, m: rho(p, u) * band(row_mean(p - u, m).exp(), 0.8, 1.2)),
    ),
    (
        "areal",
        "token mask",
        {"rejection_sampling": {"upper": 1.5, "lower": 0.7}},
        plain(lambda p, u, m: rho(p, u) * band(rho(p, u), 0.7, 1.5)),
    ),
    (
        "areal",
        "token clamp",
        {"actor": {"use_decoupled_loss": True, "rejection_sampling": {"action": "clamp", "upper": 1.2}}},
        plain(lambda p, u, m: rho(p, u).clamp(max=1.2)),
    ),
    (
        "areal",
        "sequence mask",
        {"rejection_sampling": {"level": "sequence", "upper": 1.1, "lower": 0.9}},
        plain(lambda p, u, m: row_mean(p - u, m).exp() * band(row_mean(p - u, m).exp(), 0.9, 1.1)),
    ),
    (
        "areal",
        "sequence mask by the product",
        {"rejection_sampling": {"level": "sequence", "agg": "sum", "upper": 2.0}},
        plain(lambda p, u, m: row_mean(p - u, m).exp() * (row_sum(p - u, m).exp() <= 2.0)),
    ),
    (
        "areal",
        "sequence clamp",
        {"rejection_sampling": {"level": "sequence", "action": "clamp", "upper": 1.1, "lower": 0.9}},
        plain(lambda p, u, m: row_mean(p - u, m).exp().clamp(0.9, 1.1)),
    ),
    (
        "areal",
        "its k1 is +d",
        {"rejection_sampling": {"level": "sequence", "metric": "kl_k1", "upper": 0.1, "lower": -0.3}},
        plain(lambda p, u, m: rho(p, u) * band(row_mean(p - u, m), -0.3, 0.1)),
    ),
    (
        "areal",
        "the largest +d",
        {"rejection_sampling": {"level": "sequence", "metric": "kl_k1", "agg": "max", "upper": 0.3, "lower": 0.05}},
        plain(lambda p, u, m: rho(p, u) * band(row_max(p - u, m), 0.05, 0.3)),
    ),
    (
        "areal",
        "the sum of +d, with a bound whose exponential is infinite",
        {
            "rejection_sampling": {
                "level": "sequence",
                "metric": "kl_k1",
                "agg": "sum",
                "upper": 1000,
                "lower": -0.4,
            }
        },
        plain(lambda p, u, m: rho(p, u) * (row_sum(p - u, m) >= -0.4)),
    ),
    (
        "areal",
        "token k2",
        {"actor.rejection_sampling": {"metric": "kl_k2", "upper": 0.04}, "actor.use_decoupled_loss": True},
        plain(lambda p, u, m: rho(p, u) * (k2(p, u) <= 0.04)),
    ),
    (
        "areal",
        "the largest ratio decides, the mean weighs",
        {"rejection_sampling": {"level": "sequence", "agg": "max", "upper": 1.5, "lower": 1.05}},
        plain(lambda p, u, m: row_mean(p - u, m).exp() * band(row_max(p - u, m).exp(), 1.05, 1.5)),
    ),
    (
        "areal",
        "the product decides, the mean is clamped",
        {"rejection_sampling": {"level": "sequence", "agg": "sum", "action": "clamp", "upper": 1.1, "lower": 0.95}},
        plain(
            lambda p, u, m: torch.where(
                band(row_sum(p - u, m).exp(), 0.95, 1.1),
                row_mean(p - u, m).exp(),
                row_mean(p - u, m).exp().clamp(0.95, 1.1),
            )
        ),
    ),
    (
        "areal",
        "largest k2",
        {"rejection_sampling": {"level": "sequence", "metric": "kl_k2", "agg": "max", "upper": 0.1}},
        plain(lambda p, u, m: rho(p, u) * (((p - u) ** 2 / 2 * m).amax(1, keepdim=True) <= 0.1)),
    ),
    ("areal", "decoupled, nothing else", {"use_decoupled_loss": True}, plain(lambda p, u, m: m * 1.0)),
    ("slime", "TIS", {"--use-tis": True, "--tis-clip": 1.5}, plain(lambda p, u, m: rho(p, u).clamp(0, 1.5))),
    (
        "slime",
        "CIS",
        {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.8},
        plain(lambda p, u, m: rho(p, u).clamp(0.8, 1.5)),
    ),
    (
        "slime",
        "icepop",
        {
            "use_tis": True,
            "tis_clip": 1.5,
            "tis_clip_low": 0.8,
            "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function",
        },
        plain(lambda p, u, m: rho(p, u) * band(rho(p, u), 0.8, 1.5)),
    ),
    (
        "slime",
        "mis: truncate, reject and veto",
        slime_mis(tis_upper_bound=1.5, use_rs=True, rs_level="geometric", rs_lower_bound=0.9, rs_veto_threshold=0.5),
        plain(
            lambda p, u, m: (
                rho(p, u).clamp(max=1.5)
                * band(row_mean(p - u, m).exp(), 0.9, 1.5)
                * ((rho(p, u) >= 0.5) | ~m).all(1, keepdim=True)
            )
        ),
    ),
    (
        "slime",
        "mis: clip by sequence, normalized",
        slime_mis(tis_level="sequence", tis_mode="clip", tis_upper_bound=2.0, tis_batch_normalize=True),
        plain(lambda p, u, m: row_sum(p - u, m).exp().clamp(0.5, 2.0) / row_sum(p - u, m).exp().clamp(0.5, 2.0).mean()),
    ),
    (
        "slime",
        "icepop that is only asked for metrics weighs all the same",
        {
            "get_mismatch_metrics": True,
            "tis_clip": 1.5,
            "custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function",
        },
        plain(lambda p, u, m: rho(p, u) * (rho(p, u) <= 1.5)),
    ),
    (
        "slime",
        "mis: token weights normalized",
        slime_mis(tis_upper_bound=1.3, tis_batch_normalize=True),
        plain(lambda p, u, m: rho(p, u).clamp(max=1.3) / rho(p, u).clamp(max=1.3)[m].mean()),
    ),
    (
        "slime",
        "mis: geometric clip, product rejection with its own upper bound",
        slime_mis(
            tis_level="geometric",
            tis_mode="clip",
            tis_upper_bound=1.1,
            use_rs=True,
            rs_level="sequence",
            rs_upper_bound=1.7,
        ),
        plain(
            lambda p, u, m: row_mean(p - u, m).exp().clamp(1 / 1.1, 1.1) * band(row_sum(p - u, m).exp(), 1 / 1.1, 1.7)
        ),
    ),
    (
        "slime",
        "mis: mask",
        slime_mis(tis_mode="mask", tis_upper_bound=1.4, tis_lower_bound=0.6),
        plain(lambda p, u, m: rho(p, u) * band(rho(p, u), 0.6, 1.4)),
    ),
    (
        "openrlhf",
        "tis with its defaults",
        {"--algo.advantage.is_correction_enable": True},
        plain(lambda p, u, m: rho(p, u).clamp(0.5, 5.0)),
    ),
    (
        "openrlhf",
        "icepop under its old names",
        {
            "enable_vllm_is_correction": True,
            "vllm_is_truncated_threshold": [0.7, 1.3],
            "vllm_is_correction_type": "icepop",
        },
        plain(lambda p, u, m: rho(p, u) * band(rho(p, u), 0.7, 1.3)),
    ),
    (
        "openrlhf",
        "seq-mask-tis",
        {"is_correction_enable": True, "is_correction_type": "seq-mask-tis", "is_correction_threshold": [0.9, 1.2]},
        plain(lambda p, u, m: rho(p, u) * band(row_mean(p - u, m).exp(), 0.9, 1.2)),
    ),
    (
        "openrlhf",
        "the flag's two words",
        {"--algo.advantage.is_correction_enable": True, "--algo.advantage.is_correction_threshold": "0.9 1.1"},
        plain(lambda p, u, m: rho(p, u).clamp(0.9, 1.1)),
    ),
    (
        "fireworks",
        "inside a provision file",
        {"common": {"base_model": "m"}, "recipe": {"rl": {"trainer": "policy", "tis": {"cap": 1.2}}}},
        plain(lambda p, u, m: rho(p, u).clamp(max=1.2)),
    ),
    ("fireworks", "defaults", {}, plain(lambda p, u, m: rho(p, u).clamp(max=5.0))),
    (
        "fireworks",
        "sequence",
        {"tis": {"cap": 1.1, "level": "sequence"}},
        plain(lambda p, u, m: row_mean(p - u, m).exp().clamp(max=1.1)),
    ),
    (
        "fireworks",
        "icepop below the cap",
        {"tis": {"icepop_threshold": 1.5}},
        plain(lambda p, u, m: rho(p, u) * band(rho(p, u), 1 / 1.5, 1.5)),
    ),
    (
        "fireworks",
        "icepop above the cap",
        {"tis": {"icepop_threshold": 2.0, "cap": 1.2}, "anchor_logp": "old_policy"},
        plain(lambda p, u, m: rho(p, u).clamp(max=1.2) * band(rho(p, u), 0.5, 2.0)),
    ),
]


@pytest.mark.parametrize(
    ("framework", "what", "mapping", "native"), CASES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_same_as_theirs(framework: str, what: str, mapping: dict[str, Any], native: Native) -> None:
    config, _ = translate(framework, mapping)
    assert not config.rebaseline
    acted = False
    for seed in range(4):
        prox_BT, mu_BT, mask_BT = data(seed, spread=0.3)
        found = rollout_correction(prox_BT, mu_BT, mask_BT, config)
        found = apply_conditional_rules(found, ADVANTAGES, config)
        multiplier_BT, counted_BT = native(prox_BT, mu_BT, mask_BT)
        torch.testing.assert_close(found.weights_BT, multiplier_BT.float(), rtol=1e-5, atol=1e-6)
        assert int(found.denominator_mask_BT.sum()) == int(counted_BT.sum())
        acted |= not torch.allclose(multiplier_BT[mask_BT].float(), torch.ones(()))
    assert acted == (what not in ("off", "decoupled, nothing else"))


@pytest.mark.parametrize("band_high", [None, 1.2])
def test_m2po(band_high: float | None) -> None:
    """AReaL masks the largest second moments until the mean of the rest is below the threshold.

    A band of token ratios then zeroes weights among the rest and leaves the denominators alone.
    """
    actor: dict[str, Any] = {"use_decoupled_loss": True, "m2_threshold": 0.04}
    if band_high is not None:
        actor["rejection_sampling"] = {"metric": "ratio", "upper": band_high}
    config, notes = translate("areal", {"actor": actor})
    prox_BT, mu_BT, mask_BT = data(0, spread=0.3)
    m2_BT = (prox_BT - mu_BT).square()
    ordered = m2_BT[mask_BT].sort(descending=True).values
    masked = next(k for k in range(len(ordered)) if ordered[k:].mean() < 0.04)
    counted_BT = mask_BT & (m2_BT <= ordered[masked])
    rho_BT = rho(prox_BT, mu_BT)
    multiplier_BT = counted_BT * (1.0 if band_high is None else rho_BT * (rho_BT <= band_high))
    found = rollout_correction(prox_BT, mu_BT, mask_BT, config)
    assert 0 < masked < len(ordered)
    assert torch.equal(found.denominator_mask_BT, counted_BT)
    torch.testing.assert_close(found.weights_BT, multiplier_BT.float(), rtol=1e-5, atol=1e-6)
    assert "micro-batch" in notes[0]


BYPASSES = [
    ("verl", {"bypass_mode": True, "rollout_is": "token"}),
    ("verl", {"algorithm": {"rollout_correction": {"bypass_mode": True}}, "trainer": {"use_v1": True}}),
    ("skyrl", {"trainer": {"algorithm": {"policy_loss_type": "rollout_is", "off_policy_correction": {}}}}),
    ("skyrl", {"trainer.algorithm": {"policy_loss_type": "cispo", "cispo": {"cispo_anchor": "rollout"}}}),
    ("areal", {"use_decoupled_loss": False}),
    ("slime", {"use_rollout_logprobs": True}),
    ("openrlhf", {"is_correction_enable": True, "policy_loss_type": "gspo"}),
    ("fireworks", {"anchor_logp": "rollout", "tis": {"cap": 2.0}}),
]


@pytest.mark.parametrize(("framework", "mapping"), BYPASSES, ids=lambda x: x if isinstance(x, str) else "")
def test_bypass(framework: str, mapping: dict[str, Any]) -> None:
    config, _ = translate(framework, mapping)
    assert config.anchor == "sampler"
    assert config.weight.level == "none"
    assert not config.renormalize


def test_verl_bypass_with_reinforce_keeps_its_weight() -> None:
    config, notes = translate("verl", {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"})
    assert (config.anchor, config.weight.level, config.weight.high) == ("sampler", "sequence", 2.0)
    assert "goes with loss.name: reinforce" in notes


@pytest.mark.parametrize(
    ("framework", "mapping", "key"),
    [
        ("verl", {"rollout_is": "group"}, "rollout_is"),
        ("verl", {"rollout_is_treshold": 2.0}, "did you mean rollout_is_threshold"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "rollout_is_threshold"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": True}, "rollout_is_threshold"),
        ("verl", verl_rs("seq_max_k1", "2"), "no rule seq_max_k1"),
        ("verl", verl_rs("token_k2", "0.1_0.2"), "one upper bound"),
        ("verl", verl_rs("token_k2,token_k3,seq_sum_k1", "0.1,0.2"), "expected one threshold, or 3"),
        ("verl", {"rollout_rs": "token_k2"}, "rollout_rs_threshold"),
        ("verl", {"rollout_rs": ""}, "rollout_rs"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "0.5_"}, "rollout_is_threshold"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "${cap}"}, "interpolation"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": 10**400}, "rollout_is_threshold"),
        ("verl", {"algorithm": {"rollout_correction": True}}, "expected keys and values"),
        ("verl", {"algorithm": {"rollout_corection": {"rollout_is": "token"}}}, "did you mean rollout_correction"),
        ("verl", {"algorithm": {"rollout_is": "token"}}, "under algorithm.rollout_correction only"),
        ("verl", {"rollout_is": "token", "algorithm.rollout_correction.rollout_is": "sequence"}, "rollout_is"),
        ("verl", {"rollout_is": "token", "lr": 1e-6}, "lr is 1e-06: unknown"),
        ("verl", {"lr": 1e-6}, "lr is 1e-06: unknown"),
        ("verl", {"actor_rollout_ref": {"actor": {"tis_imp_ratio_cap": 2.0}}}, "tis_imp_ratio_cap: no longer there"),
        ("verl", {"rollout_is": "token", "rollout_is_veto_threshold": 1e-4}, "rollout_is_veto_threshold"),
        ("verl", {"rollout_is": "token", "loss_type": "gspo"}, "loss_type"),
        (
            "verl",
            {"algorithm.rollout_correction": {**verl_rs("token_k2", "1"), "bypass_mode": True}, "trainer.use_v1": True},
            "rollout_rs",
        ),
        (
            "verl",
            {
                "algorithm.rollout_correction": verl_rs("token_k2", "1"),
                "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
            },
            "loss_agg_mode",
        ),
        ("verl", verl_rs("seq_mean_k1", "0.5"), "would keep nothing"),
        (
            "verl",
            {**verl_rs("token_k2", "1"), "rollout_is": "token", "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize",
        ),
        (
            "verl",
            {"bypass_mode": True, "rollout_is": "token", "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize",
        ),
        ("skyrl", {"token_mask_is_threshold_low": 0.5}, "token_mask_is_threshold_low"),
        (
            "skyrl",
            {
                "token_mask_is_threshold_low": 0.5,
                "token_mask_is_threshold_high": 2.0,
                "sequence_mask_metric": "geometric",
            },
            "sequence_mask_metric",
        ),
        (
            "skyrl",
            {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0, "tis_ratio_type": "sequence"},
            "tis_ratio_type",
        ),
        (
            "skyrl",
            {"trainer.algorithm": {"policy_loss_type": "dppo", "off_policy_correction.tis_ratio_type": "token"}},
            "tis_ratio_type",
        ),
        ("skyrl", {"trainer": {"tis_ratio_type": "token"}}, "under trainer.algorithm.off_policy_correction only"),
        ("skyrl", {"use_tis": True}, "tis_imp_ratio_cap"),
        ("skyrl", {"outlier_token_is_threshold_low": -1}, "never negative"),
        (
            "trl",
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
            "vllm_importance_sampling_clip_max",
        ),
        ("trl", {"loss_type": "vespo"}, "loss_type"),
        ("trl", {"vllm_importance_samplng_mode": "token_mask"}, "did you mean vllm_importance_sampling_mode"),
        ("nemo_rl", {"loss_fn": {"truncated_importance_sampling_ratio": 2.0}}, "truncated_importance_sampling_type"),
        ("nemo_rl", {"loss_fn": {"use_on_policy_kl_approximation": True}}, "use_on_policy_kl_approximation"),
        (
            "nemo_rl",
            {"grpo.seq_logprob_error_threshold": 1.5, "ppo.seq_logprob_error_threshold": 2.0},
            "seq_logprob_error_threshold is given twice",
        ),
        ("nemo_rl", {"use_importance_sampling_correction": True, "use-importance-sampling-correction": False}, "twice"),
        ("trl", {"vllm_importance_sampling_mode": "token_clip"}, "vllm_importance_sampling_mode"),
        ("trl", {"use_bias_correction_kl": True}, "use_bias_correction_kl"),
        ("nemo_rl", {"truncated_importance_sampling_type": "tis"}, "truncated_importance_sampling_type"),
        (
            "nemo_rl",
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 1.2,
                "truncated_importance_sampling_ratio_min": 0.8,
                "seq_logprob_error_threshold": 1.5,
            },
            "seq_logprob_error_threshold",
        ),
        ("areal", {"rejection_sampling": {"metric": "kl_k3"}}, "metric"),
        ("areal", {"rejection_sampling": {"action": "clamp", "metric": "kl_k2"}}, "action"),
        (
            "areal",
            {"rejection_sampling": {"level": "sequence", "action": "clamp", "agg": "max", "lower": 0.5}},
            "agg",
        ),
        ("areal", {"rejection_sampling": {"level": "sequence"}, "m2_threshold": 0.1}, "m2_threshold"),
        (
            "areal",
            {"rejection_sampling": {"level": "sequence", "action": "clamp"}, "m2_threshold": 0.1},
            "m2_threshold",
        ),
        ("areal", {"rejection_sampling": {"metric": "kl_k2"}, "m2_threshold": 0.1}, "m2_threshold"),
        ("areal", {"recompute_logprob": True, "m2_threshold": 0.1}, "m2_threshold"),
        ("areal", {"rejection_sampling": {"upper": 0.9}}, "upper"),
        ("areal", {"actor": {"behave_imp_weight_cap": 5.0}}, "behave_imp_weight_cap: no longer there"),
        ("areal", {"behav_imp_weight_cap": 5.0}, "behav_imp_weight_cap"),
        ("areal", {"metric": "ratio", "upper": 5.0}, "metric"),
        ("areal", {"rejection_sampling": {}, "use_decoupled_loss": False}, "use_decoupled_loss"),
        ("areal", {"use_decoupled_loss": True, "prox_logp_method": "loglinear"}, "prox_logp_method"),
        ("slime", {"use_tis": True, "custom_tis_function_path": "my.function"}, "custom_tis_function_path"),
        ("slime", slime_mis(tis_batch_normalize=True, use_rs=True), "tis_batch_normalize"),
        ("slime", {"use_tis": True, "use_rollout_logprobs": True}, "use_tis"),
        ("slime", slime_mis(), "custom_tis_function_path"),
        ("slime", slime_mis(tis_level="token"), "tis_upper_bound"),
        ("slime", {"use_rs": True, "tis_upper_bound": 2.0}, "use_rs"),
        ("slime", {"use_unbiased_kl": True}, "use_unbiased_kl"),
        (
            "slime",
            {"use_tis": True, "tis_level": "token", "custom_tis_function_path": "slime.loss.icepop_function"},
            "tis_level",
        ),
        (
            "slime",
            {
                "use_rollout_logprobs": True,
                "get_mismatch_metrics": True,
                "custom_tis_function_path": "slime.loss.icepop_function",
            },
            "get_mismatch_metrics",
        ),
        ("openrlhf", {"use_icepop": True}, "use_icepop: no longer there"),
        (
            "openrlhf",
            {"is_correction_type": "tis", "vllm_is_correction_type": "icepop"},
            "vllm_is_correction_type",
        ),
        ("openrlhf", {"is_correction_enable": True, "policy_loss_type": "cispo"}, "policy_loss_type"),
        ("fireworks", {"recipe": {"a": {"tis": {"cap": 1.0}}, "b": {"tis": {"cap": 2.0}}}}, "several places"),
        ("fireworks", {"cap": 2.0, "kl_beta": 0.0}, "kl_beta"),
        ("verll", {}, "did you mean verl"),
        ("openrlhf", {"is_correction_enable": True, "is_correction_threshold": [0.5]}, "is_correction_threshold"),
        ("fireworks", {"tis": {"level": "sequence", "icepop_threshold": 2.0}}, "icepop_threshold"),
        ("fireworks", {"tis": {"capp": 2.0}}, "did you mean cap"),
        ("fireworks", {"tis": {"cap": -1.0}}, "cap"),
        ("miles", {}, "known are verl, skyrl"),
    ],
)
def test_what_cannot_be_said_names_the_key(framework: str, mapping: dict[str, Any], key: str) -> None:
    with pytest.raises(TranslationError, match=key):
        translate(framework, mapping)


def test_notes_name_their_condition() -> None:
    assert "20" in translate("fireworks", {"tis": {"level": "sequence"}}).notes[0]
    assert "20" in translate("verl", verl_rs("seq_sum_k1", "2")).notes[0]
    assert "one update per batch" in translate("trl", {"off_policy_mask_threshold": 0.5}).notes[0]
    assert "learner's own old logprobs" in translate("slime", {"use_opsm": True}).notes[0]
    assert translate("trl", {"use_vllm": True, "learning_rate": 1e-6}).notes == [
        "left out, as not about correction: learning_rate"
    ]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_files(framework: str, tmp_path: Path) -> None:
    """What is printed is valid YAML, holds the whole correction, and passes the checks."""
    mapping = next(mapping for name, _, mapping, _ in CASES if name == framework)
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump(mapping))
    printed = yaml.safe_load(translate_file(framework, source))["correction"]
    config, _ = translate(framework, mapping)
    assert printed["weight"]["level"] == config.weight.level
    assert set(printed) == set(vars(CorrectionConfig()))
    assert check_correction(config) == []


def test_underscores_in_a_file_stay_two_bounds(tmp_path: Path) -> None:
    """YAML 1.1 reads 0.5_5 as the number 0.55, and 1e-4 as text."""
    source = tmp_path / "verl.yaml"
    source.write_text("rollout_is: token\nrollout_is_threshold: 0.5_5\n")
    assert yaml.safe_load(source.read_text())["rollout_is_threshold"] == 0.55
    weight = yaml.safe_load(translate_file("verl", source))["correction"]["weight"]
    assert (weight["low"], weight["high"], weight["outside"]) == (0.5, 5.0, "zero")
    source.write_text("sequence_mask_metric: geometric\noutlier_token_is_threshold_low: 1e-4\n")
    rules = yaml.safe_load(translate_file("skyrl", source))["correction"]["reject"]
    assert rules[1] == {"level": "sequence", "stat": "ratio", "reduce": "min", "low": 1e-4}


def test_an_empty_or_broken_file(tmp_path: Path) -> None:
    source = tmp_path / "empty.yaml"
    source.write_text("")
    assert "sequence" in translate_file("trl", source)
    source.write_text("a: [1")
    with pytest.raises(TranslationError, match="not valid YAML"):
        translate_file("trl", source)
    source.write_text("- 1")
    with pytest.raises(TranslationError, match="expected keys and values"):
        translate_file("trl", source)


def test_extreme_ratios_are_where_the_notes_say() -> None:
    """verl clamps each token before it sums a row; with one token at +30 the sums differ."""
    config, _ = translate("verl", verl_rs("seq_sum_k1", f"{math.exp(-25)}_{math.exp(25)}"))
    prox_BT, mu_BT = torch.tensor([[30.0, -22.0]]), torch.zeros(1, 2)
    assert rollout_correction(prox_BT, mu_BT, torch.ones(1, 2), config).mask_BT.all()
