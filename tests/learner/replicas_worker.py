"""Gradients of data-parallel replicas in an update: their sums, and the time of reduction."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from learner_cases import make_batch, make_targets, update
from safetensors.torch import save_file

from megatron_rl.learner.learner import Learner

from megatron.core import parallel_state  # isort: skip


def replicas(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """Updates, with the whole gradient of each."""
    batch = make_batch()
    gradients = {}
    targets = make_targets(batch, learner.logprobs(batch))
    prepare = learner.optimizer.prepare_grads

    def summed() -> None:
        for name, parameter in learner.named_parameters():
            gradients[f"{len(steps)}.{name}"] = _whole_gradient(learner, parameter)
        prepare()

    learner.optimizer.prepare_grads = summed
    steps = []
    for step in range(job["steps"]):
        # fewer rows, and so another number of micro-batches, than in the first
        first_B = torch.arange(len(batch)) < len(batch) - 6 * step
        fewer_N = batch.mask_N & batch.responses.at_tokens(first_B)
        fewer = replace(targets, mask_N=fewer_N, denominator_mask_N=fewer_N)
        steps.append(update(learner, batch, fewer))
    save_file(gradients, f"{job['gradients']}.{learner.rank}")
    return {
        "steps": steps,
        "buckets": sum(len(ddp.bucket_groups) for ddp in learner.chunks),
        "after": learner.logprobs(batch),
    }


def _whole_gradient(learner: Learner, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Full gradient of a sharded parameter: each replica keeps a part of the sum."""
    whole = torch.zeros(parameter.shape)
    for each in learner.optimizer.chained_optimizers:
        if parameter in each.model_param_group_index_map:
            held = each._get_model_param_range_map(parameter)["param"]
            whole.flatten()[held.start : held.end] = parameter.main_grad.flatten()[
                held.start : held.end
            ]
    expert = not getattr(parameter, "allreduce", True)
    group = (
        parallel_state.get_expert_data_parallel_group
        if expert
        else parallel_state.get_data_parallel_group
    )
    dist.all_reduce(whole, group=group())
    return whole
