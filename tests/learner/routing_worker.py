"""Job of `learner_worker.py`: tokens that are sent to given experts, whatever the routers would have chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from learner_cases import make_batch, make_targets

from megatron_rl.learner.learner import Learner
from megatron_rl.types import NO_EXPERT, Batch

LAYERS, EXPERTS, CHOSEN = 4, 4, 2


def routed_batch(silent: int | None = None) -> Batch:
    """Two of four experts at random for all tokens but each row's last. Nothing is told of the row `silent`, but for
    one expert twice, as an engine's memory is before anything is written there.
    """
    batch, random = make_batch(), torch.Generator().manual_seed(5)
    lengths_B = batch.prompt_lengths_B + batch.response_lengths_B
    shape = (len(batch), int(lengths_B.max()), LAYERS, EXPERTS)
    chosen_BSLK = torch.rand(shape, generator=random).topk(CHOSEN).indices.to(torch.int16)
    chosen_BSLK[torch.arange(shape[1]) >= lengths_B[:, None] - 1] = NO_EXPERT
    if silent is not None:
        chosen_BSLK[silent] = NO_EXPERT
        chosen_BSLK[silent, :2] = 0
    return replace(batch, experts_BSLK=chosen_BSLK)


def routed_forward(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """The choices of a pass, taken by later ones; with `chosen`, the same ones as if the sampler had told them."""
    batch = make_batch()
    if chosen := job.get("chosen"):
        batch = replace(batch, experts_BSLK=torch.tensor(chosen, dtype=torch.int16))
        before_BT = learner.logprobs(batch)
    else:
        before_BT, batch = learner.logprobs_and_experts(batch)
    targets = make_targets(batch, before_BT)
    again_BT = learner.logprobs(batch)
    learner.take_replayed()
    steps = [learner.update(targets) for _ in range(4)]
    trained = learner.take_replayed()
    found = {"logprobs": before_BT, "again": again_BT, "after": learner.logprobs(batch)}
    found["own"] = learner.logprobs(replace(batch, experts_BSLK=None))
    assert batch.experts_BSLK is not None
    told = {"trained": trained, "steps": steps, "chosen": batch.experts_BSLK.tolist()}
    return {name: values_BT.tolist() for name, values_BT in found.items()} | told


def routed(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    batch = routed_batch(job.get("silent"))
    own_BT = learner.logprobs(replace(batch, experts_BSLK=None))
    unheard = learner.take_replayed()
    before_BT = learner.logprobs(batch)
    scored = learner.take_replayed()
    learner.keep_reference()
    reference_BT = learner.reference_logprobs(batch)
    targets = make_targets(batch, before_BT)
    if "loss" in job:
        targets = replace(targets, weights_BT=torch.ones_like(targets.weights_BT))
    learner.take_replayed()
    steps = [learner.update(targets)]
    trained = learner.take_replayed()
    gradients = {
        name: parameter.main_grad.tolist()  # type: ignore[attr-defined]
        for name, parameter in learner.named_parameters()
        if "router" in name
    }
    steps += [learner.update(targets) for _ in range(2)]
    found = {"own": own_BT, "logprobs": before_BT, "reference": reference_BT, "after": learner.logprobs(batch)}
    told = {"unheard": unheard, "scored": scored, "trained": trained, "steps": steps, "gradients": gradients}
    return {name: values_BT.tolist() for name, values_BT in found.items()} | told
