"""The parts of `megatron_rl.rollout_correction`, which is the file to read first.

This package file stays empty of imports: `checks.py` is needed before torch is loaded.
"""
