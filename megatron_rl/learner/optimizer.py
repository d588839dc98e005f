"""Settings of megatron-core's Adam and gradient reduction, the learning rate of a step, clipping by
a given norm.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from megatron_rl.learner.modules import cpu  # before megatron

from megatron.core.distributed import DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_rl.config.schema import Decay, OptimSection, Precision
from megatron_rl.learner.modules import limits

# defaults of OptimizerConfig, below `optim.megatron`
DEFAULTS = {
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
}


def optimizer_config(
    optim: OptimSection, precision: Precision, params_dtype: torch.dtype
) -> OptimizerConfig:
    for problem in limits.optimizer_fields(optim):
        raise ValueError(problem)
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        bf16=precision is Precision.bf16,
        params_dtype=params_dtype,
        use_distributed_optimizer=True,
        **{**DEFAULTS, **_those_of(OptimizerConfig, optim.megatron)},
    )


def replicas_config(optim: OptimSection, replicas: int) -> DistributedDataParallelConfig:
    """Settings of gradient sums over replicas: on GPUs a bucket is reduced once backward has filled
    it, on CPUs all at the end.
    """
    given = _those_of(DistributedDataParallelConfig, optim.megatron)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        **{"overlap_grad_reduce": replicas > 1 and not cpu.ON_CPU, **given},
    )


def _those_of(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(config)}
    return {name: value for name, value in given.items() if name in names}


def clip(optimizer: Any, norm: float, limit: float) -> None:
    """Scale all gradients down to `limit`, 0 for never; `norm` is theirs, over the whole model."""
    for each in optimizer.chained_optimizers:
        parameters = each.get_parameters()
        if limit > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)


def learning_rate(optim: OptimSection, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warmup, then decay."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.decay == Decay.constant:
        return optim.lr
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps))
    if optim.decay == Decay.linear:
        left = 1.0 - done
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    return optim.min_lr + (optim.lr - optim.min_lr) * left
