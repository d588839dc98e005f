"""Seconds of a pass over a step's tokens on one GPU of a learner: products, bytes of its memory, kernels to launch.

Narrow layers and small packs are slower for each operation. A product takes its operations at `dense` of the peak, and its
operands and result at `reading` of the bandwidth. Between products, each byte that a layer keeps for backward is
written and read in a forward pass; in backward it is read, and its gradient written and read. The GPU waits where its
kernels take less than the host needs to launch them (`launch_us` each).
"""

from dataclasses import dataclass
from math import ceil

from megatron_rl.config.schema import Precision
from megatron_rl.learner.modules import costs
from megatron_rl.learner.modules.costs import operations
from megatron_rl.workshop.planner.case import Case
from megatron_rl.workshop.planner.memory import activations
from megatron_rl.workshop.planner.memory.activations import Pack
from megatron_rl.workshop.planner.memory.learner import BF16, chosen, held

TERA, GIGA = 1e12, 1e9
LAYER_KERNELS = 20  # of a layer's forward pass, its products included
FORWARD, BACKWARD = 2, 3  # times that a byte moves which is kept in between
SUMMED = 12  # bytes for each trained weight of a pack: its gradient written and read, the sum in FP32 read and written


@dataclass(frozen=True)
class LogitKernels:
    """Work on logits beside their products."""

    forward: float  # bytes moved for each logit
    backward: float
    launches: float  # kernels for each chunk of columns, forward and backward


FUSED = LogitKernels(forward=2, backward=4, launches=6)  # read for statistics; read and written for the gradient


def seconds(case: Case, passes: int, again: float = 0.0, logits: LogitKernels = FUSED) -> float:
    """Of all updates. `passes`: 1 forward, 3 with backward, 2 where weights are frozen. `again`: share of the layers
    that are repeated."""
    updates, stages = case.work.updates, case.model.layout.pp
    of_stage = _body(case, passes, again) + _head(case, passes, logits) / stages
    return (of_stage + _sums(case) * (passes > 1)) * case.packs * updates


def needed(case: Case) -> float:
    """Operations of a step's updates on one GPU, of which its share of the peak is counted."""
    work, each = case.work, operations(case.model, case.work.length)
    return 3 * (work.tokens * each.body + work.sequences * work.response * each.head) / case.model.layout.world


def _pack(case: Case) -> Pack:
    """The part of a micro-batch that a rank computes, on average."""
    work, layout = case.work, case.model.layout
    tokens = work.tokens / work.updates / layout.dp / layout.cp / case.packs
    return Pack(tokens, tokens * work.response / work.length, int(work.length))


def _body(case: Case, passes: int, again: float) -> float:
    """The layers of a stage, for one pack."""
    shape, layout, assumed, pack = case.model.shape, case.model.layout, case.assumed, _pack(case)
    each, layers = operations(case.model, case.work.length), shape.layers
    wide = [(shape.hidden, shape.size("q") + 2 * shape.size("kv")), (shape.size("q"), shape.hidden)]
    wide += [] if shape.experts else [(shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden)]
    products = sum(_product(case, pack.tokens, max(sides) / layout.tp, min(sides)) for sides in wide)
    others = each.experts / assumed.experts + each.attention / assumed.attention
    others *= pack.tokens / layout.tp / layers / (case.gpu.tflops * TERA)
    kept = activations.kept(shape, chosen(case.model), layout, case.training, pack).layer
    moved = kept * pack.tokens * (FORWARD * (1 + again) + BACKWARD * (passes > 1))
    busy = (products + others) * (passes + again) + moved / _bandwidth(case)
    return max(busy, LAYER_KERNELS * assumed.launch_us / 1e6 * (passes + again)) * layers / layout.pp


def _head(case: Case, passes: int, logits: LogitKernels) -> float:
    """The logits of one pack; where they are not held whole backward makes them again."""
    shape, tp, rows = case.model.shape, case.model.layout.tp, _pack(case).responses
    columns = case.model.layout.padded_vocab(shape.vocab) // tp
    wide = case.model.head is Precision.fp32 and case.training.width < activations.FP32
    chunks = ceil(columns / costs.logit_columns(ceil(rows), columns, case.training.width, wide))
    repeated = passes > 1 and chunks > 1
    moved = rows * columns * (logits.forward + logits.backward * (passes > 1))
    busy = _product(case, rows, columns, shape.hidden) * (passes + repeated) + moved / _bandwidth(case)
    return max(busy, chunks * logits.launches * case.assumed.launch_us / 1e6)


def _sums(case: Case) -> float:
    """Gradients of one pack, added to those of the packs before."""
    return SUMMED * sum(held(case.model.shape, case.model.layout, 0).trained) / _bandwidth(case)


def _product(case: Case, rows: float, columns: float, inner: float) -> float:
    moved = BF16 * (rows * inner + inner * columns + rows * columns)
    return 2 * rows * inner * columns / (case.gpu.tflops * TERA * case.assumed.dense) + moved / _bandwidth(case)


def _bandwidth(case: Case) -> float:
    return case.gpu.memory_tbs * TERA * case.assumed.reading
