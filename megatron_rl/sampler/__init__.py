"""Prompt -> Rollout. A sampler is what the loop asks; behind it is one embedded engine, or a
fleet of servers.

`vllm` is imported by neither: engines run in processes of their own (`megatron_rl.engine`).
"""
