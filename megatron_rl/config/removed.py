"""Keys that recipes once had or that other projects have, and what stands in their place."""

REMOVED = {
    "rollout.top_p": "the learner does not filter its own probabilities, so every ratio would be off; leave it out",
    "rollout.top_k": "the learner does not filter its own probabilities, so every ratio would be off; leave it out",
    "learner.context_parallel": "context parallelism is not built; leave it out, or raise learner.data_parallel",
    "sampler.fleet.port": "servers of a run take free ports of the loopback interface; leave it out",
    "sampler.fleet.key_variable": "the key is read from the environment variable MEGATRON_RL_FLEET_KEY",
}
