"""megatron-core's optimizer: its settings, and clipping by a norm that is already known."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.learner import host  # noqa: F401 - before megatron

from megatron.core.optimizer import OptimizerConfig  # isort: skip
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_rl.config.schema import OptimSection, Precision

# where `optim.megatron` names no others
DEFAULTS = {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_eps": 1e-8, "clip_grad": 1.0}


def optimizer_config(optim: OptimSection, precision: Precision, params_dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        bf16=precision is Precision.bf16,
        params_dtype=params_dtype,
        use_distributed_optimizer=True,
        **{**DEFAULTS, **optim.megatron},
    )


def clip(optimizer: Any, norm: float, limit: float) -> None:
    """Scale all gradients down to `limit`, 0 for never; `norm` is theirs, over the whole model."""
    for each in optimizer.chained_optimizers:
        parameters = each.get_parameters()
        if limit > 0 and parameters:
            clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)
