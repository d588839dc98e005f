"""Commands of `megatron-rl`: each module adds one, and imports its implementation only when it is called."""
