"""Every row of the table of other projects: their formula, as they compute it, against ours.

A case (`translation_cases_*.py`) holds native keys and a function of (prox, mu, mask) that gives the multiplier of
every token's loss and the tokens that count. Equality is checked on random data.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from loss_cases import inputs_of
from torch import Tensor
from translation_cases_flat import CASES as FLAT_CASES
from translation_cases_sections import CASES as SECTION_CASES
from translation_cases_two_policies import BYPASSES, TWO_POLICIES
from translation_oracle import ADVANTAGES, Native, data, rho, row_mean, slime_mis, verl_rs

from megatron_rl.config.schema import CorrectionConfig, LossName, Reduction
from megatron_rl.loss.policy_loss import LossConfig, policy_loss
from megatron_rl.rollout_correction import apply_conditional_rules, rollout_correction
from megatron_rl.workshop.translation.translate import TranslationError, translate

CASES = SECTION_CASES + FLAT_CASES
CASES_BY_NAME = {what: mapping for _, what, mapping, _ in CASES}


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


@pytest.mark.parametrize(("framework", "mapping"), BYPASSES, ids=lambda x: x if isinstance(x, str) else "")
def test_bypass(framework: str, mapping: dict[str, Any]) -> None:
    config, _ = translate(framework, mapping)
    assert config.anchor == "sampler"
    assert config.weight.level == "none"
    assert not config.renormalize


@pytest.mark.parametrize(
    ("framework", "mapping", "name", "native"), TWO_POLICIES, ids=lambda x: x if isinstance(x, str) else ""
)
def test_losses_with_two_policies(
    framework: str, mapping: dict[str, Any], name: str, native: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> None:
    config, _ = translate(framework, mapping)
    reduction = "seq_mean_token_mean" if name == "gspo" else "token_mean"
    loss_config = LossConfig(name=LossName(name), clip_low=0.2, clip_high=0.2, reduction=Reduction(reduction))
    for seed in range(4):
        pi_BT, mu_BT, mask_BT = data(seed, spread=0.3)
        advantages_B = ADVANTAGES.double()
        start = rollout_correction(None, mu_BT, mask_BT, config)
        inputs = inputs_of(pi_BT, mu_BT, mu_BT, start, advantages_B)
        loss, _ = policy_loss(inputs, loss_config, correction=config)
        per_token_BT = native(pi_BT - mu_BT, pi_BT, advantages_B[:, None], mask_BT) * mask_BT
        expected = per_token_BT.sum() / mask_BT.sum()
        if name == "gspo":
            expected = row_mean(per_token_BT, mask_BT).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


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
        ("verl",
         {"algorithm.rollout_correction.rollout_is": "token", "actor_rollout_ref.rollout.calculate_log_probs": False},
         "calculate_log_probs"),
        ("verl",
         {"algorithm.rollout_correction": {**verl_rs("token_k2", "1"), "bypass_mode": True}, "trainer.use_v1": True},
         "rollout_rs"),
        ("verl", {"algorithm.rollout_correction": verl_rs("token_k2", "1"),
         "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}, "loss_agg_mode"),
        ("verl", verl_rs("seq_mean_k1", "0.5"), "would keep nothing"),
        ("verl", {**verl_rs("token_k2", "1"), "rollout_is": "token", "rollout_is_batch_normalize": True},
         "rollout_is_batch_normalize"),
        ("verl", {"bypass_mode": True, "rollout_is": "token", "rollout_is_batch_normalize": True},
         "rollout_is_batch_normalize"),
        ("skyrl", {"token_mask_is_threshold_low": 0.5}, "token_mask_is_threshold_low"),
        ("skyrl",
         {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0, "sequence_mask_metric": "geometric"},
         "sequence_mask_metric"),
        ("skyrl",
         {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0, "tis_ratio_type": "sequence"},
         "tis_ratio_type"),
        ("skyrl", {"trainer.algorithm": {"policy_loss_type": "dppo", "off_policy_correction.tis_ratio_type": "token"}},
         "tis_ratio_type"),
        ("skyrl", {"policy_loss_type": "cross_entropy", "tis_ratio_type": "token"}, "policy_loss_type"),
        ("skyrl", {"trainer": {"tis_ratio_type": "token"}}, "under trainer.algorithm.off_policy_correction only"),
        ("skyrl", {"use_tis": True}, "tis_imp_ratio_cap"),
        ("skyrl", {"outlier_token_is_threshold_low": -1}, "never negative"),
        ("trl", {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
         "vllm_importance_sampling_clip_max"),
        ("trl", {"loss_type": "vespo"}, "loss_type"),
        ("trl", {"vllm_importance_samplng_mode": "token_mask"}, "did you mean vllm_importance_sampling_mode"),
        ("nemo_rl", {"loss_fn": {"truncated_importance_sampling_ratio": 2.0}}, "truncated_importance_sampling_type"),
        ("nemo_rl", {"loss_fn": {"use_on_policy_kl_approximation": True}}, "use_on_policy_kl_approximation"),
        ("nemo_rl", {"grpo.seq_logprob_error_threshold": 1.5, "ppo.seq_logprob_error_threshold": 2.0},
         "seq_logprob_error_threshold is given twice"),
        ("nemo_rl", {"use_importance_sampling_correction": True, "use-importance-sampling-correction": False}, "twice"),
        ("trl", {"vllm_importance_sampling_mode": "token_clip"}, "vllm_importance_sampling_mode"),
        ("trl", {"use_bias_correction_kl": True}, "use_bias_correction_kl"),
        ("nemo_rl", {"truncated_importance_sampling_type": "tis"}, "truncated_importance_sampling_type"),
        ("nemo_rl", {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "seq-mask-tis",
         "truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.8,
         "seq_logprob_error_threshold": 1.5}, "seq_logprob_error_threshold"),
        ("areal", {"rejection_sampling": {"metric": "kl_k3"}}, "metric"),
        ("areal", {"rejection_sampling": {"action": "clamp", "metric": "kl_k2"}}, "action"),
        ("areal", {"rejection_sampling": {"level": "sequence", "action": "clamp", "agg": "max", "lower": 0.5}}, "agg"),
        ("areal", {"rejection_sampling": {"level": "sequence"}, "m2_threshold": 0.1}, "m2_threshold"),
        ("areal", {"rejection_sampling": {"level": "sequence", "action": "clamp"}, "m2_threshold": 0.1},
         "m2_threshold"),
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
        ("slime", {"use_tis": True, "tis_level": "token", "custom_tis_function_path": "slime.loss.icepop_function"},
         "tis_level"),
        ("slime", {"use_rollout_logprobs": True, "get_mismatch_metrics": True,
         "custom_tis_function_path": "slime.loss.icepop_function"}, "get_mismatch_metrics"),
        ("openrlhf", {"use_icepop": True}, "use_icepop: no longer there"),
        ("openrlhf", {"is_correction_type": "tis", "vllm_is_correction_type": "icepop"}, "vllm_is_correction_type"),
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
)  # fmt: skip
def test_what_cannot_be_said_names_the_key(framework: str, mapping: dict[str, Any], key: str) -> None:
    with pytest.raises(TranslationError, match=key):
        translate(framework, mapping)


def test_the_result_is_a_correction_config_with_notes() -> None:
    found = translate("trl", {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "learning_rate": 1e-6})
    config, notes = found
    assert isinstance(found, CorrectionConfig)
    assert type(config) is CorrectionConfig
    assert found == config
    assert config == found
    assert found != replace(config, anchor="sampler")
    assert found.weight == config.weight
    assert found.notes == notes == ["left out, as not about correction: learning_rate"]
    d_BT, zeros_BT, mask_BT = torch.full((1, 2), 0.1), torch.zeros(1, 2), torch.ones(1, 2)
    weights = [rollout_correction(d_BT, zeros_BT, mask_BT, each).weights_BT for each in (found, config)]
    assert torch.equal(*weights)


def test_notes_name_their_condition() -> None:
    assert "20" in translate("fireworks", {"tis": {"level": "sequence"}}).notes[0]
    assert "20" in translate("verl", verl_rs("seq_sum_k1", "2")).notes[0]
    assert "one update per batch" in translate("trl", {"off_policy_mask_threshold": 0.5}).notes[0]
    assert "learner's own old logprobs" in translate("slime", {"use_opsm": True}).notes[0]
    assert translate("trl", {"use_vllm": False, "learning_rate": 1e-6}).notes == [
        "left out, as not about correction: learning_rate"
    ]


def test_a_large_section_is_listed_by_what_was_read_of_it() -> None:
    actor = {f"option_{place}": place for place in range(20)} | {"use_decoupled_loss": True}
    (note,) = translate("areal", {"actor": actor, "ref": {"path": "x"}, "seed": 1}).notes
    assert note == "left out, as not about correction: actor (all but use_decoupled_loss), ref, seed"


def test_what_is_missing_is_said() -> None:
    """Where the default is a guess, or the section is not there at all, a note says so."""
    expected: list[tuple[str, dict[str, Any], str]] = [
        ("verl", {"trainer": {"n_gpus_per_node": 8}}, "verl corrects nothing"),
        ("verl", {"defaults": ["ppo_trainer"], "algorithm": {"rollout_correction": {}}}, "defaults"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "null"}, "rollout_is_threshold is null"),
        ("verl", verl_rs("token_k2", "1"), "renormalize: false"),
        ("verl", {"bypass_mode": True, **verl_rs("token_k2", "1")}, "use_v1"),
        ("skyrl", {"trainer.algorithm.loss_reduction": "token_mean"}, "SkyRL corrects nothing"),
        ("trl", {}, "use_vllm is not given"),
        ("trl", {"use_vllm": False, "off_policy_mask_threshold": 0.1}, "learner's own old logprobs"),
        ("nemo_rl", CASES_BY_NAME["icepop per sequence"], "use_importance_sampling_correction is not given"),
        ("areal", {"rejection_sampling": {}}, "use_decoupled_loss is not given"),
        ("slime", {"use_tis": True, "tis_upper_bound": 2.0}, "train_infer_mismatch_helper"),
        ("slime", slime_mis(tis_upper_bound=2.0, tis_batch_normalize=True), "micro-batch"),
        ("openrlhf", {"is_correction_type": "tis"}, "is_correction_enable is not given"),
        ("fireworks", {"kl_beta": 0.0, "trainer": {"job_id": "x"}}, "no tis section"),
    ]
    for framework, mapping, said in expected:
        assert any(said in note for note in translate(framework, mapping).notes), (framework, said)


def test_tokens_without_a_sampler_logprob() -> None:
    """NeMo-RL zeroes their weight, AReaL counts their ratio as 1 and their KL as out of bounds."""
    prox_BT, mask_BT = torch.full((2, 2), -1.0), torch.ones(2, 2, dtype=torch.bool)
    mu_BT = torch.tensor([[-1.0, math.nan], [-1.0, -1.0]])
    weights: dict[str, tuple[dict[str, Any], list[list[float]]]] = {
        "nemo_rl": ({"use_importance_sampling_correction": True}, [[1.0, 0.0], [1.0, 1.0]]),
        "areal": ({"rejection_sampling": {}}, [[1.0, 1.0], [1.0, 1.0]]),
        "areal token": ({"rejection_sampling": {"metric": "kl_k2"}}, [[1.0, 0.0], [1.0, 1.0]]),
        "areal row": ({"rejection_sampling": {"metric": "kl_k1", "level": "sequence"}}, [[0.0, 0.0], [1.0, 1.0]]),
    }
    for name, (mapping, expected) in weights.items():
        config, _ = translate(name.split()[0], mapping)
        assert rollout_correction(prox_BT, mu_BT, mask_BT, config).weights_BT.tolist() == expected, name


def test_extreme_ratios_are_where_the_notes_say() -> None:
    """verl clamps each token before it sums a row; with one token at +30 the sums differ."""
    config, _ = translate("verl", verl_rs("seq_sum_k1", f"{math.exp(-25)}_{math.exp(25)}"))
    prox_BT, mu_BT = torch.tensor([[30.0, -22.0]]), torch.zeros(1, 2)
    assert rollout_correction(prox_BT, mu_BT, torch.ones(1, 2), config).mask_BT.all()
