"""Projects whose settings are flat: native keys, and their formula as they compute it."""

from __future__ import annotations

from typing import Any

from translation_oracle import ADVANTAGES, Native, band, kept, plain, rho, row_mean, row_sum, slime_mis

CASES: list[tuple[str, str, dict[str, Any], Native]] = [
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
        "openrlhf",
        "token / mask, its default mode and bounds",
        {"--algo.advantage.is_correction_level": "token"},
        plain(lambda p, u, m: rho(p, u) * band(rho(p, u), 0.5, 5.0)),
    ),
    (
        "openrlhf",
        "token / clip",
        {"algo": {"advantage": {"is_correction_level": "token", "is_correction_mode": "clip"}}}
        | {"is_correction_gating": "ratio", "is_correction_threshold": "0.9 1.1"},
        plain(lambda p, u, m: rho(p, u).clamp(0.9, 1.1)),
    ),
    (
        "openrlhf",
        "seq / mask with an upper bound alone",
        {"is_correction_level": "seq", "is_correction_threshold": [1.05]},
        plain(lambda p, u, m: rho(p, u) * (row_mean(p - u, m).exp() <= 1.05)),
    ),
    (
        "openrlhf",
        "the cap of its first version",
        {"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": 1.2},
        plain(lambda p, u, m: rho(p, u).clamp(max=1.2)),
    ),
    (
        "trl",
        "0.23 to 0.25: a cap without a mode truncates tokens",
        {
            "use_vllm": True,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_cap": 1.3,
            "beta": 0.1,
        },
        plain(lambda p, u, m: rho(p, u).clamp(max=1.3)),
    ),
    (
        "trl",
        "a cap without a mode beside a later key masks rows",
        {"vllm_importance_sampling_cap": 1.3, "num_generations_eval": 4},
        plain(lambda p, u, m: row_sum(p - u, m).exp() * (row_sum(p - u, m).exp() <= 1.3)),
    ),
]
