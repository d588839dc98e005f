"""Settings without a counterpart, and unknown names: the error names the key."""

from __future__ import annotations

import re

import pytest

from translation_cases import (  # isort: skip
    ICEPOP,
    NEMO_ON,
    OLD,
    TOKEN_MASK,
    areal,
    nemo,
    openrlhf,
    skyrl,
    slime_mis,
    trl,
    verl_in_loss,
    verl_rs,
    verl_run,
)

from megatron_rl.apps.translation.keys import Native, TranslationError
from megatron_rl.apps.translation.translate import FRAMEWORKS, translate

TOKEN = {"rollout_is": "token"}
# settings that are refused, and the key that the error names
REFUSED: dict[str, list[tuple[Native, str]]] = {
    "verl": [
        ({"rollout_is_treshold": 2.0}, "rollout_is_threshold"),
        (TOKEN | {"rollout_is_threshold": "5_0.5"}, "rollout_is_threshold"),
        (verl_rs("seq_max_k1", "2"), "seq_max_k1"),
        (verl_rs("token_k2", "0.1_0.2"), "token_k2"),
        (verl_rs("token_k2,token_k3,seq_sum_k1", "0.1,0.2"), "rollout_rs_threshold"),
        (verl_rs("seq_mean_k1", "0.5"), "seq_mean_k1"),
        ({"algorithm": {"rollout_correction": True}}, "rollout_correction"),
        ({"algorithm": TOKEN}, "algorithm.rollout_correction"),
        (TOKEN | {"algorithm.rollout_correction.rollout_is": "sequence"}, "rollout_is"),
        (verl_run({"use_policy_gradient": True}), "loss_type"),
        (
            verl_run(TOKEN) | {"actor_rollout_ref.rollout.calculate_log_probs": False},
            "calculate_log_probs",
        ),
        (verl_run({**verl_rs("token_k2", "1"), "bypass_mode": True}, use_v1=True), "rollout_rs"),
        (verl_run(verl_rs("token_k2", "1"), agg="seq-mean-token-mean"), "loss_agg_mode"),
        (verl_run(verl_rs("token_k2", "1"), loss="sapo"), "loss_mode"),
        (
            TOKEN | verl_rs("token_k2", "1") | {"rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize",
        ),
        (
            TOKEN | {"bypass_mode": True, "rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize",
        ),
        (
            verl_in_loss(rollout_is="token") | {"algorithm.rollout_correction.bypass_mode": False},
            "loss_mode",
        ),
        ({"defaults": ["ppo_trainer", "_self_"]}, "defaults"),
        ({"loss_agg_mode": "token-sum"}, "loss_agg_mode"),
        ({"loss_mode": "dro"}, "dro_beta"),
        (TOKEN | {"loss_mode": "dro", "dro_beta": 0.1}, "rollout_is"),
    ],
    "skyrl": [
        ({"token_mask_is_threshold_low": 0.5}, "token_mask_is_threshold_low"),
        (TOKEN_MASK | {"sequence_mask_metric": "geometric"}, "sequence_mask_metric"),
        (TOKEN_MASK | {"tis_ratio_type": "sequence"}, "tis_ratio_type"),
        (skyrl({"policy_loss_type": "dppo"}, tis_ratio_type="token"), "tis_ratio_type"),
        ({"policy_loss_type": "cross_entropy", "tis_ratio_type": "token"}, "policy_loss_type"),
        ({"use_tis": True}, "tis_imp_ratio_cap"),
        ({"outlier_token_is_threshold_low": -1}, "outlier_token_is_threshold_low"),
    ],
    "trl": [
        (trl(mode="token_truncate", clip_max=None), "vllm_importance_sampling_clip_max"),
        ({"loss_type": "vespo"}, "vllm_importance_sampling_mode"),
        ({"loss_type": "vespo", "use_vllm": False}, "loss_type"),
        (
            {"loss_type": "vespo", "beta": 0.1, **trl(mode="token_truncate")},
            "use_bias_correction_kl",
        ),
        ({"beta": 0.04, "importance_sampling_level": "sequence"}, "use_bias_correction_kl"),
    ],
    "nemo_rl": [
        ({"loss_fn": nemo(ratio=2.0)}, "truncated_importance_sampling_type"),
        ({"loss_fn": {"use_on_policy_kl_approximation": True}}, "use_on_policy_kl_approximation"),
        (
            {"grpo.seq_logprob_error_threshold": 1.5, "ppo.seq_logprob_error_threshold": 2.0},
            "seq_logprob_error_threshold",
        ),
        (
            {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"},
            "reference_policy_kl_type",
        ),
        (
            NEMO_ON
            | nemo(type="seq-mask-tis", ratio=1.2, ratio_min=0.8)
            | {"seq_logprob_error_threshold": 1.5},
            "seq_logprob_error_threshold",
        ),
    ],
    "areal": [
        (areal(metric="kl_k3"), "metric"),
        (areal(action="clamp", metric="kl_k2"), "action"),
        (areal(level="sequence", action="clamp", agg="max", lower=0.5), "agg"),
        (areal(level="sequence") | {"m2_threshold": 0.1}, "m2_threshold"),
        (areal(metric="kl_k2") | {"m2_threshold": 0.1}, "m2_threshold"),
        ({"recompute_logprob": True, "m2_threshold": 0.1}, "m2_threshold"),
        (areal(upper=0.9), "upper"),
        ({"actor": {"behave_imp_weight_cap": 5.0}}, "behave_imp_weight_cap"),
        (areal() | {"use_decoupled_loss": False}, "use_decoupled_loss"),
        (
            {"use_decoupled_loss": True, "prox_logp_method": "loglinear", "m2_threshold": 0.1},
            "m2_threshold",
        ),
        ({"actor": {"use_decoupled_loss": True, "use_sapo_loss": True}}, "use_sapo_loss"),
    ],
    "slime": [
        ({"use_tis": True, "custom_tis_function_path": "my.function"}, "custom_tis_function_path"),
        (slime_mis(tis_batch_normalize=True, use_rs=True), "tis_batch_normalize"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "use_tis"),
        (slime_mis(), "custom_tis_function_path"),
        (slime_mis(tis_level="token"), "tis_upper_bound"),
        ({"use_unbiased_kl": True, "kl_loss_type": "k2"}, "use_unbiased_kl"),
        ({"use_opsm": True, "opsm_delta": None}, "opsm_delta"),
        (
            {"use_rollout_logprobs": True, "get_mismatch_metrics": True, **ICEPOP},
            "get_mismatch_metrics",
        ),
        ({OLD: True, "partial_rollout": False}, OLD),
    ],
    "openrlhf": [
        (openrlhf(enable=True) | {"policy_loss_type": "cispo"}, "policy_loss_type"),
        (openrlhf(level="seq", gating="binary_kl"), "is_correction_threshold"),
        (openrlhf(level="token", gating="tv", mode="clip", threshold=0.2), "is_correction_mode"),
        (openrlhf(level="seq", mode="clip"), "is_correction_mode"),
        (openrlhf(level="geo"), "is_correction_level"),
        (openrlhf(level="token", enable=True), "is_correction_enable"),
        (openrlhf(threshold=[0.5, 2.0]), "is_correction_threshold"),
        (
            {
                "algo.kl.unbiased_gradient": True,
                "policy_loss_type": "gspo",
                **openrlhf(enable=True),
            },
            "unbiased_gradient",
        ),
    ],
    "fireworks": [
        ({"recipe": {"a": {"tis": {"cap": 1.0}}}}, "recipe.a.tis.cap"),
        ({"tis": {"level": "sequence", "icepop_threshold": 2.0}}, "icepop_threshold"),
    ],
    "prime_rl": [
        ({"loss": {"kl_tau": None}}, "kl_tau"),
        ({"adv_tau": 0.5}, "adv_tau"),
        ({"trainer.loss": {"type": "custom", "kwargs": {"a": 1}}}, "type"),
        ({"orchestrator.algo.type": "opd"}, "algo.type"),
    ],
    "verll": [({}, "verl")],
}


@pytest.mark.parametrize(
    ("framework", "mapping", "key"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_refused(framework: str, mapping: Native, key: str) -> None:
    with pytest.raises(TranslationError, match=rf"\b{re.escape(key)}\b"):
        translate(framework, mapping)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["actor.newTisCap", "my-icepop", "staleness_limit"])
def test_an_unknown_name_that_may_be_about_correction_is_an_error(
    framework: str, name: str
) -> None:
    """The error names the key and the nearest name; a null value is no setting."""
    rest = {"model.path": "x", "data.seed": 1}
    with pytest.raises(TranslationError, match=rf"{name.replace('-', '_')}: .* is [a-z_0-9]+;"):
        translate(framework, rest | {name: True})
    assert translate(framework, rest | {name: None}).config == translate(framework, rest).config
