"""Bytes of activations on a learner's rank: what a pack's forward pass keeps for backward, less
what is recomputed, over all packs in flight; and the logits of the last stage.

A layer's tensors are listed by the part of the layer that keeps them, in bytes for each position of
a pack. Two sets of kernels do that: those of hosts (learner/modules/layers.py and megatron-core's
local layers), those of Transformer Engine on GPUs. Both lists are of tensors that autograd saves; a
storage that two of them share is counted once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config.schema import LearnerSection, Precision
from megatron_rl.learner.modules import costs, limits
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import adapters, params
from megatron_rl.models.model import Model

# bytes
FP32 = 4
INT64 = 8
BOOL = 1
SHORT = 384  # on CPUs attention is in FP32 up to this length: learner/modules/layers.py
# what megatron-core recomputes where `recompute_modules` names nothing else
SELECTIVE = ("core_attn",)
Parts = Mapping[str, float]


@dataclass(frozen=True)
class Pack:
    """Micro-batch."""

    tokens: float
    responses: float  # of the tokens: those that get logits
    longest: int


@dataclass(frozen=True)
class Kept:
    """Bytes that one layer of one rank keeps, for each position of a pack."""

    layer: float  # all of it
    input: float  # its input alone: what recomputing it begins with
    stays: float  # with the recipe's recompute_modules


@dataclass(frozen=True)
class Training:
    """Settings of the learner that affect activation memory."""

    width: int  # bytes of an activation
    sp: int  # ranks that share the positions outside of attention and MLP
    host: bool
    granularity: str | None
    method: str | None
    layers: int  # recomputed at once
    modules: tuple[str, ...]
    fused_activation: bool
    fp8: bool

    @classmethod
    def of(cls, learner: LearnerSection, host: bool) -> "Training":
        given: Mapping[str, Any] = learner.transformer
        return cls(
            width=2 if learner.precision == Precision.bf16 else 4,
            sp=learner.tensor_parallel if limits.sequence_parallel(learner) else 1,
            host=host,
            granularity=given.get("recompute_granularity"),
            method=given.get("recompute_method"),
            layers=int(given.get("recompute_num_layers") or 1),
            modules=tuple(given.get("recompute_modules") or SELECTIVE),
            fused_activation=bool(given.get("bias_activation_fusion")),
            fp8=limits.fp8(learner) is not None,
        )

    def recomputed(self, layers: int) -> float:
        """The share of a chunk's layers that backward computes again."""
        if self.granularity != "full":
            return 0.0
        if self.method == "block":
            return min(self.layers / max(layers, 1), 1.0)
        return 1.0


def chosen(model: Model) -> int:
    """Experts of each token."""
    if model.shape.experts:
        return limits.experts_per_token(model.hf_config)
    return 0


def kept(model: Model, training: Training, pack: Pack) -> Kept:
    """Bytes that a layer of this model keeps."""
    shape = model.shape
    mlp = _experts(model, training) if shape.experts else _mlp(model, training)
    attention = _attention(model, training, pack)
    # the MLP's norm: its input and its result
    norm = (2 * shape.hidden * training.width + FP32) / training.sp
    own = {"mlp norm": norm, "adapters": _adapters(model, training)}
    parts = {**attention, **mlp, **own}
    gone: set[str] = set()
    if training.granularity == "selective":
        gone = {part for module in training.modules for part in RECOMPUTED.get(module, ())}
    stays = sum(nbytes for part, nbytes in parts.items() if part not in gone)
    if "core" in gone:  # its inputs are kept in its place
        stays += (shape.size("q") + 2 * shape.size("kv")) * training.width / model.layout.tp
    return Kept(sum(parts.values()), parts["input"], stays)


# megatron-core's name of what `recompute_modules` may hold -> the parts that are not kept then
RECOMPUTED = {
    "core_attn": ("core",),
    "mlp": ("fc1", "activation"),
    "moe": ("router", "fc1", "activation"),
    "moe_act": ("activation",),
}


def _attention(model: Model, training: Training, pack: Pack) -> dict[str, float]:
    """Bytes by part, from the layer's input to the output projection."""
    shape = model.shape
    width = training.width
    tp = model.layout.tp
    sp = training.sp
    q = shape.size("q") / tp
    kv = shape.size("kv") / tp
    parts = {"input": (shape.hidden * width + FP32) / sp, "norm": shape.hidden * width / sp}
    heads = (shape.heads + shape.kv_heads) / tp
    if shape.has("qk_norm"):  # queries and keys before it
        parts["qk"] = (2 * q + 2 * kv if training.host else q + kv) * width + heads * FP32
    sums = shape.heads / tp * FP32
    if not training.host:
        # queries, keys, values after the rotation, and the result, which the projection reads too
        return parts | {
            "core": (2 * q + 2 * kv) * width + sums,
            "projection": q * training.fp8,
        }
    core = (
        2 * q + 2 * kv * model.layout.cp
    )  # ours gathers them over the ranks that share a sequence
    if pack.longest <= SHORT and width < FP32:
        return parts | {"core": core * FP32 + sums, "projection": q * width}
    # values are a view of the joined result, which a norm of queries and keys has kept
    if shape.has("qk_norm"):
        core -= kv
    else:
        core += q + kv
    return parts | {"core": core * width + sums}


def _mlp(model: Model, training: Training) -> dict[str, float]:
    """Bytes by part of a dense MLP, without its norm."""
    each = model.shape.ffn / model.layout.tp * training.width
    return {"fc1": 2 * each, "activation": _activation(training) * each}


def _activation(training: Training) -> int:
    """Results of the gated activation's steps, in widths of the layer: unfused it keeps silu(gate),
    too.
    """
    if training.host or training.fused_activation:
        return 1
    return 2


def _experts(model: Model, training: Training) -> dict[str, float]:
    """Tokens spread evenly over experts: each rank computes as many as it sends."""
    shape = model.shape
    width = training.width
    sp = training.sp
    tp = model.layout.expert_tp
    router = (chosen(model) * (2 * INT64 + FP32) + shape.experts * (FP32 + BOOL)) / sp
    rows = chosen(model) * tp / sp  # of an expert's input, for each position
    each = shape.expert_ffn / tp * width
    # both products are in FP32, and the second is kept to be weighed: learner/modules/experts.py
    if training.host:
        first = 2 * each / width * FP32
        second = each + shape.hidden * FP32
    else:  # the activation's result is kept again after it has been weighed
        first = 2 * each
        second = (_activation(training) + (not training.fused_activation)) * each
    return {
        "router": router,
        "fc1": rows * (shape.hidden * width + first),
        "activation": rows * (second + FP32),
    }


def _adapters(model: Model, training: Training) -> float:
    """Return bytes of LoRA A outputs and, on GPUs, of norm outputs that the next layers keep."""
    shape = model.shape
    one = replace(shape, layers=1, experts=min(shape.experts, 1))
    found = 0.0
    for param in params(one):
        for a in adapters(param, one)[:1]:
            found += sum(rank for rank, _ in a.shapes) * (chosen(model) if param.row.expert else 1)
            if param.row.norm is not None and not (training.host or param.row.expert):
                found += shape.hidden / training.sp
    return found * training.width


def in_flight(layout: Layout, stage: int, packs: int, layers: int) -> float:
    """Layers of this stage whose activations are alive at once, over all micro-batches that it has
    begun.
    """
    behind = layout.pp - stage - 1
    if layout.chunks == 1:
        return layers * min(behind + 1, max(packs, 1))
    chunks = min(2 * behind + (layout.chunks - 1) * layout.pp + 1, max(packs, 1) * layout.chunks)
    return layers / layout.chunks * chunks


def of_layers(kept: Kept, training: Training, layers: int, alive: float) -> tuple[float, float]:
    """Bytes for each position of a stage's layers: what waits for backward, and what is recomputed
    beside it.

    `layers`: those of a chunk. `alive`: the layers of all micro-batches in flight.
    """
    if training.granularity != "full":
        return alive * kept.stays, 0.0
    share = training.recomputed(layers)
    if share < 1:  # the first layers of a chunk: what its others have kept is free by then
        return alive * (share * kept.input + (1 - share) * kept.layer), 0.0
    at_once = 1
    if training.method != "block":
        at_once = min(training.layers, layers)
    return alive / at_once * kept.input, at_once * kept.layer - kept.input


def head(model: Model, training: Training, pack: Pack) -> tuple[float, float, float, float]:
    """Bytes of the last stage's end: the final norm with the output layer's input, the logits that
    exist at once, what backward makes of them (learner/modules/head.py), and on CPUs FP32 copies of
    some rows.
    """
    shape = model.shape
    layout = model.layout
    wide = model.head is Precision.fp32 and training.width < FP32
    width = FP32 if wide else training.width
    norm = pack.tokens * (shape.hidden * training.width + FP32) / training.sp
    rows = pack.responses * (shape.hidden * training.width + 3 * INT64 + BOOL + 5 * FP32)
    columns = layout.padded_vocab(shape.vocab) // layout.tp
    at_once = costs.logit_columns(math.ceil(pack.responses), columns, training.width, wide)
    logits = pack.responses * min(at_once, columns) * width
    trained = columns * training.width * (shape.lora is None)
    sums = shape.hidden * (pack.responses * FP32 + trained)  # of hidden states, and of the weight
    gradient = logits if at_once >= columns else sums
    copies = 0.0
    if training.host:
        copies = costs.COPIES * min(costs.HOST_BYTES, logits / width * FP32)
    return norm + rows, logits, gradient, copies
