"""Jobs of `learner_worker.py`: router replay with given experts, and an MoE layer beside vLLM's."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from learner_cases import Fields, make_batch, make_targets, with_experts

from megatron_rl.batch import Batch
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules.router_replay import ReplayError, RouterReplay, check
from megatron_rl.quantization import vllm_operators
from megatron_rl.types import NO_EXPERT

LAYERS = 4
EXPERTS = 4
CHOSEN = 2


def routed_batch(silent: int | None = None) -> Batch:
    """Two random experts of four for all tokens but each row's last. The row `silent` has no
    choices, but one expert twice, like an engine's memory before it is written.
    """
    batch = make_batch()
    random = torch.Generator().manual_seed(5)
    shape = (*batch.tokens_BS.shape, LAYERS, EXPERTS)
    chosen_BSLK = torch.rand(shape, generator=random).topk(CHOSEN).indices.to(torch.int16)
    chosen_BSLK[torch.arange(shape[1]) >= batch.lengths_B[:, None] - 1] = NO_EXPERT
    if silent is not None:
        chosen_BSLK[silent] = NO_EXPERT
        chosen_BSLK[silent, :2] = 0
    return with_experts(batch, chosen_BSLK)


def _wrong_layer(replay: RouterReplay) -> None:
    for router in replay._routers:
        router._held ^= 1


def _own(scores: torch.Tensor, topk: int, groups: Any, group_topk: Any, choose: Any) -> Any:
    return choose(scores, topk, num_groups=groups, group_topk=group_topk)


def _own_when_recomputed(replay: RouterReplay) -> None:
    for router in replay._routers:
        router.get_replay_topk = partial(_replayed_at_first, replay, router.get_replay_topk)


def _replayed_at_first(replay: RouterReplay, replayed: Any, *arguments: Any) -> Any:
    recomputed = replay.trains and torch.is_grad_enabled()
    return (_own if recomputed else replayed)(*arguments)


def _half_of_the_layers(replay: RouterReplay) -> None:
    for router in replay._routers[::2]:
        router.get_replay_topk = _own


FAULTS = {  # of the replay; others are of what it is told
    "wrong_layer": _wrong_layer,
    "recompute": _own_when_recomputed,
    "layers": _half_of_the_layers,
}


def own_choices(learner: Learner, batch: Batch) -> torch.Tensor:
    """[B, S, L, K] of this rank's routers, row by row."""
    chosen_BSLK = torch.full((*batch.tokens_BS.shape, LAYERS, CHOSEN), NO_EXPERT).to(torch.int16)
    for row, length in enumerate(batch.lengths_B.tolist()):
        read_SLK = chosen_BSLK[row, : length - 1]

        def noting(layer: int, *arguments: Any) -> Any:
            values_SK, own_SK = _own(*arguments)
            read_SLK[:, layer] = own_SK[: len(read_SLK)]  # noqa: B023
            return values_SK, own_SK

        with ExitStack() as stack:
            for router in learner._replay._routers:
                note = partial(noting, router._layer)
                stack.enter_context(mock.patch.object(router, "get_replay_topk", note))
            learner.logprobs(batch.rows(torch.tensor([row])))
    return chosen_BSLK


def faulty(learner: Learner, job: Fields) -> Fields:
    """Metrics or error of a step that replays the learner's own choices with an injected fault."""
    batch = make_batch()
    chosen_BSLK = own_choices(learner, batch)
    before_BT = learner.logprobs(with_experts(batch, chosen_BSLK))
    if job["fault"] == "cache_hit":
        chosen_BSLK[1:, :4] = NO_EXPERT
    batch = with_experts(batch, chosen_BSLK)
    learner.take_replayed()
    if job["fault"] in FAULTS:
        FAULTS[job["fault"]](learner._replay)
    try:
        learner.update(make_targets(batch, before_BT))
        return dict(check(learner.take_replayed()))
    except ReplayError as error:
        return {"refused": str(error)}


def routed(learner: Learner, job: Fields) -> Fields:
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
    gradients = [
        parameter.main_grad.clone()
        for name, parameter in learner.named_parameters()
        if "router" in name
    ]
    steps += [learner.update(targets) for _ in range(2)]
    return {
        "own": own_BT,
        "logprobs": before_BT,
        "reference": reference_BT,
        "after": learner.logprobs(batch),
        "unheard": unheard,
        "scored": scored,
        "trained": trained,
        "steps": steps,
        "gradients": gradients,
    }


@torch.no_grad()
def mixture(learner: Learner, job: Fields) -> float:
    """The share of a layer's outputs that are not those of vLLM's kernels, to the last bit."""
    assert vllm_operators.has_rotary(), "vLLM's operators for hosts are not here"
    layer = learner.modules[0].decoder.layers[1].mlp
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
    torch.ops._C.cpu_fused_moe(
        out_SH,
        x_SH,
        *packed,
        None,
        None,
        *given,
        False,
        "silu",
        "vec",
    )
    return float((layer(x_SH[:, None])[0].squeeze(1) != out_SH).float().mean())
