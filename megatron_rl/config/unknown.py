"""Unknown keys: removed ones, with a hint and their conversion in recorded configurations; names of
other projects; misspelt ones.
"""

import copy
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_rl.config.plain_yaml import Settings
from megatron_rl.logs import logger
from megatron_rl.loss.table import LOSSES

# similarity of two names, as in difflib
VERY_CLOSE = 0.86
CLOSE = 0.6
ANY = object()  # the default of a key whose value no longer matters


@dataclass(frozen=True)
class Removed:
    """A removed key."""

    hint: str
    # a recorded configuration with this value is accepted, and the key dropped
    default: Any = ANY
    # the new key, and a function of the old and the present value that returns the new one
    to: str = ""
    value: Callable[[Any, Any], Any] = lambda removed, present: removed


def _engines(fleet: Mapping[str, Any], sampler: Mapping[str, Any]) -> Settings:
    """The section `sampler` with the engines of a recorded `sampler.fleet`."""
    servers = fleet.get("servers", 0)
    addresses = fleet.get("addresses", [])
    engines = fleet.get("replicas") or servers or len(addresses)
    return {
        **sampler,
        "engines": engines or sampler.get("engines", 1),
        "dedicated_nodes": servers > 0,
        "addresses": addresses,
        "formats": fleet.get("formats", []),
    }


# keys whose value in a recorded run no longer matters
_LONG_AGO = {
    "run.stop_metric": "set run.stop={eval/accuracy: 0.28}: the metric and its value",
    "run.patience_s": "set run.hang_timeout_s: there is one timeout now, 1800 s by default",
    "run.stop_at": "set run.stop={eval/accuracy: 0.28}: the metric and its value",
    "data.deduplicate": "a prompt that stands in a file several times counts once; leave it out",
    "sampler.max_sequences": "set sampler.vllm.max_num_seqs",
    "sampler.memory_gib": "set sampler.vllm.kv_cache_memory_bytes",
    "quantization.smoothing_every": "smoothing scales stay for 10 syncs; leave it out",
    "sync.bucket_mib": "buckets take 64 MiB; leave it out",
    "sync.delta": "set sync.full_every above 1 for patches between whole versions",
    "optim.weight_decay": "set optim.megatron.weight_decay",
    "optim.clip_grad": "set optim.megatron.clip_grad",
    "optim.beta1": "set optim.megatron.adam_beta1",
    "optim.beta2": "set optim.megatron.adam_beta2",
    "optim.eps": "set optim.megatron.adam_eps",
    "learner.virtual_pipeline": "set learner.megatron.virtual_pipeline_model_parallel_size",
    "learner.sequence_parallel": "set learner.megatron.sequence_parallel",
    "learner.fp8": "set learner.megatron.fp8",
    "log.group": "set log.wandb_run.group",
    "log.project": "set the environment variable WANDB_PROJECT",
    "sync.probe_layers": "megatron-rl mismatch shows the same points; leave it out",
}
# keys renamed since the last release, with their new names: accepted with a warning; at the next
# release they move to _RENAMED
DEPRECATED: dict[str, str] = {}
# renamed keys
_RENAMED = {
    "rollout.ahead": "rollout.max_staleness",
    "data.template": "data.chat_template_kwargs",
    "environment.turns": "environment.max_turns",
    "environment.sessions": "environment.max_concurrent",
    "environment.observation_tokens": "environment.max_observation_tokens",
    "sync.verify_every": "sync.probe_every",
    "log.export": "checkpoint.export_hf",
}
# renamed choices of recorded runs
_OTHER_WORDS = {"rollout.in_flight": {"finish": "drain", "continue": "interrupt"}}
_VARIABLES = Removed(
    "set run.variables",
    to="run.variables",
    value=lambda removed, present: [*(present or ()), *removed],
)
REMOVED = {
    **{key: Removed(hint) for key, hint in _LONG_AGO.items()},
    **{key: Removed(f"set {name}", to=name) for key, name in _RENAMED.items()},
    "data.shuffle": Removed("prompts come in an order by run.seed; leave it out", True),
    "rollout.in_flight_cache": Removed(
        "keys and values are computed again with new weights; leave it out", "rebuild"
    ),
    "reward.overlong_penalty": Removed("it is 1: the reward falls by 1; leave it out", 1.0),
    "reward.environment": _VARIABLES,
    "environment.variables": _VARIABLES,
    "environment.discount": Removed("later rewards count in full; leave it out", 1.0),
    "sampler.routed_experts": Removed("learner.router: replay implies it; leave it out"),
    "checkpoint.minutes": Removed(
        "set checkpoint.every=30min",
        to="checkpoint.every",
        value=lambda minutes, every: every or (f"{minutes:g}min" if minutes else 0),
    ),
    "checkpoint.keep_every": Removed("set checkpoint.keep_last", 0),
    "log.record_experts": Removed("chosen experts are not recorded; leave it out", False),
    "sampler.fleet": Removed(
        "replicas are sampler.engines, servers are sampler.engines with "
        "sampler.dedicated_nodes=true, addresses and formats are sampler.addresses and .formats",
        to="sampler",
        value=_engines,
    ),
    "sync.staged": Removed("an update is verified beside the live weights; leave it out", True),
    "rollout.stale": Removed("no batch is begun that would become too old; leave it out", "wait"),
    "loss.clip_growth": Removed("the clip is the same at every token; leave it out", 0.0),
    "loss.clip_by_weight": Removed("the clip does not depend on the weight; leave it out", False),
    "loss.prefix_budget": Removed("set loss.clip_low and clip_high of dppo", None),
    "loss.late_weight": Removed("it went with loss.prefix_budget; leave it out", 1.0),
    "correction.weight.target_by": Removed("the cap is solved; leave it out", "cap"),
    "correction.weight.when": Removed("weights hold everywhere; leave it out", None),
    "correction.weight.current": Removed("weights are of the batch's policy; leave it out", False),
    "correction.weigh_baseline": Removed("baselines are plain means; leave it out", False),
    "correction.step_power": Removed("set optim.lr", 0.0),
    **{
        f"loss.{name}": Removed(f"set loss.params.{name}", to=f"loss.params.{name}")
        for loss in LOSSES.values()
        for name in loss.params
    },
    "learner.update_check": Removed(
        "sync.probe_every compares engine and learner; leave it out", {"rows": 0, "refuse": None}
    ),
    "log.disk_gib": Removed(
        "set log.record_every and checkpoint.keep_last; no recorded file is removed", None
    ),
    "log.memory_history": Removed(
        "the list of the largest tensors is written without it; leave it out", False
    ),
}

_OF_OTHERS = {
    "rollout.samples_per_prompt": "n_samples_per_prompt n_samples n rollout_n num_generations group_size "
    "num_generations_per_prompt rollouts_per_example",
    "rollout.prompts_per_step": "rollout_batch_size train_batch_size num_prompts_per_step",
    "rollout.max_response_tokens": "max_response_length max_completion_length rollout_max_response_len max_new_tokens",
    "rollout.max_prompt_tokens": "max_prompt_length rollout_max_prompt_len max_prompt_len",
    "rollout.temperature": "rollout_temperature",
    "rollout.dynamic_sampling": "filter_groups dynamic_filtering use_dynamic_sampling dynamic_sampling_filter_path",
    "rollout.max_gen_batches": "max_num_gen_batches dynamic_sampling_max_gen_batches",
    "learner.n_minibatches (how many updates, not their size)": "ppo_mini_batch_size policy_mini_batch_size "
    "mini_batch_size global_batch_size",
    "learner.tokens_per_microbatch (in tokens)": "micro_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size "
    "per_device_train_batch_size max_tokens_per_gpu ppo_max_token_len_per_gpu",
    "learner.tensor_parallel, or sampler.tensor_parallel": "tensor_model_parallel_size tensor_parallel_size",
    "learner.pipeline_parallel": "pipeline_model_parallel_size",
    "learner.expert_parallel": "expert_model_parallel_size",
    "learner.context_parallel": "context_parallel_size ulysses_sequence_parallel_size",
    "sampler.vllm.gpu_memory_utilization": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "sampler.vllm.max_num_seqs": "max_num_seqs",
    "sampler.vllm.enforce_eager": "enforce_eager",
    "loss.clip_low and loss.clip_high": "eps_clip clip_ratio cliprange epsilon eps_clip_low_high",
    "loss.clip_low": "clip_ratio_low eps_clip_low",
    "loss.clip_high": "clip_ratio_high eps_clip_high epsilon_high",
    "loss.params.dual_clip": "clip_ratio_c eps_clip_c",
    "loss.kl_coef": "kl_loss_coef init_kl_coef kl_ctl beta use_kl_loss",
    "loss.entropy_coef": "entropy_coeff entropy_loss_coef",
    "loss.reduction": "loss_agg_mode",
    "loss.name": "loss_type policy_loss_type loss_mode",
    "advantage.estimator": "adv_estimator advantage_estimator",
    "correction.weight.high": "rollout_is_threshold tis_clip tis_imp_ratio_cap vllm_importance_sampling_cap",
    "correction, such as correction=tis": "use_tis",
    "run.steps (batches, not passes over the data)": "total_epochs num_train_epochs num_episodes num_rollout "
    "total_training_steps max_steps max_num_steps",
    "optim.lr": "learning_rate",
    "optim.decay": "lr_schedule lr_scheduler lr_scheduler_type lr_decay_style schedule",
    "optim.warmup_steps (updates, not a share)": "lr_warmup_steps lr_warmup_steps_ratio warmup_iters warmup_ratio",
    "optim.megatron.clip_grad": "max_grad_norm grad_clip",
    "optim.megatron.weight_decay": "weight_decay",
    "eval.every": "test_freq eval_interval eval_steps val_period",
    "eval.samples": "n_samples_per_eval_prompt",
    "checkpoint.every": "save_freq save_steps save_interval ckpt_interval",
    "model.path": "hf_checkpoint model_name_or_path model_name pretrain",
    "data.train": "train_files prompt_data",
    "data.eval": "val_files eval_prompt_data",
    "data.prompt_key": "input_key",
    "data.answer_key": "label_key",
    "data.chat_template_kwargs": "apply_chat_template",
    "reward.name": "rm_type custom_rm_path reward_funcs reward_manager remote_rm_url",
    "log.trackers": "report_to loggers use_wandb use_tensorboard use_mlflow",
    "reward.overlong_buffer": "overlong_buffer_len",
    "reward.overlong_filter": "mask_truncated_completions",
}
ELSEWHERE = {name: ours for ours, names in _OF_OTHERS.items() for name in names.split()}


def unknown(
    key: str, value: object, prefix: str, siblings: Sequence[str], everywhere: Sequence[str]
) -> Iterator[str]:
    """Yield one error per unknown key; for a section of another project, one per key that is known
    here.
    """
    full = f"{prefix}{key}"
    if full in REMOVED:
        yield f"{full}: unknown key; {REMOVED[full].hint}"
        return
    names = () if prefix else _inner_names(value)  # of an unknown section
    theirs = {
        inner: ours for inner in names if (ours := _named(inner, everywhere) or _elsewhere(inner))
    }
    near = difflib.get_close_matches(key, siblings, n=1)
    if not theirs or any(
        f"{prefix}{one}.{inner}" in everywhere for one in near for inner in theirs
    ):
        yield f"{full}: unknown key{_suggest(key, prefix, siblings, everywhere)}"
        return
    yield from (
        f"{full}.{inner}: unknown key; did you mean {' or '.join(ours)}?"
        for inner, ours in theirs.items()
    )


def _inner_names(value: object) -> Iterator[str]:
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        yield from [f"{name}.{one}" for one in _inner_names(inner)] or [str(name)]


def _named(key: str, everywhere: Sequence[str]) -> list[str]:
    """Return our keys of that name in any section."""
    return [known for known in everywhere if known.rpartition(".")[2] == key.rpartition(".")[2]]


def _elsewhere(key: str) -> list[str]:
    """Return our keys for a name that other projects use."""
    name = key.rpartition(".")[2].lower().replace("-", "_")
    if name in ELSEWHERE:
        return [ELSEWHERE[name]]
    return []


def _suggest(key: str, prefix: str, siblings: Sequence[str], everywhere: Sequence[str]) -> str:
    def beside(cutoff: float) -> list[str]:
        return [
            f"{prefix}{one}"
            for one in difflib.get_close_matches(key.lower(), siblings, n=1, cutoff=cutoff)
        ]

    same = _named(key, everywhere)
    inside = [known for known in same if known.startswith(prefix)]
    near = (
        inside or (beside(VERY_CLOSE) if prefix else []) or _elsewhere(key) or beside(CLOSE) or same
    )
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; known here: {', '.join(siblings)}"


def carried(recorded: Mapping[str, Any]) -> Settings:
    """Convert a recorded configuration to today's keys. Raises ValueError with the removed keys
    that differ from their defaults.
    """
    config = copy.deepcopy(dict(recorded))
    refused = []
    for key, removed in REMOVED.items():
        value = _taken_out(config, key)
        if value is ANY:
            continue
        if removed.to:
            there, name = _section_of(config, removed.to)
            there[name] = removed.value(value, there.get(name))
        elif removed.default is not ANY and value != removed.default:
            refused.append(f"{key} is {value}: {removed.hint}")
    if refused:
        raise ValueError("\n".join(refused))
    for key, words in _OTHER_WORDS.items():
        section, _, name = key.partition(".")
        if (word := config.get(section, {}).get(name)) in words:
            config[section][name] = words[word]
    return config


def with_new_names(given: Mapping[str, Any], where: str) -> Settings:
    """Rename the deprecated keys of a file or the command line; log a warning for each."""
    config = copy.deepcopy(dict(given))
    for key, new in DEPRECATED.items():
        if (value := _taken_out(config, key)) is not ANY:
            _warn(f"{where}: {key} is now {new}; the next release refuses the old name")
            there, name = _section_of(config, new)
            there.setdefault(name, value)
    return config


@cache
def _warn(text: str) -> None:
    logger("config").warning(text)


def _section_of(config: Settings, key: str) -> tuple[Settings, str]:
    """Return the section that holds a key, made if it is missing, and the key's name in it."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    return config, name


def _taken_out(config: Settings, key: str) -> Any:
    """Remove a key and sections that become empty; return its value, ANY if it is missing."""
    first, _, rest = key.partition(".")
    if not rest:
        return config.pop(first, ANY)
    inner = config.get(first)
    if not isinstance(inner, dict):
        return ANY
    value = _taken_out(inner, rest)
    if not inner:
        del config[first]
    return value
