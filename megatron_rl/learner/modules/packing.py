"""Packs, micro-batches of whole sequences: which replica has which rows of a batch in which pack,
and a pack's layout; many tensors copied to a device as one. Which rows go where follows from
lengths alone: no rank has to ask another.

B rows of the batch, T response positions, S positions of a pack, N response tokens of a pack, X
positions of a pack whose sequences are padded to the length of their bucket.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.batch import Sequences
from megatron_rl.types import NO_EXPERT

ALIGNMENT = 64  # bytes: of every tensor's place, so that any dtype may be read there
# a bucket takes sequences down to this share of its longest one
BUCKET_SHARE = 0.75


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences of a pack that run through attention as one batch."""

    sequences: int
    length: int


@dataclass(frozen=True)
class Pack:
    """A micro-batch: whole sequences, longest first, with filler between those that ranks share."""

    rows: tuple[int, ...]  # of the batch, in the order of the pack
    horizon: int  # longest response of the pack: its matrices are [len(rows), horizon]
    longest: int
    tokens: int  # of its sequences: what follows is filler
    tokens_S: Tensor
    positions_S: Tensor
    starts: Tensor  # int32, one more than there are sequences: where each begins, and the end
    logit_index_N: Tensor  # positions whose logits predict the response tokens
    labels_N: Tensor  # those response tokens
    kept_NK: Tensor | None  # int64: what each was drawn among, -1 behind those; None: among all
    # where the sampler has sent each, of this stage's layers: see Sequences.experts_PLK
    experts_SLK: Tensor | None
    read_S: Tensor  # bool: what the sampler has read: all but the last token of each row
    cells_N: Tensor  # where each belongs in the flattened [len(rows), horizon]
    buckets: tuple[Bucket, ...]
    padded_index_X: Tensor  # position that each padded place reads
    packed_index_S: Tensor  # padded place of each position
    blanks: Tensor  # padded places that stand for no position
    # where ranks share sequences (context.py), positions and tokens above are this rank's, but for
    # `cells_N`
    real_S: Tensor | None = None  # bool: which positions are no filler
    held_S: Tensor | None = None  # where in the whole pack each position is
    # where in all ranks' shares, joined, each position of the whole pack is
    order_S: Tensor | None = None
    held_N: Tensor | None = None  # which of the response tokens are here

    @property
    def whole(self) -> bool:
        """True if padding changes nothing: every bucket holds sequences of one length."""
        return len(self.blanks) == 0

    def to(self, device: torch.device) -> Pack:
        """The pack on a device. What padded buckets are read by stays: only attention on a host
        looks at it.
        """
        stays = ("padded_index_X", "packed_index_S", "blanks")
        tensors = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name not in stays
        }
        return Pack(**{**vars(self), **in_one_copy(tensors, device)})

    def matrix(self, values_N: Tensor) -> Tensor:
        """Per-token values as [len(rows), horizon], zero where there is no response token."""
        flat = values_N.new_zeros(len(self.rows) * self.horizon)
        return flat.index_copy(0, self.cells_N, values_N).view(len(self.rows), self.horizon)


def assign_rows(
    lengths: Sequence[int],
    replicas: int,
    budget: int,
    at_least: int = 1,
    same_count: bool = False,
    count_multiple: int = 1,
    attention: float = 0.0,
    in_step: bool = False,
) -> list[list[list[int]]]:
    """Row numbers per replica and micro-batch; a micro-batch may be empty.

    A micro-batch holds at most `budget` tokens unless a single row is longer; `at_least` of them
    are made if there are enough rows, rounded up to a multiple of `count_multiple`. Replicas wait
    for the slowest: they are balanced by cost, a row's length and `attention` times its square. A
    replica's micro-batches are balanced by tokens, which takes the least memory; with `in_step`,
    where pipeline stages wait for each other, by cost as far as the budget allows. With
    `same_count` replicas wait in every micro-batch: all have equally many, and those that run at
    the same time have like cost.
    """
    costs = [length + attention * length**2 for length in lengths]
    rows = range(len(lengths))
    if same_count:
        packs = _fit(rows, lengths, costs, budget, at_least, count_multiple, replicas)
        packs.sort(key=lambda pack: -sum(costs[row] for row in pack))
        return [packs[replica::replicas] for replica in range(replicas)]
    by = costs if in_step else lengths
    shares = _spread(rows, costs, replicas)
    return [_fit(share, lengths, by, budget, at_least, count_multiple) for share in shares]


def _fit(
    rows: Sequence[int],
    lengths: Sequence[int],
    by: Sequence[float],
    budget: int,
    at_least: int,
    multiple: int = 1,
    together: int = 1,
) -> list[list[int]]:
    """Micro-batches of `together` replicas that keep to the budget, as few as will do."""
    tokens = sum(lengths[row] for row in rows)
    most = -(-len(rows) // together)  # more than there are rows would be empty
    count = max(1, min(max(-(-tokens // (budget * together)), at_least), most))
    while (packs := _within(rows, lengths, by, budget, count * together)) is None:
        count += 1
    if count % multiple == 0:
        return packs
    count = -(-count // multiple) * multiple * together
    return _within(rows, lengths, by, budget, count) or _spread(rows, lengths, count)


def _within(
    rows: Sequence[int], lengths: Sequence[int], by: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """Make `count` micro-batches balanced in `by`, or in length if only that fits; or None."""
    for weights in (lengths,) if by is lengths else (by, lengths):
        packs = _spread(rows, weights, count)
        if all(len(pack) <= 1 or sum(lengths[row] for row in pack) <= budget for pack in packs):
            return packs
    return None


def _spread(rows: Sequence[int], by: Sequence[float], count: int) -> list[list[int]]:
    """Bins of like load: the largest row left goes to the emptiest one; rows keep their order
    inside a bin.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, index) for index in range(count)]
    for row in sorted(rows, key=lambda row: (-by[row], row)):
        load, index = heapq.heappop(heap)
        bins[index].append(row)
        heapq.heappush(heap, (load + by[row], index))
    return [sorted(rows) for rows in bins]


def pack(
    sequences: Sequences,
    rows: Sequence[int],
    multiple: int = 1,
    numbers: Sequence[int] | None = None,
    context: int = 1,
) -> Pack:
    """Lay out these rows; the pack's length is a multiple of `multiple`. `numbers`: the rows' own
    in their batch; `context`: ranks that will share each sequence, in two parts of one length each.
    """
    numbers_R = torch.tensor(rows if numbers is None else numbers, dtype=torch.int64)
    index_R = torch.tensor(rows, dtype=torch.int64)
    order_R = _longest_first(numbers_R, sequences.lengths_B[index_R])
    mine = sequences.bare.rows(index_R[order_R])
    lengths = mine.lengths_B
    responses = mine.response_lengths_B
    parts = 2 * context if context > 1 else 1
    unit = math.lcm(parts, context * multiple)
    spans = (lengths + parts - 1) // parts * parts
    # filler tokens follow a sequence: under a causal mask no real position sees them
    if len(spans):
        spans[-1] += -int(spans.sum()) % unit
    else:
        spans = torch.tensor([unit])
    starts = torch.nn.functional.pad(spans.cumsum(0), (1, 0))
    first_R = starts[: len(lengths)]
    real_P = torch.repeat_interleave(first_R, lengths) + _ramp(lengths)
    positions = int(starts[-1])
    tokens_S = torch.zeros(positions, dtype=torch.int64).index_copy(0, real_P, mine.tokens_P.long())

    horizon = int(responses.max()) if len(responses) else 1
    horizon = max(1, horizon)
    row_N = torch.repeat_interleave(torch.arange(len(lengths)), responses)
    column_N = _ramp(responses)
    # the logits at the last prompt position predict the first response token
    logit_index_N = (first_R + mine.prompt_lengths_B - 1)[row_N] + column_N
    buckets = _buckets(spans)
    real_S = torch.zeros(positions, dtype=torch.bool).index_fill(0, real_P, True)
    read_S = real_S.index_fill(0, real_P[lengths.cumsum(0) - 1], False)
    padded_index_X, packed_index_S, blanks = _padding(spans, buckets, starts)
    return Pack(
        rows=tuple(numbers_R[order_R].tolist()),
        horizon=horizon,
        longest=int(spans.max()),
        tokens=int(lengths.sum()),
        tokens_S=tokens_S,
        positions_S=_ramp(spans),
        starts=starts.to(torch.int32),
        logit_index_N=logit_index_N,
        labels_N=tokens_S[logit_index_N + 1],
        kept_NK=_kept(mine),
        experts_SLK=_experts(mine, real_P, positions),
        read_S=read_S,
        cells_N=row_N * horizon + column_N,
        buckets=buckets,
        padded_index_X=padded_index_X,
        packed_index_S=packed_index_S,
        blanks=blanks,
        real_S=real_S if context > 1 else None,
    )


def _longest_first(numbers_R: Tensor, lengths_R: Tensor) -> Tensor:
    """Places of rows by length, those of one length in the order of their numbers."""
    by_number = numbers_R.argsort(stable=True)
    by_length = lengths_R[by_number].argsort(descending=True, stable=True)
    return by_number[by_length]


def _experts(mine: Sequences, real_P: Tensor, positions: int) -> Tensor | None:
    """The sampler's choices at the positions of a pack."""
    if mine.experts_PLK is None:
        return None
    blank_SLK = mine.experts_PLK.new_full((positions, *mine.experts_PLK.shape[1:]), NO_EXPERT)
    return blank_SLK.index_copy(0, real_P, mine.experts_PLK)


def _kept(mine: Sequences) -> Tensor | None:
    if mine.kept_counts_N is None or mine.kept_ids_K is None:
        return None
    counts_N = mine.kept_counts_N.long()
    widest = int(counts_N.max()) if len(counts_N) else 1
    kept_NK = torch.full((len(counts_N), max(1, widest)), -1)
    kept_NK[torch.arange(kept_NK.shape[1]) < counts_N[:, None]] = mine.kept_ids_K.long()
    return kept_NK


def _ramp(lengths: Tensor) -> Tensor:
    """0, 1, .. length - 1 for each length, joined."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)


def _buckets(lengths: Tensor) -> tuple[Bucket, ...]:
    """Cut lengths, longest first (the last may stick out), into runs of similar length."""
    found: list[Bucket] = []
    while len(lengths):
        longest = int(lengths[0])
        similar = (lengths >= BUCKET_SHARE * longest) & (lengths <= longest)
        count = int(similar.long().cumprod(0).sum())
        found.append(Bucket(count, longest))
        lengths = lengths[count:]
    return tuple(found)


def _padding(
    spans: Tensor, buckets: Sequence[Bucket], starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices that read a pack as padded buckets, and back."""
    sizes = torch.tensor([bucket.sequences for bucket in buckets])
    widths = torch.repeat_interleave(torch.tensor([bucket.length for bucket in buckets]), sizes)
    column_X = _ramp(widths)
    sequence_X = torch.repeat_interleave(torch.arange(len(spans)), widths)
    real_X = column_X < spans[sequence_X]
    padded_index_X = torch.where(real_X, starts[sequence_X] + column_X, 0)
    return padded_index_X, real_X.nonzero().flatten(), (~real_X).nonzero().flatten()


def in_one_copy(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on the device, as views of one buffer: a copy for each would cost more.

    On a CPU nothing is copied. Elsewhere the copy is queued, without a wait for its end.
    """
    if device.type == "cpu":
        return dict(tensors)
    held = buffer(tensors, pinned=device.type == "cuda").to(device, non_blocking=True)
    return views(held, tensors)


def buffer(tensors: Mapping[str, Tensor], pinned: bool = False) -> Tensor:
    """The bytes of all tensors, one after the other."""
    nbytes = sum(_room(tensor) for tensor in tensors.values())
    held = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    start = 0
    for tensor in tensors.values():
        held[start : start + tensor.nbytes].copy_(
            tensor.detach().contiguous().flatten().view(torch.uint8)
        )
        start += _room(tensor)
    return held


def views(held: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `buffer` has put into `held`."""
    found = {}
    start = 0
    for name, tensor in like.items():
        found[name] = held[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _room(tensor)
    return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
