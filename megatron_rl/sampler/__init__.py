"""Prompt -> Rollout: the sampler protocol and the engines behind it. `vllm` is imported only in the child process."""
