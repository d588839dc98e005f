"""Small files of other projects as recipes: each key is translated or listed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from translation_cases import ALL

from megatron_rl import cli
from megatron_rl.apps.translation.keys import TranslationError, Unset
from megatron_rl.apps.translation.recipe import recipe, translated
from megatron_rl.apps.translation.settings import flatten, last
from megatron_rl.apps.translation.shell import Script
from megatron_rl.apps.translation.table import projects, shared, table
from megatron_rl.apps.translation.translate import translate
from megatron_rl.config import all_keys, load

ROOT = Path(__file__).parents[3]
MAPS = (
    "learner.megatron.",
    "optim.megatron.",
    "sampler.vllm.",
    "data.chat_template_kwargs",
    "loss.params.",
)
SECTIONS = ("model", "quantization", "cluster")

VERL = r"""
#!/usr/bin/env bash
set -xeuo pipefail   # what follows isn't run
MODEL_PATH=${MODEL_PATH:-"${HUB:-Qwen}/Qwen3-8B"}
pp=${PP:-2}
length=$((1024 * 2))
FILES="['data/a.parquet', 'data/b.parquet']"
[ "${pp}" -gt 1 ] && offload=True || offload=False
case "${DEVICE:-gpu}" in
    gpu|cuda) gpus=8 ;;
    *) gpus=16 ;;
esac
if [ "${BACKEND:-vllm}" = sglang ] || [ "$pp" = 1 ]; then
    tp=1
else
    tp=4
fi
DATA=(
    data.train_files="$FILES"   # two
    data.train_batch_size=512
    data.max_response_length=${length}
)
DATA+=(+algorithm.rollout_correction.rollout_is=${1-token} actor_rollout_ref.actor.optim.lr_warmup_steps=10)
python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' \
    "${DATA[@]}" \
    actor_rollout_ref.model.path="$MODEL_PATH" actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$tp \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$pp \
    actor_rollout_ref.actor.megatron.param_offload=$offload \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tp \
    trainer.n_gpus_per_node=$gpus trainer.logger='["console","wandb"]' algorithm.use_kl_in_reward=True \
    algorithm.adv_estimator=rloo algorithm.norm_adv_by_std_in_grpo=False \
    custom_reward_function.path=my_reward.py reward_model.reward_manager=dapo data.truncation=left \
    +custom_reward_function.reward_kwargs.scale=2 algorithm.filter_groups.metric=acc \
    trainer.project_name=ours trainer.experiment_name=lab/first trainer.resume_mode=auto \
    actor_rollout_ref.model.lora_rank=32 trainer.some_new_switch=3 "$@" 2>&1 | tee log.txt
"""
SLIME = """
source "$(dirname "${BASH_SOURCE[0]}")/model.sh"
PERF_ARGS=(
   --tensor-model-parallel-size 2
   # --micro-batch-size 1
   --max-tokens-per-gpu 9216 --disable-grpo-std-normalization
)
ray job submit --address=x -- python3 train.py --colocate ${MODEL_ARGS[@]} ${PERF_ARGS[@]} \\
   --hf-checkpoint /root/Qwen3-4B --prompt-data a.jsonl --input-key prompt --apply-chat-template --num-rollout 30 \\
   --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 128 --rollout-max-response-len 8192 \\
   --eval-prompt-data aime aime.jsonl amc amc.jsonl --advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 \\
   --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl --use-unbiased-kl --lr 1e-6 --use-tis
"""
OPENRLHF = """
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path OpenRLHF/Llama-3-8b --train.colocate_all \\
   --actor.eps_clip_low_high 0.2 0.27 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --rollout.batch_size 128 \\
   --train.batch_size 256 --rollout.n_samples_per_prompt 8 --data.max_len 2048 --rollout.max_new_tokens 1536 \\
   --algo.advantage.estimator dr_grpo --algo.kl.init_coef 1e-3 \\
   --algo.advantage.is_correction_level seq --algo.advantage.is_correction_threshold 0.99 1.01
"""
NEMO_BASE = """
grpo:
  {num_prompts_per_step: 32, num_generations_per_prompt: 16, normalize_rewards: false,
   use_leave_one_out_baseline: true}
policy:
  model_name: Qwen/Qwen3-8B
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step}, 4}
  max_total_sequence_length: 4096
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, tensor_parallel_size: 8}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 1, optimizer: {lr: 5.0e-6}}
  optimizer: {kwargs: {lr: 1.0e-6, betas: [0.9, 0.98]}}
loss_fn: {reference_policy_kl_penalty: 0.01, use_cispo: false}
cluster: {num_nodes: 1, gpus_per_node: 8}
"""
NEMO = """
defaults: base.yaml
grpo: {use_dynamic_sampling: true}
policy:
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 4, peft: {enabled: true, dim: 16}}
  generation: {colocated: {enabled: true}}
"""
SKYRL = """
: "${NUM_GPUS:=4}"
uv run --isolated -m skyrl.train.entrypoints.main_base trainer.policy.model.path=Qwen/Qwen2.5-1.5B \\
  trainer.algorithm.policy_loss_type=cispo trainer.algorithm.cispo.cispo_eps_clip_high=3.0 \\
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS generator.inference_engine.tensor_parallel_size=1 \\
  trainer.train_batch_size=64 trainer.policy_mini_batch_size=32 trainer.algorithm.use_kl_loss=false \\
  trainer.policy.model.lora.rank=4 trainer.policy.model.lora.target_modules=all-linear
"""
AREAL = """
actor: {path: Qwen/Qwen3-1.7B, backend: "megatron:d2p1t2", ppo_n_minibatches: 2, eps_clip: 0.4,
        optimizer: {lr: 1.0e-5}, use_decoupled_loss: true, rejection_sampling: {metric: ratio, upper: 5.0},
        reward_norm: {std_level: null}}
rollout: {backend: "sglang:d4p1t1", max_head_offpolicyness: 2, consumer_batch_size: "${train_dataset.batch_size}"}
gconfig: {n_samples: 4, max_new_tokens: 512}
train_dataset: {path: a.jsonl, batch_size: 16}
cluster: {n_nodes: 1, n_gpus_per_node: 8}
"""
TRL = """
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(output_dir="out", loss_type="dr_grpo", beta=0.04, num_generations=4, per_device_train_batch_size=4,
    gradient_accumulation_steps=2, steps_per_generation=4, use_vllm=True, max_steps=100, warmup_ratio=0.1,
    vllm_importance_sampling_mode="token_truncate")
GRPOTrainer(model="Qwen/Qwen3-0.6B", args=args, reward_funcs=accuracy_reward)
"""
PRIME = """
max_steps = 20
seq_len = 2048
[model]
name = "Qwen/Qwen3-0.6B"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[trainer.optim]
lr = 3e-6
"""
# the file of each project, those beside it, and what is ours then
CASES: dict[str, tuple[str, str, dict[str, str], dict[str, Any]]] = {
    "verl": (
        "run.sh",
        VERL,
        {},
        {
            "cluster": "1n8g",
            "model.preset": "Qwen3-8B",
            "data.train": {"data/a.parquet": 1.0, "data/b.parquet": 1.0},
            "rollout.prompts_per_step": 512,
            "rollout.max_response_tokens": 2048,
            "rollout.samples_per_prompt": 8,
            "learner.n_minibatches": 4,
            "learner.tensor_parallel": 4,
            "learner.pipeline_parallel": 2,
            "learner.data_parallel": 1,
            "sampler.engines": 2,
            "sampler.sleep": "discard",
            "loss.clip_low": 0.2,
            "loss.clip_high": 0.28,
            "loss.params.dual_clip": 3.0,
            "optim.megatron.weight_decay": 0.01,
            "log.trackers": ["wandb"],
            "correction.weight.level": "token",
            "rollout.dynamic_sampling": False,
            "optim.warmup_steps": 40,
            "advantage.estimator": "rloo",
            "learner.lora.rank": 32,
            "learner.lora.alpha": 16,
            "reward.name": "my_reward.py:compute_score",
            "reward.wrong": 0.0,
            "run.name": "lab_first",
            "run.if_exists": "resume",
        },
    ),
    "slime": (
        "run.sh",
        SLIME,
        {"model.sh": "MODEL_ARGS=(\n  --num-layers 36\n  --swiglu\n)"},
        {
            "model.path": "/root/Qwen3-4B",
            "data.eval": "aime.jsonl",
            "data.prompt_key": "prompt",
            "data.chat_template_kwargs": {},
            "learner.n_minibatches": 2,
            "loss.name": "gspo",
            "loss.clip_low": 3e-4,
            "loss.clip_high": 4e-4,
            "loss.reduction": "seq_mean_token_mean",
            "loss.kl_cap": 1e9,
            "loss.kl_estimator": "k3",
            "run.steps": 30,
            "advantage.estimator": "dr_grpo",
            "learner.tokens_per_microbatch": 10240,
            "learner.data_parallel": 4,
            "correction.weight.high": 2.0,
        },
    ),
    "openrlhf": (
        "run.sh",
        OPENRLHF,
        {},
        {
            "model.path": "OpenRLHF/Llama-3-8b",
            "loss.clip_high": 0.27,
            "sampler.engines": 4,
            "learner.n_minibatches": 4,
            "rollout.max_prompt_tokens": 512,
            "rollout.max_response_tokens": 1536,
            "advantage.estimator": "dr_grpo",
            "loss.kl_coef": 0.0,
            "optim.decay": "cosine",
            "optim.min_lr": 1e-7,
            "correction.renormalize": False,
        },
    ),
    "nemo_rl": (
        "mine.yaml",
        NEMO,
        {"base.yaml": NEMO_BASE},
        {
            "learner.tensor_parallel": 4,
            "optim.lr": 5e-6,
            "learner.n_minibatches": 4,
            "advantage.estimator": "rloo",
            "rollout.max_prompt_tokens": 2048,
            "rollout.max_response_tokens": 2048,
            "loss.kl_estimator": "k2",
            "rollout.dynamic_sampling": True,
            "learner.data_parallel": 2,
            "learner.lora.rank": 16,
            "learner.lora.alpha": 32,
            "loss.name": "ppo",
        },
    ),
    "skyrl": (
        "run.sh",
        SKYRL,
        {},
        {
            "loss.name": "cispo",
            "loss.clip_high": 3.0,
            "loss.clip_low": 1.0,
            "learner.n_minibatches": 2,
            "loss.kl_coef": 0.0,
            "sampler.devices": "0,1,2,3",
            "learner.lora.targets": ["all-linear"],
        },
    ),
    "areal": (
        "run.yaml",
        AREAL,
        {},
        {
            "learner.tensor_parallel": 2,
            "learner.data_parallel": 2,
            "sampler.devices": "4,5,6,7",
            "sampler.engines": 4,
            "rollout.max_staleness": 2,
            "advantage.estimator": "dr_grpo",
            "loss.clip_low": 0.4,
            "loss.clip_high": 0.4,
            "learner.n_minibatches": 2,
            "rollout.prompts_per_step": 16,
            "correction.reject": 1,
            "learner.lora.rank": 0,
        },
    ),
    "trl": (
        "run.py",
        TRL,
        {},
        {
            "rollout.prompts_per_step": 4,
            "rollout.samples_per_prompt": 4,
            "loss.reduction": "seq_mean_token_sum_norm",
            "loss.kl_coef": 0.04,
            "loss.kl_cap": 1e9,
            "optim.warmup_steps": 10,
            "optim.decay": "linear",
            "model.preset": "Qwen3-0.6B",
            "learner.n_minibatches": 2,
            "run.steps": 50,
            "checkpoint.every": 250,
        },
    ),
    "prime_rl": (
        "rl.toml",
        PRIME,
        {},
        {
            "rollout.prompts_per_step": 8,
            "rollout.max_staleness": 8,
            "loss.name": "dppo",
            "loss.kl_to": "sampler",
            "loss.kl_coef": 2e-3,
            "correction.anchor": "sampler",
            "rollout.max_response_tokens": 128,
        },
    ),
}


def written(project: str, folder: Path, more: str = "") -> Path:
    name, text, beside, _ = CASES[project]
    for other, content in beside.items():
        (folder / other).write_text(content)
    (folder / name).write_text(text + more)
    return folder / name


def at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, Mapping) else getattr(config, part)
    return len(config) if key == "correction.reject" else config


@pytest.mark.parametrize("project", CASES)
def test_a_recipe_of_each_project(
    project: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written by the command, loaded with the values expected, and with each of their keys counted
    once; a cluster of CPUs removes the settings for GPUs.
    """
    source = written(project, tmp_path)
    out = tmp_path / "ours.yaml"
    assert cli.main(["translate", project, str(source), "-o", str(out)]) == 0
    assert "keys translated" in capsys.readouterr().out
    config = load(out)
    raw = yaml.safe_load(out.read_text())
    presets = {"cluster": raw.get("cluster"), "model.preset": raw["model"]}
    for key, value in CASES[project][3].items():
        found = presets[key] if key in presets else at(config, key)
        assert found == value, key
    made = recipe(project, source, {})
    needless = [key for keys in made.accounts.not_needed.values() for key in keys]
    counted = [*made.accounts.translated, *needless, *made.accounts.unknown]
    assert len(counted) == len(set(counted))
    # nothing is overwritten
    assert cli.main(["translate", project, str(source), "-o", str(out)]) == 2
    small = load(out, ["cluster=cpu"])
    assert small.run.device == "cpu"
    assert small.model.init == "random"
    assert small.learner.data_parallel == 1
    assert "recompute_granularity" not in small.learner.megatron


@pytest.mark.parametrize(("entry", "ahead"), [("main_async", True), ("main_base", False)])
def test_skyrls_entry_point_says_whether_the_sampler_is_ahead(
    entry: str, ahead: bool, tmp_path: Path
) -> None:
    source = written("skyrl", tmp_path)
    tis = "trainer.algorithm.off_policy_correction.tis_ratio_type=token trainer.placement.colocate_all=false"
    script = SKYRL.replace(
        "skyrl.train.entrypoints.main_base", f"examples.train.async.{entry}"
    ).replace("=cispo", "=regular")
    source.write_text(script.replace("trainer.train_batch", f"{tis} trainer.train_batch"))
    assert recipe("skyrl", source, {}).mapping["rollout"].get("max_staleness") == (
        1 if ahead else None
    )


def test_what_is_not_translated_is_said(tmp_path: Path) -> None:
    text = recipe("verl", written("verl", tmp_path), {}).text("verl: run.sh")
    assert "algorithm.use_kl_in_reward: true" in text
    assert "matters: trainer.some_new_switch: 3" in text
    assert "actor_rollout_ref.actor.megatron.param_offload" in text
    assert "reward_kwargs.scale: 2" in text
    assert "metric: acc: groups with equal rewards" in text
    assert "project_name: ours: set the environment variable WANDB_PROJECT" in text
    assert "prompts are never cut: data.long_prompts refuses" in text
    text = recipe("trl", written("trl", tmp_path), {}).text("trl: run.py")
    assert "no counterpart: trainer.reward_funcs: accuracy_reward: " in text


@pytest.mark.parametrize(
    ("project", "more", "named"),
    [
        ("verl", "\npython -m verl.trainer.main_ppo a.b=1", "2 commands"),
        ("nemo_rl", "\nloss_fn: {ratio_clip_mn: 0.1}", "loss_fn.ratio_clip_min"),
        ("skyrl", "  trainer.policy.optimizer_config.lr=$LR", "LR=..."),
        ("slime", "  $REST", "REST="),
        ("openrlhf", "  --vllm_enable_is_correction", "enable_vllm_is_correction"),
    ],
)
def test_what_is_wrong_is_named(project: str, more: str, named: str, tmp_path: Path) -> None:
    source = written(project, tmp_path)
    text = CASES[project][1]
    source.write_text(text.rstrip() + (" \\\n" if more.startswith("  ") else "") + more + "\n")
    with pytest.raises(TranslationError, match=named):
        recipe(project, source, {})


def test_what_the_command_line_gives_stands_over_the_file(tmp_path: Path) -> None:
    given = {"PP": "1", "DEVICE": "npu", "data.train_batch_size": "256", "HUB": "/models"}
    # which is not the next recipe's
    given["data.apply_chat_template_kwargs.enable_thinking"] = "true"
    made = recipe("verl", written("verl", tmp_path), given).mapping
    assert (made["learner"]["pipeline_parallel"], made["rollout"]["prompts_per_step"]) == (1, 256)
    templates = (
        made["data"]["chat_template_kwargs"],
        table("verl").always["data.chat_template_kwargs"],
    )
    assert (made["model"], *templates) == ("Qwen3-8B", {"enable_thinking": True}, {})


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    """Output of a command is unknown, as are variables that depend on it."""
    mark = tmp_path / "mark"
    script = f"X=$(touch {mark}; echo 1)\nif test -e /; then Y=2; fi\nfor i in 1 2; do Z=$i; done\nrun $X ${{Y}} $Z"
    command = Script(tmp_path, {}).read(script).commands[-1]
    names = [word.names if isinstance(word, Unset) else word for word in command[1:]]
    assert names == [("X",), ("Y",), ("Z",)]
    assert not mark.exists()


def mistaken(name: str, source: random.Random) -> str:
    """Return the name with one letter removed, inserted, replaced or swapped."""
    place = source.randrange(len(name))
    letter = source.choice("abcdefghijklmnopqrstuvwxyz_")
    changes = [
        "",
        letter,
        letter + name[place],
        name[place : place + 2][::-1],
    ]
    kind = source.randrange(4)
    return name[:place] + changes[kind] + name[place + (2 if kind == 3 else 1) :]


def test_no_mistake_of_a_letter_in_a_key_of_the_correction_is_silent() -> None:
    """A single typo is an error or listed as unknown, in each of eight projects."""
    source = random.Random(0)
    seen = dict.fromkeys(projects(), 0)
    cases = [(project, flatten(mapping)) for project, mapping in ALL if project in seen]
    while sum(seen.values()) < 250 or min(seen.values()) < 10:
        project, settings = source.choice(cases)
        read = sorted(translate(project, settings).read)
        if not read:
            continue
        key = source.choice(read)
        wrong = key[: len(key) - len(last(key))] + mistaken(last(key), source)
        if wrong in settings or not last(wrong) or wrong in table(project).by_name:
            continue
        seen[project] += 1
        try:
            made = translated(
                table(project), {wrong if one == key else one: v for one, v in settings.items()}
            )
        except TranslationError:
            continue
        assert wrong in made.accounts.unknown, (project, wrong)


@pytest.mark.parametrize(
    ("project", "key", "value", "trackers", "others"),
    [
        ("verl", "trainer.logger", ["console", "mlflow", "tensorboard"], "tensorboard mlflow", ""),
        ("verl", "trainer.logger", ["swanlab", "vemlp_wandb"], "", "swanlab vemlp_wandb"),
        ("skyrl", "trainer.logger", "wandb", "wandb", ""),
        ("trl", "report_to", ["trackio", "wandb"], "wandb trackio", ""),
        ("trl", "report_to", "none", "", ""),
        ("nemo_rl", "logger.mlflow_enabled", True, "mlflow", ""),
        ("nemo_rl", "logger.tensorboard_enabled", False, "", ""),
        ("nemo_rl", "logger.swanlab_enabled", True, "", "swanlab"),
        ("slime", "use_tensorboard", True, "tensorboard", ""),
        ("prime_rl", "monitors.wandb.project", "mine", "wandb", ""),
    ],
)
def test_loggers_become_trackers(
    project: str, key: str, value: object, trackers: str, others: str
) -> None:
    made = translated(table(project), {key: value})
    assert made.mapping.get("log", {}).get("trackers", []) == trackers.split()
    missing = {name for name in made.accounts.missing if name.startswith("the tracker ")}
    assert missing == {f"the tracker {name}" for name in others.split()}
    assert not missing or "log.trackers" in made.text(project)


def test_tables_are_sound() -> None:
    """Each row names keys of ours or facts that are explained; no key has two rows."""
    known = {*all_keys(), *SECTIONS, *(f"={fact}" for fact in shared()["facts"])}
    used = set()
    for rules in map(table, projects()):
        names = [name for row in rules.rows for name in row.names]
        assert len(names) == len(set(names)), rules.project
        for row in rules.rows:
            words = [
                key
                for value in (row.words or {}).values()
                if isinstance(value, dict)
                for key in value
            ]
            for key in (*row.to, *words, *rules.always):
                assert key in known or key.startswith(MAPS), (rules.project, row.theirs, key)
                used.add(key)
            assert row.to or row.why, (rules.project, row.theirs)
    assert {key[1:] for key in used if key.startswith("=")} == shared()["facts"].keys()
