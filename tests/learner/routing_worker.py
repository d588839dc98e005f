"""Jobs of `learner_worker.py`: router replay with given experts, and an MoE layer beside vLLM's."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from learner_cases import Fields, make_batch, make_targets, update

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
    scores_PLE = torch.rand(len(batch.tokens_P), LAYERS, EXPERTS, generator=random)
    chosen_PLK = scores_PLE.topk(CHOSEN).indices.to(torch.int16)
    chosen_PLK[batch.lengths_B.cumsum(0) - 1] = NO_EXPERT
    if silent is not None:
        row_SLK = chosen_PLK.split(batch.lengths_B.tolist())[silent]
        row_SLK.fill_(NO_EXPERT)
        row_SLK[:2] = 0
    return replace(batch, experts_PLK=chosen_PLK)


def _wrong_layer(replay: RouterReplay) -> None:
    for router in replay._routers:
        router.held ^= 1


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


FAULTS = {  # faults of the replay; others corrupt its input
    "wrong_layer": _wrong_layer,
    "recompute": _own_when_recomputed,
    "layers": _half_of_the_layers,
}


def own_choices(learner: Learner, batch: Batch) -> torch.Tensor:
    """[P, L, K] of this rank's routers, row by row."""
    chosen_PLK = torch.full((len(batch.tokens_P), LAYERS, CHOSEN), NO_EXPERT).to(torch.int16)
    for row, chosen_SLK in enumerate(chosen_PLK.split(batch.lengths_B.tolist())):
        read_SLK = chosen_SLK[:-1]

        def noting(layer: int, *arguments: Any) -> Any:
            values_SK, own_SK = _own(*arguments)
            read_SLK[:, layer] = own_SK[: len(read_SLK)]  # noqa: B023
            return values_SK, own_SK

        with ExitStack() as stack:
            for router in learner._replay._routers:
                note = partial(noting, router.layer)
                stack.enter_context(mock.patch.object(router, "get_replay_topk", note))
            learner.logprobs(batch.rows(torch.tensor([row])))
    return chosen_PLK


def faulty(learner: Learner, job: Fields) -> Fields:
    """Metrics or error of a step that replays the learner's own choices with an injected fault."""
    batch = make_batch()
    batch = replace(batch, experts_PLK=own_choices(learner, batch))
    before_N = learner.logprobs(batch)
    if job["fault"] == "cache_hit":
        for row_SLK in batch.experts_PLK.split(batch.lengths_B.tolist())[1:]:
            row_SLK[:4] = NO_EXPERT
    learner.take_replayed()
    if job["fault"] in FAULTS:
        FAULTS[job["fault"]](learner._replay)
    try:
        update(learner, batch, make_targets(batch, before_N))
        return dict(check(learner.take_replayed()))
    except ReplayError as error:
        return {"refused": str(error)}


def routed(learner: Learner, job: Fields) -> Fields:
    batch = routed_batch(job.get("silent"))
    own_N = learner.logprobs(replace(batch, experts_PLK=None))
    unheard = learner.take_replayed()
    before_N = learner.logprobs(batch)
    scored = learner.take_replayed()
    learner.keep_reference()
    reference_N = learner.reference_logprobs(batch)
    targets = make_targets(batch, before_N)
    if "loss" in job:
        targets = replace(targets, weights_N=torch.ones_like(targets.weights_N))
    learner.take_replayed()
    steps = [update(learner, batch, targets)]
    trained = learner.take_replayed()
    gradients = [
        parameter.main_grad.clone()
        for name, parameter in learner.named_parameters()
        if "router" in name
    ]
    steps += [update(learner, batch, targets) for _ in range(2)]
    return {
        "own": own_N,
        "logprobs": before_N,
        "reference": reference_N,
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
