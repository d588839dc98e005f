"""What no setting of ours can say, and names that no translator reads: an error names the key and
the way out.
"""

from __future__ import annotations

from typing import Any

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

from megatron_rl.workshop.translation.keys import Native, TranslationError
from megatron_rl.workshop.translation.settings import may_correct
from megatron_rl.workshop.translation.table import table
from megatron_rl.workshop.translation.translate import FRAMEWORKS, translate


def verl_is(**keys: Any) -> dict[str, Any]:
    return {"rollout_is": "token", **keys}


REFUSED: dict[str, list[tuple[Native, str]]] = {
    "verl": [
        ({"rollout_is": "group"}, "rollout_is"),
        ({"rollout_is_treshold": 2.0}, "did you mean rollout_is_threshold"),
        *(
            (verl_is(rollout_is_threshold=cap), "rollout_is_threshold")
            for cap in ("5_0.5", True, "0.5_", 10**400)
        ),
        (verl_is(rollout_is_threshold="${cap}"), "interpolation"),
        (verl_rs("seq_max_k1", "2"), "no rule seq_max_k1"),
        (verl_rs("token_k2", "0.1_0.2"), "one upper bound"),
        (verl_rs("token_k2,token_k3,seq_sum_k1", "0.1,0.2"), "expected one threshold, or 3"),
        (verl_rs("seq_mean_k1", "0.5"), "would keep nothing"),
        ({"rollout_rs": "token_k2"}, "rollout_rs_threshold"),
        ({"rollout_rs": ""}, "rollout_rs"),
        ({"algorithm": {"rollout_correction": True}}, "expected keys and values"),
        (
            {"algorithm": {"rollout_corection": {"rollout_is": "token"}}},
            "did you mean rollout_correction",
        ),
        ({"algorithm": {"rollout_is": "token"}}, "under algorithm.rollout_correction only"),
        (verl_is() | {"algorithm.rollout_correction.rollout_is": "sequence"}, "rollout_is"),
        *((rest | {"lr": 1e-6}, "lr is 1e-06: unknown") for rest in (verl_is(), {})),
        (
            {"actor_rollout_ref": {"actor": {"tis_imp_ratio_cap": 2.0}}},
            "tis_imp_ratio_cap: no longer there",
        ),
        (verl_is(rollout_is_veto_threshold=1e-4), "rollout_is_veto_threshold"),
        (verl_run({"use_policy_gradient": True}), "loss_type: reinforce"),
        (verl_run({"debug_rollout_actor_probs": True}), "debug_rollout_actor_probs"),
        (verl_is(loss_type="gspo"), "loss_type"),
        (
            verl_run(verl_is()) | {"actor_rollout_ref.rollout.calculate_log_probs": False},
            "calculate_log_probs",
        ),
        (verl_run({**verl_rs("token_k2", "1"), "bypass_mode": True}, use_v1=True), "rollout_rs"),
        (verl_run(verl_rs("token_k2", "1"), agg="seq-mean-token-mean"), "loss_agg_mode"),
        (verl_run(verl_rs("token_k2", "1"), loss="sapo"), "loss_mode is 'sapo'"),
        (
            verl_is(**verl_rs("token_k2", "1"), rollout_is_batch_normalize=True),
            "rollout_is_batch_normalize",
        ),
        (verl_is(bypass_mode=True, rollout_is_batch_normalize=True), "rollout_is_batch_normalize"),
        (
            verl_in_loss(rollout_is="token") | {"algorithm.rollout_correction.bypass_mode": False},
            "with itself",
        ),
        (verl_in_loss(rollout_iss="token"), "did you mean rollout_is"),
        (verl_is(loss_mode="my_loss"), "loss_mode is 'my_loss': expected one of"),
        ({"defaults": ["ppo_trainer", "_self_"]}, "resolve the configuration first"),
        ({"loss_agg_mode": "token-sum"}, "loss_agg_mode is 'token-sum': .*sum"),
        (verl_is(loss_agg_mode="banana"), "loss_agg_mode is 'banana': expected one of"),
        ({"loss_mode": "dro"}, "dro_beta: verl needs a number"),
        (verl_is(loss_mode="dro", dro_beta=0.1), "rollout_is is 'token': verl weighs"),
    ],
    "skyrl": [
        *(
            ({f"token_mask_is_threshold_{side}": 0.5}, f"_{side}.*ignores one bound")
            for side in ("low", "high")
        ),
        (TOKEN_MASK | {"sequence_mask_metric": "geometric"}, "sequence_mask_metric"),
        (TOKEN_MASK | {"tis_ratio_type": "sequence"}, "tis_ratio_type"),
        (skyrl({"policy_loss_type": "dppo"}, tis_ratio_type="token"), "tis_ratio_type"),
        ({"policy_loss_type": "cross_entropy", "tis_ratio_type": "token"}, "policy_loss_type"),
        ({"policy_loss_type": "clip_cov", "tis_ratio_type": "token"}, "SkyRL refuses it"),
        ({"policy_loss_type": "kl_cov", "sequence_mask_metric": "product"}, "SkyRL refuses it"),
        (skyrl({"policy_loss_type": "repo_r"}), "policy_loss_type is 'repo_r': expected one of"),
        (
            {"trainer": {"tis_ratio_type": "token"}},
            "under trainer.algorithm.off_policy_correction only",
        ),
        ({"use_tis": True}, "tis_imp_ratio_cap"),
        ({"outlier_token_is_threshold_low": -1}, "never negative"),
    ],
    "trl": [
        (trl(mode="token_truncate", clip_max=None), "vllm_importance_sampling_clip_max"),
        ({"loss_type": "vespo"}, "vllm_importance_sampling_mode: .*refuses it; use token_truncate"),
        ({"loss_type": "vespo", **trl(mode="token_mask")}, "vllm_importance_sampling_mode.*1e-8"),
        ({"loss_type": "vespo", "use_vllm": False}, "loss_type is 'vespo'"),
        (
            {"loss_type": "vespo", "beta": 0.1, **trl(mode="token_truncate")},
            "use_bias_correction_kl",
        ),
        (
            {"vllm_importance_samplng_mode": "token_mask"},
            "did you mean vllm_importance_sampling_mode",
        ),
        (trl(mode="token_clip"), "vllm_importance_sampling_mode"),
        (
            {"beta": 0.04, "importance_sampling_level": "sequence"},
            "use_bias_correction_kl.* set it to false",
        ),
        (
            {"defaults": "base.yaml", "hydra": {"searchpath": ["x"]}},
            "resolve the configuration first",
        ),
    ],
    "nemo_rl": [
        ({"loss_fn": nemo(ratio=2.0)}, "truncated_importance_sampling_type"),
        ({"loss_fn": {"use_on_policy_kl_approximation": True}}, "use_on_policy_kl_approximation"),
        (
            {"grpo.seq_logprob_error_threshold": 1.5, "ppo.seq_logprob_error_threshold": 2.0},
            "seq_logprob_error_threshold is given twice",
        ),
        (
            {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k1"},
            "reference_policy_kl_type is 'k1'",
        ),
        (NEMO_ON | {"use-importance-sampling-correction": False}, "twice"),
        (nemo(type="tis"), "truncated_importance_sampling_type"),
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
        (areal(level="sequence", action="clamp") | {"m2_threshold": 0.1}, "m2_threshold"),
        (areal(metric="kl_k2") | {"m2_threshold": 0.1}, "m2_threshold"),
        ({"recompute_logprob": True, "m2_threshold": 0.1}, "m2_threshold"),
        (areal(upper=0.9), "upper"),
        ({"actor": {"behave_imp_weight_cap": 5.0}}, "behave_imp_weight_cap: no longer there"),
        ({"behav_imp_weight_cap": 5.0}, "behav_imp_weight_cap"),
        ({"metric": "ratio", "upper": 5.0}, "metric"),
        (areal() | {"use_decoupled_loss": False}, "use_decoupled_loss"),
        (
            {"use_decoupled_loss": True, "prox_logp_method": "loglinear", "m2_threshold": 0.1},
            "m2_threshold",
        ),
        ({"actor": {"use_decoupled_loss": True, "prox_logp_method": "old"}}, "reuse_train_logp"),
        (
            {"actor": {"use_decoupled_loss": True, "use_sapo_loss": True}},
            "use_sapo_loss is True: AReaL refu",
        ),
    ],
    "slime": [
        ({"use_tis": True, "custom_tis_function_path": "my.function"}, "custom_tis_function_path"),
        (slime_mis(tis_batch_normalize=True, use_rs=True), "tis_batch_normalize"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "use_tis"),
        (slime_mis(), "custom_tis_function_path"),
        (slime_mis(tis_level="token"), "tis_upper_bound"),
        ({"use_rs": True, "tis_upper_bound": 2.0}, "use_rs"),
        *(
            ({"use_unbiased_kl": True, **kind}, "use_unbiased_kl.*k3")
            for kind in ({}, {"kl_loss_type": "k2"})
        ),
        ({"use_opsm": True, "opsm_delta": None}, "opsm_delta is None: slime needs a number"),
        ({"use_tis": True, "tis_level": "token", **ICEPOP}, "tis_level"),
        (
            {"use_rollout_logprobs": True, "get_mismatch_metrics": True, **ICEPOP},
            "get_mismatch_metrics",
        ),
        (
            {OLD: True, "partial_rollout": False},
            f"{OLD} is True: slime ignores it without partial_rollout",
        ),
    ],
    "openrlhf": [
        ({"use_icepop": True}, "use_icepop: no longer there"),
        (openrlhf(type="tis") | {"vllm_is_correction_type": "icepop"}, "vllm_is_correction_type"),
        (openrlhf(enable=True) | {"policy_loss_type": "cispo"}, "policy_loss_type"),
        (openrlhf(enable=True, threshold=[0.5]), "is_correction_threshold"),
        (openrlhf(level="seq", gating="binary_kl"), "is_correction_threshold: .*one upper bound"),
        (
            openrlhf(level="token", gating="tv", threshold=[0.1, 0.2]),
            "is_correction_threshold.*one upper bound",
        ),
        (
            openrlhf(level="token", gating="tv", mode="clip", threshold=0.2),
            "is_correction_mode is 'clip'",
        ),
        (openrlhf(level="seq", mode="clip"), "is_correction_mode.*OpenRLHF refuses"),
        (openrlhf(level="geo"), "is_correction_level is 'geo': .*seq"),
        (openrlhf(level="token", enable=True), "is_correction_enable"),
        (openrlhf(threshold=[0.5, 2.0]), "is_correction_threshold.*is_correction_level"),
        (openrlhf(level="token", threshold=[1, 2, 3]), "is_correction_threshold"),
        (
            {
                "algo.kl.unbiased_gradient": True,
                "policy_loss_type": "gspo",
                **openrlhf(enable=True),
            },
            "unbiased_gradient",
        ),
        ({"vllm_enable_is_correction": True}, "nearest that is known is enable_vllm_is_correction"),
    ],
    "fireworks": [
        ({"recipe": {"a": {"tis": {"cap": 1.0}}, "b": {"tis": {"cap": 2.0}}}}, "several places"),
        ({"tis": {"cap": 2.0}, "is_correction": {"tis_cap": 3.0}}, "is_correction, tis; keep one"),
        ({"is_correction": {"tis_cap": 3, "clip_high": 2.0}}, "clip_high"),
        ({"cap": 2.0, "kl_beta": 0.0}, "kl_beta"),
        ({"tis": {"level": "sequence", "icepop_threshold": 2.0}}, "icepop_threshold"),
        ({"tis": {"capp": 2.0}}, "did you mean cap"),
        ({"tis": {"cap": -1.0}}, "cap"),
    ],
    "prime_rl": [
        ({"loss": {"kl_tau": None}}, "kl_tau is None: prime-rl needs a number"),
        ({"adv_tau": 0.5}, "adv_tau is 0.5"),
        ({"type": "ipo", "ipo_threshold": -0.1}, "ipo_threshold is -0.1"),
        ({"trainer.loss": {"type": "custom", "kwargs": {"a": 1}}}, "type is 'custom': "),
        ({"dppo_mask_hi": 0.1}, "did you mean dppo_mask_high"),
        ({"teacher_tau": 1.0}, "teacher_tau is 1.0: no longer there"),
        ({"orchestrator.algo.type": "opd"}, "algo.type is 'opd'"),
        ({"a.source": [{"algo": {"type": "sft"}}]}, r"source\[0\].algo.type"),
    ],
    "verll": [({}, "did you mean verl")],
    "miles": [({}, "known are verl, skyrl")],
}


@pytest.mark.parametrize(
    ("framework", "mapping", "words"),
    [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_refused(framework: str, mapping: Native, words: str) -> None:
    with pytest.raises(TranslationError, match=words):
        translate(framework, mapping)


SUSPECTS = [
    "vllm_enable_is_correction",
    "actor.newTisCap",
    "my-icepop",
    "x.rs_settings.level",
    "staleness_limit",
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", SUSPECTS)
def test_an_unknown_name_that_may_be_about_correction_is_an_error(
    framework: str, name: str
) -> None:
    """It names the key and the nearest name that is known; a key that holds nothing asks for
    nothing.
    """
    rest = {"model.path": "x", "data.seed": 1}
    with pytest.raises(
        TranslationError,
        match=f"^{framework}: {name.replace('-', '_')}: .*nearest.* is [a-z_0-9]+;",
    ):
        translate(framework, rest | {name: True})
    assert translate(framework, rest | {name: None}).config == translate(framework, rest).config


def test_words_of_a_name() -> None:
    """And every name that is left out on purpose is one that would be suspected."""
    suspects = ("use_tis", "useTisNow", "TISCap", "vllm-is", "masked_tokens")
    names = (*suspects, "history", "params", "rsync", "this_misc", "klein")
    assert tuple(filter(may_correct, names)) == suspects
    assert all(
        may_correct(name) for framework in FRAMEWORKS for name in table(framework).correction.others
    )
