"""Seconds of a pass over a step's tokens on one GPU: products, bytes moved, kernel launches.

Narrow layers and small packs are slower for each operation. A product takes its operations at
`dense` of the peak, then its operands and result at `reading` of the bandwidth. Between products,
each byte that a layer keeps for backward is written and read in a forward pass; in backward it is
read, and its gradient written and read. The GPU waits where its kernels take less time than the
CPU needs to launch them (`launch_us` each).
"""

from math import ceil

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.memory import activations
from megatron_rl.apps.planner.memory.activations import Pack
from megatron_rl.apps.planner.memory.learner import BF16, held
from megatron_rl.config.schema import Precision
from megatron_rl.learner.modules import costs
from megatron_rl.learner.modules.costs import operations

TERA = 1e12
GIGA = 1e9
LAYER_KERNELS = 20  # of a layer's forward pass, its products included
# times that a byte moves which a layer keeps for backward
FORWARD = 2
BACKWARD = 3
# bytes for each trained weight of a pack: its gradient, written and read, and the same of the sum
SUMMED = 12


# of fused kernels, bytes moved for each logit: one reads them for their statistics, one reads them
# and writes their gradient
LOGIT_FORWARD = 2
LOGIT_BACKWARD = 4
LOGIT_KERNELS = 6  # for each chunk of columns, forward and backward


def seconds(case: Case, passes: int, again: float = 0.0) -> float:
    """Seconds of a pass over all tokens of a step.

    `passes`: 1 forward, 3 with backward, 2 with backward through frozen weights. `again`: share of
    the layers that are recomputed.
    """
    of_pack = _body(case, passes, again)
    of_pack += _head(case, passes) / case.model.layout.pp
    if passes > 1:
        trained = sum(held(case.model.shape, case.model.layout, 0).trained)
        of_pack += SUMMED * trained / _bandwidth(case)
    return of_pack * case.packs * case.work.updates


def needed(case: Case) -> float:
    """Operations of a step's updates on one GPU, as perf/update_mfu counts them."""
    work = case.work
    each = operations(case.model, work.length)
    forward = work.tokens * each.body + work.sequences * work.response * each.head
    return 3 * forward / case.model.layout.world


def _pack(case: Case) -> Pack:
    """A rank's part of a micro-batch, on average."""
    work = case.work
    layout = case.model.layout
    tokens = work.tokens / work.updates / layout.dp / layout.cp / case.packs
    return Pack(tokens, tokens * work.response / work.length, int(work.length))


def _body(case: Case, passes: int, again: float) -> float:
    """Seconds of a stage's layers for one pack."""
    shape = case.model.shape
    layout = case.model.layout
    assumed = case.assumed
    pack = _pack(case)
    each = operations(case.model, case.work.length)
    qkv = shape.size("q") + 2 * shape.size("kv")
    sides = [(qkv, shape.hidden), (shape.size("q"), shape.hidden)]
    if not shape.experts:
        sides += [(2 * shape.ffn, shape.hidden), (shape.ffn, shape.hidden)]
    products = sum(_product(case, pack.tokens, split / layout.tp, whole) for split, whole in sides)
    others = each.experts / assumed.experts + each.attention / assumed.attention
    others *= pack.tokens / layout.tp / shape.layers / (case.gpu.tflops * TERA)
    kept = activations.kept(case.model, case.training, pack).layer
    moved = kept * pack.tokens * (FORWARD * (1 + again) + BACKWARD * (passes > 1))
    busy = (products + others) * (passes + again) + moved / _bandwidth(case)
    launching = LAYER_KERNELS * (passes + again) * assumed.launch_us / 1e6
    return max(busy, launching) * shape.layers / layout.pp


def _head(case: Case, passes: int) -> float:
    """Seconds of one pack's logits; backward makes again what is not held whole."""
    model = case.model
    width = case.training.width
    rows = _pack(case).responses
    columns = model.layout.padded_vocab(model.shape.vocab) // model.layout.tp
    wide = model.head is Precision.fp32 and width < activations.FP32
    chunks = ceil(columns / costs.logit_columns(ceil(rows), columns, width, wide))
    backward = passes > 1
    products = passes + (backward and chunks > 1)
    moved = rows * columns * (LOGIT_FORWARD + LOGIT_BACKWARD * backward)
    busy = _product(case, rows, columns, model.shape.hidden) * products
    busy += moved / _bandwidth(case)
    return max(busy, chunks * LOGIT_KERNELS * case.assumed.launch_us / 1e6)


def _product(case: Case, rows: float, columns: float, inner: float) -> float:
    moved = BF16 * (rows * inner + inner * columns + rows * columns)
    peak = case.gpu.tflops * TERA * case.assumed.dense
    return 2 * rows * inner * columns / peak + moved / _bandwidth(case)


def _bandwidth(case: Case) -> float:
    return case.gpu.memory_tbs * TERA * case.assumed.reading
