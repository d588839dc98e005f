"""Memory of the learner on one GPU (or CPU process) of a pipeline stage: weights, optimizer,
activations, logits.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from megatron_rl.apps.planner.memory import activations
from megatron_rl.apps.planner.memory.activations import Pack, Training, chosen
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import adapters, params, stage_params
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Split

BF16 = 2  # bytes
# bytes for each parameter: FP32 copy, two moments; one rank of the replicas holds them
MASTERS_AND_MOMENTS = 12
MOMENTS = 8  # an FP32 learner needs no copy
GRADIENT = 4  # summed in FP32, a whole one on every rank
FP8_COPIES = 2  # bytes for each element of a matrix: as it is, and transposed


@dataclass(frozen=True)
class Held:
    """Parameters of one rank of a pipeline stage."""

    count: int
    linear: int  # matrices that Transformer Engine multiplies
    trained: tuple[int, int]  # of dense layers and of experts: all, or their adapters instead


def held(shape: ModelShape, layout: Layout, stage: int) -> Held:
    """Layers are alike: one of them is counted, and the ends of the pipeline."""
    counts = _counts(shape, layout.tp, layout.expert_tp, layout.ep, layout.pp > 1)
    layers = layout.stage_layers(shape.layers)[stage]
    first = counts["first end"] * (stage == 0)
    last = counts["last end"] * (stage == layout.pp - 1)
    dense = counts["dense"] * layers + first + last
    experts = counts["experts"] * layers
    adapted = (counts["adapters of dense"] * layers, counts["adapters of experts"] * layers)
    trained = (dense, experts) if shape.lora is None else adapted
    return Held(dense + experts + sum(adapted), counts["linear"] * layers, trained)


@cache
def _counts(shape: ModelShape, tp: int, expert_tp: int, ep: int, several: bool) -> Counter[str]:
    """Parameters of a rank, by kind: one layer's, and those at the ends of the pipeline."""
    layout = Layout(tp=tp, etp=expert_tp, ep=ep)
    one = replace(shape, layers=1)
    counts = Counter[str]()
    for param in stage_params(one, layout, Place()):
        if param.layer is None:
            continue
        kind = "experts" if param.row.expert else "dense"
        size = prod(param.local_shape(layout))
        counts[kind] += size
        if param.row.split is not Split.replicated and len(param.shapes[0]) == 2:
            counts["linear"] += size
        for each in adapters(param, one):
            counts[f"adapters of {kind}"] += prod(each.local_shape(layout))
    for param in params(one):
        if param.layer is None and (several or not param.row.copy):
            end = "first end" if param.row.megatron[0].startswith("embedding.") else "last end"
            counts[end] += prod(param.local_shape(layout))
    return counts


@dataclass(frozen=True)
class LearnerMemory:
    """Memory of a pipeline stage's fullest rank, bytes."""

    weights: float
    gradients: float
    optimizer: float
    reference: float  # another policy's weights, for a KL penalty
    activations: float  # of the layers, from forward to backward
    head: float  # the same, of the last stage's end
    logits: float  # the same, of its logits: all of them, or the columns that exist at a time
    # their gradient where all are held, else what it adds up to, of hidden states and weight; and
    # FP32 copies of some rows of logits: on GPUs kernels need none
    beside_logits: float
    recomputed: float  # layers that backward computes again
    gradients_of_layer: float  # what comes and goes inside a layer
    forward: float  # what comes and goes inside a pass without a gradient, logits included

    @property
    def static(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def of_logits(self) -> float:
        return self.logits + self.beside_logits

    @property
    def of_layer(self) -> float:
        """Layers that backward computes again, and what comes and goes inside of one."""
        return self.recomputed + self.gradients_of_layer

    @property
    def dynamic(self) -> float:
        """The most that an update adds, when the last logits or a layer's gradients are made."""
        return self.activations + max(self.head + self.of_logits, self.of_layer)

    @property
    def needed(self) -> float:
        return self.static + max(self.dynamic, self.forward)


def of_stage(
    model: Model,
    training: Training,
    stage: int,
    pack: Pack,
    packs: int,
    reference: bool = False,
) -> LearnerMemory:
    """`packs`: micro-batches of an update, of one replica."""
    shape = model.shape
    layout = model.layout
    mine = held(shape, layout, stage)
    layers = layout.stage_layers(shape.layers)[stage]
    pack = Pack(pack.tokens / layout.cp, pack.responses / layout.cp, pack.longest)
    kept = activations.kept(model, training, pack)
    alive = activations.in_flight(layout, stage, packs, layers)
    waiting, again = activations.of_layers(kept, training, layers // layout.chunks, alive)
    last = stage == layout.pp - 1
    norms, logits, gradient, copies = (
        activations.head(model, training, pack) if last else (0.0,) * 4
    )
    weights = training.width * mine.count
    cast = FP8_COPIES * mine.linear if training.fp8 else 0
    step = _step(model, training, pack)
    return LearnerMemory(
        weights=weights + cast,
        gradients=GRADIENT * sum(mine.trained),
        optimizer=_optimizer(mine, layout, training),
        reference=weights if reference else 0,
        activations=pack.tokens * waiting,
        head=norms,
        logits=logits,
        beside_logits=gradient + copies,
        recomputed=pack.tokens * again,
        gradients_of_layer=step,
        forward=pack.tokens * kept.layer + step + norms + logits + copies,
    )


def _optimizer(mine: Held, layout: Layout, training: Training) -> float:
    """The distributed optimizer: replicas of the dense weights share theirs, replicas of the
    experts theirs.
    """
    each = MASTERS_AND_MOMENTS if training.width < 4 else MOMENTS
    dense, experts = mine.trained
    of_dense, of_experts = replicas(layout)
    return each * (dense / of_dense + experts / of_experts)


def replicas(layout: Layout) -> tuple[int, int]:
    """Ranks that hold the same part of the dense weights, and of the experts."""
    dense = layout.dp * layout.cp
    return dense, max(layout.tp * dense // (layout.expert_tp * layout.ep), 1)


def _step(model: Model, training: Training, pack: Pack) -> float:
    """The gradients of a layer's widest part, and the whole sequence that sequence parallelism
    gathers.
    """
    shape = model.shape
    layout = model.layout
    if shape.experts:
        rows = chosen(model) * layout.expert_tp / training.sp
        widest = rows * (shape.hidden + 2 * shape.expert_ffn / layout.expert_tp)
    else:
        widest = 3 * shape.ffn / layout.tp
    gathered = 2 * shape.hidden if training.sp > 1 else 0
    return pack.tokens * training.width * (widest + 2 * shape.hidden + gathered)
