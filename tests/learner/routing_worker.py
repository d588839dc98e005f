"""Jobs of `learner_worker.py`: tokens that are sent to given experts, whatever the routers would
have chosen; and a mixture's layer beside vLLM's.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from learner_cases import experts_of, make_batch, make_targets, with_experts

from megatron_rl.batch import Batch
from megatron_rl.config.schema import Router
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules.router_replay import ReplayError, RouterReplay, check
from megatron_rl.quantization import vllm_operators
from megatron_rl.types import NO_EXPERT

LAYERS = 4
EXPERTS = 4
CHOSEN = 2


def routed_batch(silent: int | None = None) -> Batch:
    """Two of four experts at random for all tokens but each row's last. Nothing is told of the row
    `silent`, but for one expert twice, as an engine's memory is before anything is written there.
    """
    batch = make_batch()
    random = torch.Generator().manual_seed(5)
    lengths_B = batch.prompt_lengths_B + batch.response_lengths_B
    shape = (len(batch), int(lengths_B.max()), LAYERS, EXPERTS)
    chosen_BSLK = torch.rand(shape, generator=random).topk(CHOSEN).indices.to(torch.int16)
    chosen_BSLK[torch.arange(shape[1]) >= lengths_B[:, None] - 1] = NO_EXPERT
    if silent is not None:
        chosen_BSLK[silent] = NO_EXPERT
        chosen_BSLK[silent, :2] = 0
    return with_experts(batch, chosen_BSLK)


def _wrong_layer(replay: RouterReplay) -> None:
    for router in replay._routers:
        router._held ^= 1


def _own_when_recomputed(replay: RouterReplay) -> None:
    for router in replay._routers:
        router.get_replay_topk = partial(_told_at_first, replay, router.get_replay_topk)  # type: ignore[method-assign]


def _told_at_first(
    replay: RouterReplay,
    told: Any,
    scores: torch.Tensor,
    topk: int,
    groups: Any,
    group_topk: Any,
    choose: Any,
) -> Any:
    if replay.trains and torch.is_grad_enabled():
        return choose(scores, topk, num_groups=groups, group_topk=group_topk)
    return told(scores, topk, groups, group_topk, choose)


def _half_of_the_layers(replay: RouterReplay) -> None:
    def own(scores: torch.Tensor, topk: int, groups: Any, group_topk: Any, choose: Any) -> Any:
        return choose(scores, topk, num_groups=groups, group_topk=group_topk)

    for router in replay._routers[::2]:
        router.get_replay_topk = own  # type: ignore[method-assign]


FAULTS = {  # of the replay; others are of what it is told
    "wrong_layer": _wrong_layer,
    "recompute": _own_when_recomputed,
    "layers": _half_of_the_layers,
}


def faulty(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """What a run says of a step whose choices were the learner's own a moment ago, and then came to
    harm.
    """
    before_BT, batch = _first_pass(learner)
    chosen_BSLK = experts_of(batch)
    if job["fault"] == "cache_hit":
        chosen_BSLK[1:, :4] = NO_EXPERT
    batch = with_experts(batch, chosen_BSLK)
    learner.take_replayed()
    assert learner._replay is not None
    if job["fault"] in FAULTS:
        FAULTS[job["fault"]](learner._replay)
    try:
        learner.update(make_targets(batch, before_BT))
        return dict(check(learner.take_replayed(), Router.replay))
    except ReplayError as error:
        return {"refused": str(error)}


def _first_pass(learner: Learner) -> tuple[torch.Tensor, Batch]:
    """Of a batch that the driver holds; what it has then, on every rank."""
    before_BT, shared = learner.logprobs_and_experts(learner.plane.share(make_batch()))
    chosen = None if shared.whole is None else experts_of(shared.whole).int()
    before_BT, chosen = learner.broadcast((before_BT, chosen))
    return before_BT, with_experts(make_batch(), chosen.to(torch.int16))


def routed_forward(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """The choices of a pass, taken by later ones; with `chosen`, the same ones as if the sampler
    had told them.
    """
    batch = make_batch()
    if chosen := job.get("chosen"):
        batch = with_experts(batch, torch.tensor(chosen, dtype=torch.int16))
        before_BT = learner.logprobs(batch)
    else:
        before_BT, batch = _first_pass(learner)
    targets = make_targets(batch, before_BT)
    again_BT = learner.logprobs(batch)
    learner.take_replayed()
    steps = [learner.update(targets) for _ in range(4)]
    trained = learner.take_replayed()
    found = {"logprobs": before_BT, "again": again_BT, "after": learner.logprobs(batch)}
    found["own"] = learner.logprobs(replace(batch, experts_PLK=None))
    told = {"trained": trained, "steps": steps, "chosen": experts_of(batch).tolist()}
    return {name: values_BT.tolist() for name, values_BT in found.items()} | told


def routed(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    batch = routed_batch(job.get("silent"))
    own_BT = learner.logprobs(replace(batch, experts_PLK=None))
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
    found = {
        "own": own_BT,
        "logprobs": before_BT,
        "reference": reference_BT,
        "after": learner.logprobs(batch),
    }
    told = {
        "unheard": unheard,
        "scored": scored,
        "trained": trained,
        "steps": steps,
        "gradients": gradients,
    }
    return {name: values_BT.tolist() for name, values_BT in found.items()} | told


@torch.no_grad()
def mixture(learner: Learner, job: dict[str, Any]) -> float:
    """The share of a layer's outputs that are not those of vLLM's kernels, to the last bit."""
    assert vllm_operators.has_rotary(), "vLLM's operators for hosts are not here"
    layer: Any = learner.modules[0].decoder.layers[1].mlp  # type: ignore[union-attr, index]
    x_SH = torch.randn(
        512, layer.config.hidden_size, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    logits_SK, chosen_SK = torch.nn.functional.linear(x_SH, layer.router.weight).topk(CHOSEN)
    weights = [
        torch.stack([getattr(expert, name).weight for expert in layer.experts.local_experts])
        for name in ("linear_fc1", "linear_fc2")
    ]
    packed = [torch.empty_like(weight) for weight in weights]
    out_SH = torch.empty_like(x_SH)
    for weight, into in zip(weights, packed, strict=True):
        torch.ops._C.prepack_moe_weight(weight, into, "vec")
    given = logits_SK.softmax(-1).float(), chosen_SK.int()
    torch.ops._C.cpu_fused_moe(out_SH, x_SH, *packed, None, None, *given, False, "silu", "vec")
    return float((layer(x_SH[:, None])[0].squeeze(1) != out_SH).float().mean())
