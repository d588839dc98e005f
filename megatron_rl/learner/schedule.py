"""The learning rate over optimizer steps."""

from __future__ import annotations

import math

from megatron_rl.config.schema import Decay, OptimSection


def learning_rate(optim: OptimSection, step: int, total_steps: int) -> float:
    """For optimizer step `step` (from 0) of `total_steps`: a linear warmup, then the decay."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.decay == Decay.constant:
        return optim.lr
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    left = 1.0 - done if optim.decay == Decay.linear else 0.5 * (1.0 + math.cos(math.pi * done))
    return optim.min_lr + (optim.lr - optim.min_lr) * left
