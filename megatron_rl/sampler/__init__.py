"""Samplers: prompts in, rollouts out, from one embedded engine or a fleet of servers.

Does not import `vllm`: engines run in their own processes (`megatron_rl.engine`).
"""
