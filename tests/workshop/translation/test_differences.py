"""Where a project's answer is not ours: it is translated, refused, or said, and never left out in silence.

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
from loss_cases import inputs_of
from torch import Tensor
from translation_cases_two_policies import surrogate, verl_in_loss
from translation_oracle import ADVANTAGES, data, rho, row_mean, slime_mis, verl_rs

from megatron_rl.config.schema import CorrectionConfig, Level, LossConfig, LossName, NonFinite, Reduction
from megatron_rl.loss.policy_loss import policy_loss
from megatron_rl.rollout_correction import rollout_correction
from megatron_rl.workshop.translation.translate import TranslationError, translate, translate_file

VERL_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
SKYRL = "trainer.algorithm"
TOKEN_MASK = {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}


def said(framework: str, mapping: dict[str, Any], words: str) -> bool:
    return any(words in note for note in translate(framework, mapping).notes)


def geo_mean_rows(p: Tensor, mu: Tensor, x: Tensor, a: Tensor, m: Tensor) -> Tensor:
    sign = a.sign()
    row = row_mean(sign * torch.minimum(sign * x, sign * x.clamp(-0.2, 0.2)), m)
    weight = row_mean(rho(p, mu).clamp(max=2.0).log(), m)
    return (-a * row.exp() * weight.exp()).expand_as(x)


def sapo_tokens(p: Tensor, mu: Tensor, x: Tensor, a: Tensor, m: Tensor) -> Tensor:
    tau = torch.where(a > 0, 1.0, 1.05)
    return -a * torch.sigmoid(tau * (x.exp() - 1)) * 4 / tau * rho(p, mu).clamp(max=2.0)


def gspo_tokens(p: Tensor, mu: Tensor, x: Tensor, a: Tensor, m: Tensor) -> Tensor:
    return surrogate(row_mean(x, m), a).expand_as(x) * rho(p, mu).clamp(max=2.0)


@pytest.mark.parametrize(
    ("mode", "name", "tokens"),
    [("gspo", "gspo", gspo_tokens), ("sapo", "sapo", sapo_tokens), ("geo_mean", "gmpo", geo_mean_rows)],
)
def test_verl_losses_that_divide_by_all_rows(mode: str, name: str, tokens: Callable[..., Tensor]) -> None:
    """Each row by its own tokens, then by every row of the batch, rejected ones among them."""
    section = {"rollout_is": "token", **verl_rs("seq_mean_k1", "0.8_1.25")}
    mapping = {"algorithm.rollout_correction": section, VERL_LOSS: mode, "loss_agg_mode": "token-mean"}
    config, notes = translate("verl", mapping)
    assert any(f"loss.name: {name}" in note and "seq_mean_token_mean" in note for note in notes)
    loss_config = LossConfig(name=LossName(name), clip_low=0.2, clip_high=0.2, reduction=Reduction.seq_mean_token_mean)
    prox_BT, mu_BT, mask_BT = data(0, spread=0.3)
    pi_BT = prox_BT + 0.3 * torch.randn(mask_BT.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    found = rollout_correction(prox_BT, mu_BT, mask_BT, config)
    assert 0 < int(found.rejected_B.sum()) < len(mask_BT)
    loss, _ = policy_loss(inputs_of(pi_BT, prox_BT, mu_BT, found, ADVANTAGES.double()), loss_config)
    losses_BT = tokens(prox_BT, mu_BT, pi_BT - prox_BT, ADVANTAGES[:, None].double(), mask_BT)
    inside_B1 = (row_mean(mu_BT - prox_BT, mask_BT).exp() - 1.025).abs() <= 0.225
    expected = (row_mean(losses_BT, mask_BT) * inside_B1).sum() / len(mask_BT)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("framework", "mapping", "words"),
    [
        ("verl", {**verl_in_loss(rollout_is="token"), "algorithm.rollout_correction.bypass_mode": False},
         "with itself"),
        ("verl", verl_in_loss(rollout_iss="token"), "did you mean rollout_is"),
        ("verl", {"rollout_is": "token", "loss_mode": "my_loss"}, "loss_mode is 'my_loss': expected one of"),
        ("verl", {"algorithm.rollout_correction": verl_rs("token_k2", "1"), VERL_LOSS: "sapo"}, "loss_mode is 'sapo'"),
        ("verl", {"defaults": ["ppo_trainer", "_self_"]}, "resolve the configuration first"),
        ("trl", {"defaults": "base.yaml", "hydra": {"searchpath": ["x"]}}, "resolve the configuration first"),
        ("skyrl", {"policy_loss_type": "clip_cov", "tis_ratio_type": "token"}, "SkyRL refuses it"),
        ("skyrl", {"policy_loss_type": "kl_cov", "sequence_mask_metric": "product"}, "SkyRL refuses it"),
        ("trl", {"beta": 0.04}, "use_bias_correction_kl.* set it to false"),
        ("fireworks", {"tis": {"cap": 2.0}, "is_correction": {"tis_cap": 3.0}}, "is_correction, tis; keep one"),
        ("fireworks", {"is_correction": {"tis_cap": 3, "clip_high": 2.0}}, "clip_high"),
        ("openrlhf", {"is_correction_level": "seq", "is_correction_gating": "binary_kl"},
         "is_correction_gating.*have not"),
        ("openrlhf", {"is_correction_level": "token", "is_correction_gating": "tv"}, "is_correction_gating.*have not"),
        ("openrlhf", {"is_correction_level": "seq", "is_correction_mode": "clip"},
         "is_correction_mode.*OpenRLHF refuses"),
        ("openrlhf", {"is_correction_level": "geo"}, "is_correction_level is 'geo': .*seq"),
        ("openrlhf", {"is_correction_level": "token", "is_correction_enable": True}, "is_correction_enable"),
        ("openrlhf", {"is_correction_threshold": [0.5, 2.0]}, "is_correction_threshold.*is_correction_level"),
        ("openrlhf", {"is_correction_level": "token", "is_correction_threshold": [1, 2, 3]}, "is_correction_threshold"),
        ("openrlhf", {"algo.kl": {"unbiased_gradient": True, "use_loss": True}}, "unbiased_gradient"),
        ("verl", {"loss_agg_mode": "token-sum"}, "loss_agg_mode is 'token-sum': .*sum"),
        ("verl", {"rollout_is": "token", "loss_agg_mode": "banana"}, "loss_agg_mode is 'banana': expected one of"),
        ("verl", {"algorithm.rollout_correction.use_policy_gradient": True}, "loss_type: reinforce"),
        ("verl", {"algorithm.rollout_correction.debug_rollout_actor_probs": True}, "debug_rollout_actor_probs"),
    ],
)  # fmt: skip
def test_refused(framework: str, mapping: dict[str, Any], words: str) -> None:
    with pytest.raises(TranslationError, match=words):
        translate(framework, mapping)


def test_verl_s_settings_inside_the_loss_act_under_bypass_mode_only() -> None:
    settings = {**verl_rs("seq_mean_k1", "1.1"), "loss_type": "reinforce", "rollout_is": "token"}
    legacy = {"algorithm.rollout_correction.bypass_mode": True, "trainer.use_v1": False}
    for mapping in ({**verl_in_loss(**settings), **legacy}, verl_in_loss("vanilla", **settings)):
        assert not translate("verl", mapping).reject
        assert said("verl", mapping, "verl reads it with loss_mode: bypass_mode and trainer.use_v1 only; left out")
    assert said("verl", verl_in_loss(**settings), "is not given and taken as true")
    assert said("verl", verl_in_loss(**settings), "default trainer")
    replaced = {"algorithm.rollout_correction": {"bypass_mode": True, **verl_rs("token_k2", "1")}, VERL_LOSS: "gspo"}
    assert translate("verl", {**replaced, "trainer.use_v1": False}).reject, "the legacy trainer puts its loss in place"


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_skyrl_s_covariance_losses_ignore_masks(loss: str) -> None:
    section = {"outlier_token_is_threshold_low": 0.5, **TOKEN_MASK}
    mapping = {SKYRL: {"policy_loss_type": loss, "off_policy_correction": section}}
    config, notes = translate("skyrl", mapping)
    assert config == CorrectionConfig(config.anchor, config.weight, [], False, False, NonFinite.one)
    assert config.weight.level == Level.none
    assert any(f"with {loss} SkyRL ignores" in note for note in notes)


@pytest.mark.parametrize(
    ("framework", "gspo", "other"),
    [
        ("skyrl", {SKYRL: {"policy_loss_type": "gspo", "off_policy_correction": TOKEN_MASK}}, {SKYRL: {}}),
        ("slime", {"advantage_estimator": "gspo"}, {"advantage_estimator": "grpo"}),
        ("areal", {"actor.importance_sampling_level": "sequence"}, {"actor.importance_sampling_level": "token"}),
        ("fireworks", {"tis": {"cap": 1.2, "icepop_threshold": 2.0}}, {"tis": {"icepop_threshold": 2.0}}),
    ],
)
def test_over_which_tokens_gspo_averages(framework: str, gspo: dict[str, Any], other: dict[str, Any]) -> None:
    rest: dict[str, Any] = {}
    if framework == "slime":
        rest = slime_mis(tis_upper_bound=2.0, use_rs=True)
    if framework == "areal":
        rest = {"actor": {"rejection_sampling": {"upper": 2.0}, "use_decoupled_loss": True, "m2_threshold": 0.1}}
    assert said(framework, rest | gspo, "with GSPO")
    assert not said(framework, rest | other, "with GSPO")


@pytest.mark.parametrize(
    ("framework", "keeps", "drops"),
    [
        ("skyrl", {"sequence_mask_metric": "geometric"}, {"tis_ratio_type": "token"}),
        ("trl", {"off_policy_mask_threshold": 0.1}, {"vllm_importance_sampling_mode": "token_mask"}),
        ("slime", {"use_opsm": True}, slime_mis(tis_upper_bound=2.0, use_rs=True)),
        ("fireworks", {"tis": {"cap": 1.2, "icepop_threshold": 2.0}}, {"tis": {"icepop_threshold": 2.0}}),
        ("openrlhf", {"is_correction_type": "seq-mask-tis"}, {"is_correction_type": "icepop"}),
        ("nemo_rl", {"truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 1.2,
         "truncated_importance_sampling_ratio_min": 0.8}, {"seq_logprob_error_threshold": 1.5}),
        ("verl", {}, {**verl_rs("token_k2", "1")}),
    ],
)  # fmt: skip
def test_who_keeps_the_kl_of_rejected_tokens(framework: str, keeps: dict[str, Any], drops: dict[str, Any]) -> None:
    assert said(framework, keeps, "loss.kl_on: counted") == (framework != "verl")
    assert not said(framework, drops, "loss.kl_on")


def test_trl_s_kl_takes_its_ratio_unless_told_otherwise() -> None:
    assert translate("trl", {"beta": 0.0}) == translate("trl", {})
    assert translate("trl", {"beta": 0.04, "use_bias_correction_kl": False}) == translate("trl", {})


def test_nemo_rl_s_kl_has_another_gradient() -> None:
    assert said("nemo_rl", {"loss_fn.reference_policy_kl_penalty": 0.01}, "KL gradient")
    assert not said("nemo_rl", {"loss_fn.reference_policy_kl_penalty": 0.0}, "KL gradient")


def test_slime_s_mask_mode_leaves_its_kl_too() -> None:
    assert said("slime", slime_mis(tis_upper_bound=2.0, tis_mode="mask"), "ours keep them")


PROX_BT, MASK_BT = torch.full((1, 3), -1.0), torch.ones(1, 3, dtype=torch.bool)
MISSING_BT = torch.tensor([[-1.4, math.nan, -1.2]])


@pytest.mark.parametrize(
    ("framework", "mapping"),
    [
        ("verl", {}),
        ("skyrl", {}),
        ("trl", {"use_vllm": False}),
        ("nemo_rl", {"use_importance_sampling_correction": False}),
        ("areal", {"use_decoupled_loss": True}),
        ("slime", {"use_tis": False}),
        ("openrlhf", {"is_correction_enable": False}),
        ("trl", {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.0}),
    ],
)
def test_a_token_without_a_sampler_logprob_is_trained_where_theirs_is(framework: str, mapping: dict[str, Any]) -> None:
    found = rollout_correction(PROX_BT, MISSING_BT, MASK_BT, translate(framework, mapping).config)
    assert found.mask_BT.all()
    assert found.denominator_mask_BT.all()
    assert found.weights_BT.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("framework", "mapping"),
    [("trl", {}), ("areal", {"rejection_sampling": {"level": "sequence", "action": "clamp", "upper": 9.0}})],
)
def test_a_token_without_a_sampler_logprob_in_a_weighted_row(framework: str, mapping: dict[str, Any]) -> None:
    """It counts as d = 0 in the row, as theirs does; its own weight is the row's there and 1 here."""
    config, notes = translate(framework, mapping)
    total = 0.6 if framework == "trl" else 0.2
    weights_BT = rollout_correction(PROX_BT, MISSING_BT, MASK_BT, config).weights_BT
    torch.testing.assert_close(weights_BT, torch.tensor([[math.exp(total), 1.0, math.exp(total)]]))
    assert any("has the row's ratio" in note for note in notes)
    assert not said(framework, {"vllm_importance_sampling_mode": "token_mask"} if framework == "trl" else {}, "row's")


def test_bounds_that_verl_reads_as_one_number(tmp_path: Path) -> None:
    source = tmp_path / "verl.yaml"
    section = {"rollout_is": "token", "rollout_is_threshold": "0.5_5", **verl_rs("seq_mean_k1", "0.5_2.0")}
    source.write_text("".join(f"{name}: {value}\n" for name, value in section.items()))
    printed = translate_file("verl", source)
    assert "rollout_is_threshold: 0.5_5 is read as two bounds; without quotes it is 0.55" in printed
    assert "rollout_rs_threshold: " not in printed.split("correction:")[0]
    assert said("verl", verl_rs("seq_sum_k1", "0.5_2"), "without quotes it is 0.52 to verl")


def test_openrlhf_s_switches_that_are_off() -> None:
    """YAML reads the word off as false; a mode without a level is off as well."""
    off = translate("openrlhf", {"is_correction_enable": False})
    bounds = {"is_correction_threshold": [0.5, 2.0]}
    assert translate("openrlhf", {"is_correction_level": "off", **bounds}) == off
    assert translate("openrlhf", yaml.safe_load("is_correction_level: off")) == off
    assert translate("openrlhf", {"is_correction_mode": "clip", **bounds}) == off
    assert said("openrlhf", {"is_correction_mode": "clip", **bounds}, "is_correction_level is not given")
    assert translate("openrlhf", {"algo.kl": {"unbiased_gradient": True, "use_loss": False}}) == off


def test_openrlhf_s_gspo_takes_the_sampler_under_every_level() -> None:
    settings = {"is_correction_level": "seq", "is_correction_gating": "tv", "policy_loss_type": "gspo"}
    assert translate("openrlhf", settings).anchor == "sampler"
    assert translate("openrlhf", settings | {"is_correction_level": "off"}).anchor == "prox"


def test_removed_settings_of_verl_that_are_off() -> None:
    section = {"rollout_is": "token", "use_policy_gradient": False, "debug_rollout_actor_probs": False}
    expected = translate("verl", {"rollout_is": "token"})
    assert translate("verl", section) == expected
    assert translate("verl", {"algorithm.rollout_correction": section}) == expected


def test_lists_in_verl_s_rules() -> None:
    lists = {"rollout_rs": ["token_k1", "seq_max_k2"], "rollout_rs_threshold": ["0.5_2.0", 0.1]}
    assert translate("verl", lists) == translate("verl", verl_rs("token_k1,seq_max_k2", "0.5_2.0,0.1"))


def test_what_verl_does_otherwise_by_version_or_loss_is_said() -> None:
    """gspo in the releases up to 0.9.1 divides as loss_agg_mode says; dro is a loss that is not here."""
    rules = {"algorithm.rollout_correction": verl_rs("seq_mean_k1", "0.8_1.25"), VERL_LOSS: "gspo"}
    assert said("verl", rules, "0.9.1")
    assert said("verl", rules | {"loss_agg_mode": "token-mean"}, "0.9.1")
    assert not said("verl", rules | {"loss_agg_mode": "seq-mean-token-mean"}, "0.9.1")
    assert not said("verl", rules | {VERL_LOSS: "sapo"}, "0.9.1")
    assert said("verl", {"rollout_is": "token", "loss_mode": "dro"}, "dro")


def test_trl_says_which_versions_a_cap_was_read_for() -> None:
    cap = {"use_vllm": True, "vllm_importance_sampling_cap": 2.0}
    assert said("trl", cap, "0.23 to 0.25")
    assert said("trl", {"use_vllm": True}, "0.23 to 0.25")
    assert not said("trl", cap | {"vllm_importance_sampling_mode": "token_mask"}, "0.23")
    assert not said("trl", {"use_vllm": True, "vllm_importance_sampling_correction": False}, "0.23")
    assert not said("trl", {"use_vllm": True, "vllm_importance_sampling_clip_max": 2.0}, "0.23")
