"""Mixture-of-experts (MoE) layer on a CPU, in place of megatron-core's: its router and experts
round as vLLM's on CPUs.

M tokens that went to the experts held here, H hidden width.
"""

from typing import Any

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_rl.learner.modules.layers import StoredRounding
from megatron_rl.learner.modules.linear import widen


class CpuRouter(TopKRouter):
    """Router on CPUs: rounds the logits, and their FP32 weights, to the model's precision."""

    def gating(self, input: Tensor) -> Tensor:
        return super().gating(input).to(input.dtype).float()

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights, chosen = super().forward(input, padding_mask)
        return weights.to(input.dtype).float(), chosen


class CpuExperts(SequentialMLP):
    """Both products give FP32; what goes into the second is rounded, and what comes out when a
    token's are added.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:
            widen(expert.linear_fc1)
            widen(expert.linear_fc2)

    def forward(
        self, x_MH: Tensor, tokens_per_expert: Tensor, weights_M: Tensor
    ) -> tuple[Tensor, None]:
        parts = x_MH.split(tokens_per_expert.tolist())
        return torch.cat([*map(_output, self.local_experts, parts)]) * weights_M[:, None], None


def _output(expert: Any, x: Tensor) -> Tensor:
    return expert.linear_fc2(
        StoredRounding.apply(expert.activation_func(expert.linear_fc1(x)[0]), x.dtype)
    )[0]


class CpuMoE(MoELayer):
    """Experts of all ranks are added in FP32, and rounded once."""

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        return StoredRounding.apply(
            super().postprocess(output, shared_expert_output), self.config.params_dtype
        )


def mixture(linear: MLPSubmodules) -> ModuleSpec:
    parts = MoESubmodules(
        experts=ModuleSpec(module=CpuExperts, submodules=linear), router=CpuRouter
    )
    return ModuleSpec(module=CpuMoE, submodules=parts)
