"""Files of other projects through `megatron-rl translate`: whole runs, output and refusals."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import Command
from translation_cases import ALL

from megatron_rl.apps.translation.keys import TranslationError
from megatron_rl.apps.translation.settings import LEFT_OUT, flatten
from megatron_rl.apps.translation.translate import (
    FRAMEWORKS,
    correction_section,
    translate,
    translate_file,
)
from megatron_rl.config import from_mapping, load
from megatron_rl.config.correction_rules import check_correction, check_objective
from megatron_rl.config.plain_yaml import write_yaml
from megatron_rl.config.schema import CorrectionConfig, LossConfig, LossName


def test_what_is_printed_is_read_back_as_the_same_correction() -> None:
    """With the loss of its notes it also passes the checks of a recipe."""
    for framework, mapping in ALL:
        config = translate(framework, mapping).config
        section = yaml.safe_load(write_yaml(correction_section(config)))
        assert from_mapping(section).correction == config, (framework, mapping)
        assert section["correction"].keys() == vars(CorrectionConfig()).keys()
        weighs = config.anchor == "sampler" and config.weight.level != "none"
        loss = LossConfig(name=LossName.reinforce if weighs else LossName.ppo)
        assert check_objective(config, loss) == [], (framework, mapping)


def test_every_input_is_translated_or_refused() -> None:
    """Random values of real keys give a valid correction or a TranslationError."""
    names = {
        name: sorted({key for f, mapping in ALL if f == name for key in flatten(mapping)})
        for name in FRAMEWORKS
    }
    words = "token sequence geometric product tis icepop mask clamp ratio kl_k1 sum 0.5_5 0.5 true null rollout 1.2,0.3"
    odd: list[Any] = [None, True, False, [], [0.5, 2.0], {}]
    values = [
        *words.split(),
        "",
        *odd,
        0,
        1,
        -1,
        2.0,
        1e300,
        5e-324,
        math.nan,
        math.inf,
    ]
    source = random.Random(0)
    translated = 0
    for _ in range(3000):
        framework = source.choice(list(FRAMEWORKS))
        keys = source.sample(names[framework], source.randint(0, 4))
        try:
            config = translate(framework, {key: source.choice(values) for key in keys}).config
        except TranslationError:
            continue
        translated += 1
        assert check_correction(config) == []
    assert 500 < translated < 2500


# runs' files: what resembles a setting of the correction beside those that are
FILES: dict[str, dict[str, Any]] = yaml.safe_load("""
verl:
  algorithm:
    {adv_estimator: grpo, rollout_correction: {rollout_is: token}, kl_ctrl: {kl_coef: 0.1}, use_kl_in_reward: false}
  actor_rollout_ref:
    actor: {policy_loss: {loss_mode: vanilla}, clip_ratio_c: 3.0, use_kl_loss: true, grad_clip: 1.0}
    rollout: {n: 8}
  critic: {loss_agg_mode: seq-mean-token-mean, cliprange_value: 0.5, loss_type: x}
  distillation.distillation_loss: {use_policy_gradient: true, loss_max_clamp: 10.0, policy_loss_mode: vanilla}
  async_training.staleness_threshold: 1
  loss_scale_factor: 1
  trainer: {n_gpus_per_node: 8, v1: {trainer_mode: sync}}
skyrl:
  trainer:
    algorithm:
      policy_loss_type: cispo
      cispo: {cispo_eps_clip_low: 0.2, cispo_anchor: old}
      off_policy_correction: {tis_ratio_type: token}
      use_tis: false
      tis_imp_ratio_cap: -1.0
      eps_clip_low: 0.2
      kl_loss_coef: 0.1
      loss_reduction: x
      value_clip: 1.0
    placement: {colocate_all: true}
  trainer.fully_async.max_staleness_steps: 4
  generator: {sampling_params: {logprobs: 1, top_p: 1.0}}
trl:
  {use_vllm: true, vllm_mode: colocate, vllm_max_model_length: 2048, vllm_importance_sampling_mode: token_truncate,
   importance_sampling_level: token, top_entropy_quantile: 1.0, loss_type: dapo, beta: 0.0,
   use_bias_correction_kl: true, max_grad_norm: 1.0, mask_truncated_completions: true}
nemo_rl:
  grpo: {num_prompts_per_step: 32, seq_logprob_error_threshold: null}
  loss_fn: {use_importance_sampling_correction: true, ratio_clip_max: 0.2, ratio_clip_min: 0.2,
            kl_input_clamp_value: 20, use_kl_in_reward: false, use_on_policy_kl_approximation: true,
            reference_policy_kl_penalty: 0.0}
  policy: {clip_grad: 1.0, generation: {temperature: 1.0}}
areal:
  actor:
    {use_decoupled_loss: true, rejection_sampling: {upper: 2.0}, importance_sampling_level: token, eps_clip: 0.2,
     kl_ctl: 0.0, reward_clip: 20.0, optimizer: {type: adam, lr: 1.0e-5, gradient_clipping: 1.0}}
  teacher: {use_decoupled_loss: false, rejection_sampling: {upper: 9.0}}
  gconfig: {temperature: 1.0}
slime:
  {use_tis: true, tis_clip: 1.5, eps_clip: 0.2, eps_clip_high: 0.28, kl_loss_type: k3, loss_mask_type: qwen,
   clip_grad: 1.0, use_opd: false, rollout_batch_size: 32, custom_rm_path: my.reward}
openrlhf:
  algo: {advantage: {is_correction_enable: true, estimator: reinforce}, kl: {init_coef: 0.1}}
  actor: {eps_clip_low_high: [0.2, 0.2], policy_loss_type: ppo, dual_clip: 3, aux_loss_coef: 0.1}
  reward.clip_range: 1
  vllm: {num_engines: 4}
fireworks:
  {log_path: logs, kl_beta: 0.001, tis: {cap: 2.0}, anchor_logp: old_policy, trainer: {training_shape_id: x},
   x: {grad_clip_norm: 1.0, mask_prompt: true}}
prime_rl:
  orchestrator: {algo: {type: grpo}, train: {source: [{name: a, algo: {type: max_rl}}]}}
  trainer: {loss: {kl_tau: 0, dppo_mask_high: 0.1}, optim: {type: adamw, lr: 1.0e-6, max_norm: 1.0}}
  x.action_loss_type: default
""")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_whole_file_says_what_it_did_not_look_at(framework: str, tmp_path: Path) -> None:
    """The correction is found, notes list the rest, and no key is taken for a mistyped one."""
    config, notes, *_ = translate(framework, FILES[framework])
    assert config.weight.level == ("none" if framework == "prime_rl" else "token")
    assert [note.startswith(LEFT_OUT) for note in notes].index(True) == len(notes) - 1
    source = tmp_path / "theirs.yaml"
    source.write_text(yaml.safe_dump(FILES[framework]))
    printed = translate_file(framework, source)
    assert yaml.safe_load(printed) == yaml.safe_load(write_yaml(correction_section(config)))
    assert max(map(len, printed.splitlines())) <= 100


def test_underscores_in_a_file_stay_two_bounds(tmp_path: Path) -> None:
    """YAML 1.1 reads 0.5_5 as the number 0.55, and 1e-4 as text."""
    source = tmp_path / "verl.yaml"
    source.write_text("rollout_is: token\nrollout_is_threshold: 0.5_5\n")
    assert yaml.safe_load(source.read_text())["rollout_is_threshold"] == 0.55
    printed = translate_file("verl", source)
    weight = yaml.safe_load(printed)["correction"]["weight"]
    assert (weight["low"], weight["high"], weight["outside"]) == (0.5, 5.0, "zero")
    source.write_text("sequence_mask_metric: geometric\noutlier_token_is_threshold_low: 1e-4\n")
    rules = yaml.safe_load(translate_file("skyrl", source))["correction"]["reject"]
    assert rules[1] == {"level": "sequence", "stat": "ratio", "reduce": "min", "low": 1e-4}


def test_the_command_prints_a_recipe_s_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """From standard input, with another spelling of the project's name."""
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("loss_fn: {use_importance_sampling_correction: true}")
    )
    (tmp_path / "ours.yaml").write_text(command("translate", "NeMo-RL", "-", "--correction"))
    assert load(tmp_path / "ours.yaml").correction.weight.high is None


def test_the_command_on_bytes_and_an_empty_file(tmp_path: Path, command: Command) -> None:
    source = tmp_path / "theirs.yaml"
    source.write_bytes(b"\xff\xfe\x00")
    assert "theirs.yaml" in command("translate", "verl", source, status=2)
    source.write_bytes(b"")
    section = yaml.safe_load(command("translate", "verl", source, "--correction"))["correction"]
    assert section["weight"]["level"] == "none"
    assert "add --correction" in command("translate", "fireworks", source, status=2)
