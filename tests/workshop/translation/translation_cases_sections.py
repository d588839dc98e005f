"""Projects whose settings sit in a section of their own: native keys, and their formula as they compute it."""

from __future__ import annotations

from typing import Any

import torch
from translation_oracle import Native, band, k2, k3, kept, over_rows, plain, rho, row_max, row_mean, row_sum, verl_rs

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
    (
        "verl",
        "all rows count in a loss with a reduction of its own",
        {
            "algorithm.rollout_correction": verl_rs("seq_mean_k1", "1.1"),
            "trainer.use_v1": False,
            "actor_rollout_ref.actor": {"loss_agg_mode": "token-mean", "policy_loss.loss_mode": "gspo"},
        },
        plain(lambda p, u, m: band(row_mean(u - p, m).exp(), 1 / 1.1, 1.1) * 1.0),
    ),
    (
        "verl",
        "removed settings that are null are off",
        {"rollout_is": "token", "rollout_is_veto_threshold": None, "rollout_is_level": "null"},
        plain(lambda p, u, m: rho(p, u).clamp(max=2.0)),
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
        "the section of its pull request 169",
        {"policy_loss": "grpo", "is_correction": {"tis_cap": 1.1, "tis_level": "sequence", "eps_clip": 0.2}},
        plain(lambda p, u, m: row_mean(p - u, m).exp().clamp(max=1.1)),
    ),
    ("fireworks", "that section alone", {"tis_cap": 1.2}, plain(lambda p, u, m: rho(p, u).clamp(max=1.2))),
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
