"""Keys that recipes once had, and what stands in their place. The reasons are in docs/decisions/config_keys.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REMOVED = {
    "run.stop_metric": "set run.stop={eval/accuracy: 0.28}: the metric and its value",
    "run.stop_at": "set run.stop={eval/accuracy: 0.28}: the metric and its value",
    "data.deduplicate": "a prompt that stands in a file several times counts once; leave it out",
    "sampler.max_sequences": "set sampler.vllm.max_num_seqs",
    "sampler.memory_gib": "set sampler.vllm.kv_cache_memory_bytes",
    "sampler.fleet.port": "servers of a run take free ports of the loopback interface; leave it out",
    "sampler.fleet.key_variable": "the key is read from the environment variable MEGATRON_RL_FLEET_KEY",
    "sampler.fleet.probe_every_s": "servers are looked at every two seconds; leave it out",
    "sampler.fleet.restarts": "a server is started again up to 3 times; leave it out",
    "sampler.fleet.devices": "set sampler.devices to the same list",
    "quantization.smoothing_every": "smoothing scales stay for 10 syncs; leave it out",
    "sync.bucket_mib": "buckets take 64 MiB; leave it out",
    "sync.delta": "set sync.full_every above 1 for patches between whole versions",
    "optim.weight_decay": "set optim.megatron.weight_decay",
    "optim.clip_grad": "set optim.megatron.clip_grad",
    "optim.beta1": "set optim.megatron.adam_beta1",
    "optim.beta2": "set optim.megatron.adam_beta2",
    "optim.eps": "set optim.megatron.adam_eps",
    "learner.context_parallel": "context parallelism is not built; leave it out, or raise learner.data_parallel",
    "learner.virtual_pipeline": "set learner.megatron.virtual_pipeline_model_parallel_size",
    "learner.sequence_parallel": "set learner.megatron.sequence_parallel",
    "learner.fp8": "set learner.megatron.fp8",
    "learner.recompute": "set learner.megatron.recompute_granularity=full, recompute_method=uniform and "
    "recompute_num_layers=1",
    "log.group": "set the environment variable WANDB_RUN_GROUP",
    "log.project": "set the environment variable WANDB_PROJECT",
    "data.shuffle": "prompts come in another order each epoch, by run.seed; leave it out",
    "rollout.stale": "a batch is begun once it can be fresh enough; leave it out",
    "rollout.in_flight_cache": "set rollout.in_flight=keep_cache to keep it, or continue to rebuild it",
    "reward.overlong_penalty": "the penalty grows to 1 over reward.overlong_buffer; leave it out",
    "eval.max_response_tokens": "data.eval has rollout.max_response_tokens; a set of eval.sets can have its own",
    "checkpoint.keep_every": "raise checkpoint.keep_last, or name checkpoint.best",
    **{
        f"loss.{name}": f"set loss.parameters.{name}"
        for name in (
            *("dual_clip", "tau_positive", "tau_negative", "trust_region"),
            *("cov_fraction", "cov_low", "cov_high", "cov_kl_coef"),
        )
    },
}
# what a key had to be for everything to be as it is without it; a mapping that was recorded before may hold it
STANDS: dict[str, Any] = {
    "data.shuffle": True,
    "rollout.stale": "wait",
    "rollout.in_flight_cache": "rebuild",
    "reward.overlong_penalty": 1.0,
    "eval.max_response_tokens": None,
    "checkpoint.keep_every": 0,
    "loss.dual_clip": None,
    "loss.tau_positive": 1.0,
    "loss.tau_negative": 1.05,
    "loss.trust_region": "total_variation",
    "loss.cov_fraction": 2e-4,
    "loss.cov_low": 1.0,
    "loss.cov_high": 5.0,
    "loss.cov_kl_coef": 1.0,
}


def renewed(recorded: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A resolved configuration of an earlier version in today's keys, and the removed keys that it is rid of.

    A removed key with a value that means something else today stays, for whoever compares or refuses.
    """
    found = {name: dict(value) if isinstance(value, Mapping) else value for name, value in recorded.items()}
    dropped = []
    for key, stands in STANDS.items():
        section, _, name = key.partition(".")
        inner = found.get(section)
        if not isinstance(inner, dict) or name not in inner:
            continue
        if section == "loss":
            own = dict(inner.get("parameters") or {})
            inner["parameters"] = own if inner[name] == stands else own | {name: inner[name]}
        elif inner[name] != stands:
            continue
        del inner[name]
        dropped.append(key)
    return found, dropped
