"""Keys that recipes once had, and what stands in their place. The reasons are in docs/decisions/config_keys.md."""

_UNFILTERED = "the learner does not filter its own probabilities, so every ratio would be off; leave it out"

REMOVED = {
    "rollout.top_p": _UNFILTERED,
    "rollout.top_k": _UNFILTERED,
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
}
