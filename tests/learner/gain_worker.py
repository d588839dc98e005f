"""Jobs of `learner_worker.py` about what updates gain the learner and the sampler, and about taking
them back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from learner_cases import make_batch

from megatron_rl.batch import Targets
from megatron_rl.config.schema import CorrectionConfig, Format, UpdateCheckSection
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.state import Snapshot
from megatron_rl.learner.update_check import UpdateCheck
from megatron_rl.models.mapping import Param
from megatron_rl.quantization.quantize import quantize
from megatron_rl.rollout_correction.correction import Correction, rollout_correction

ROWS = 24
LIMIT = 2.0


def as_sampled(learner: Learner, older: float = 0.0) -> tuple[Targets, Correction]:
    """A batch with the logprobs that a right sampler reports, and advantages that know nothing.
    `older`: how far those are off that another policy has reported.
    """
    random = torch.Generator().manual_seed(2)
    batch = make_batch(32)
    expected_BT = learner.expected_logprobs(batch)
    assert expected_BT is not None
    reported_BT = expected_BT + older * torch.randn(expected_BT.shape, generator=random)
    batch = batch.with_matrices(sampler_logprobs_BT=reported_BT)
    prox_BT = learner.logprobs(batch)
    found = rollout_correction(prox_BT, reported_BT, batch.mask_BT, CorrectionConfig())
    advantages_B = torch.randn(len(batch), generator=random)
    parts = {
        name: getattr(found, name) for name in ("weights_BT", "mask_BT", "denominator_mask_BT")
    }
    return Targets(batch, prox_BT, None, advantages_B, **parts), found


def gains(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """What a step has gained, and whether it stays."""
    targets, correction = as_sampled(learner, job.get("older", 0.0))
    before_BT = learner.logprobs(targets.batch)
    section = UpdateCheckSection(rows=ROWS, refuse=job.get("refuse"))
    held = targets if learner.is_driver else None
    shared = learner.plane.share_targets(learner.plane.share(targets.batch), held)
    check = UpdateCheck(learner, section, shared, version=int("older" in job))
    UPDATES[job["update"]](learner, targets)
    found = check.judged(correction if learner.is_driver else None)
    steps = learner.steps
    same = torch.equal(before_BT, learner.logprobs(targets.batch))
    return {**found, "same": same, "steps": steps}


def unseen(learner: Learner, targets: Targets, crossing: bool = False) -> None:
    """A step that the learner gains by and that changes no INT8 code, so that the sampler has no
    part in it.

    Weights of the first layer go along the gradient as far as their code reaches. With `crossing`,
    those that lie close to the next code against the gradient go there: a tenth of a code for the
    learner, a whole one for the sampler.
    """
    before = Snapshot(learner)
    learner.update(targets)
    grads = {param.megatron: layer.weight.main_grad.clone() for param, layer in quantized(learner)}
    before.restore()
    for param, layer in quantized(learner):
        if param.layer:
            continue
        weight = layer.weight.data
        better = -grads[param.megatron].sign()
        made = quantize(weight, Format.int8, None)
        scale = made["weight_scale"]
        codes = made["weight"].float()
        room = better * (weight / scale - codes)  # from the code's middle, in the gradient's favour
        step = (0.45 - room).clamp(min=0)
        if crossing:
            step = torch.where(room < -0.4, -(0.52 + room), step)
        # the largest, which sets the scale, stays
        weight.add_(better * step * scale * (codes.abs() < 126))
    learner.weights_changed()


def quantized(learner: Learner) -> list[tuple[Param, Any]]:
    assert learner._as_sampler is not None
    return learner._as_sampler._layers


def again(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """Steps that are taken back leave nothing: the next is what it would have been."""
    targets, _ = as_sampled(learner)
    found = []
    for _ in range(job["steps"]):
        learner.update(targets)
    for _ in range(2):
        before = Snapshot(learner)
        steps = learner.steps
        learner.update(targets)
        learner.update(targets)
        found.append(learner.logprobs(targets.batch).tolist())
        before.restore()
        assert learner.steps == steps
    return {"found": found}


UPDATES: dict[str, Callable[[Learner, Targets], Any]] = {
    "plain": lambda learner, targets: learner.update(targets),
    "unseen": unseen,
    "opposed": partial(unseen, crossing=True),
}
