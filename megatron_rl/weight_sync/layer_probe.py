"""Layer probe after a sync: raises where engine and learner differ at a point of a forward pass, from equal inputs.

The learner goes on from the engine's values at each point (learner/activations.py), so that what differs there was made
there: by another arithmetic, a few hundredths, or by other weights, about one. A list of names cannot see two tensors
of one shape that have changed places, or heads in another order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.config.schema import Format
from megatron_rl.distributed import exchange
from megatron_rl.models.points import Kind, Pair, Point, points
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Norm
from megatron_rl.quantization.smoothing import Smoothing
from megatron_rl.weight_sync.probe import SyncMismatch

# of a difference as a share of the values' size; roundings to BF16 make a few thousandths, to 8 bits a few hundredths
PLAIN_LIMIT, QUANTIZED_LIMIT = 0.02, 0.5
QUANTIZED = frozenset({Kind.qkv, Kind.attention, Kind.o_proj, Kind.gate_up, Kind.down})  # or may be: a cache of FP8
HEADS = {  # what a block of these points' columns is, in their order
    Kind.qkv: ("query", "key", "value"),
    Kind.head_norm: ("query", "key"),
    Kind.rotary: ("query", "key"),
    Kind.attention: ("query",),
}
Worst = tuple[float, int]  # the difference of the block of columns that differs most, and its number


def check(seen: Mapping[Point, Sequence[Pair]], shape: ModelShape, format: Format, version: int) -> dict[str, float]:
    """Compare what each rank has seen; raises SyncMismatch on all of them, with the first point that differs."""
    worst = _worst(seen, shape)
    wrong = [point for point, (error, _) in worst.items() if not error <= limit(point, format)]
    if not wrong:
        return {"sync/probe_layer_error": max(error for error, _ in worst.values())}
    first, *others = wrong
    error, block = worst[first]
    raise SyncMismatch(
        f"after the sync of policy version {version} ({format.value}) sampler and learner first disagree at {first}"
        f"{_named(block, first, shape)}: from equal inputs they differ by {error:.3g} of the values' size "
        f"(allowed {limit(first, format):g}). The weights there are not the learner's, or lie in another order. "
        + (f"So it is at {', '.join(map(str, others))}" if others else "No other point differs")
    )


def unsmoothed(values: Mapping[str, Tensor], smoothing: Smoothing | None) -> Mapping[str, Tensor]:
    """The engine's values with its norms' outputs as the learner has them, which folds nothing into its own weights."""
    if smoothing is None:
        return values
    plain = dict(values)
    for layer, scales_NH in enumerate(smoothing.scales_LNH):
        for kind, norm in ((Kind.input_norm, Norm.attention), (Kind.post_norm, Norm.mlp)):
            plain[str(Point(kind, layer))] = values[str(Point(kind, layer))] * scales_NH[norm].to(torch.bfloat16)
    return plain


def limit(point: Point, format: Format) -> float:
    """The largest difference allowed at a point. In every format a router may choose other experts if it is close."""
    quantized = format != Format.none and point.kind in QUANTIZED
    return QUANTIZED_LIMIT if quantized or point.kind is Kind.experts else PLAIN_LIMIT


def _worst(seen: Mapping[Point, Sequence[Pair]], shape: ModelShape) -> dict[Point, Worst]:
    """The worst difference at each point over all ranks; infinite at a point that nobody has seen."""
    mine = {str(point): max(_errors(pairs, shape.head_dim), default=None) for point, pairs in seen.items()}
    told = exchange(mine)
    return {
        point: max((tuple(part[str(point)]) for part in told if part.get(str(point))), default=(math.inf, 0))
        for point in points(shape)
        if point.kind is not Kind.logprob
    }


def _errors(pairs: Sequence[Pair], width: int) -> Iterator[Worst]:
    """Differences of blocks of `width` columns: of each head, where there are heads."""
    for pair in pairs:
        blocks, place_H = torch.unique(pair.columns_H // width, return_inverse=True)
        difference_SH = pair.learner_SH.float() - pair.engine_SH.float()
        difference, size = (
            torch.zeros(len(blocks)).index_add(0, place_H, values_SH.float().square().sum(0))
            for values_SH in (difference_SH, pair.engine_SH)
        )
        shares = torch.where(difference == 0, 0.0, (difference / size).sqrt()).nan_to_num(nan=math.inf)
        yield from zip(shares.tolist(), blocks.tolist(), strict=True)


def _named(block: int, point: Point, shape: ModelShape) -> str:
    for kind in HEADS.get(point.kind, ()):
        heads = shape.heads if kind == "query" else shape.kv_heads
        if block < heads:
            return f" ({kind} head {block})"
        block -= heads
    return ""
