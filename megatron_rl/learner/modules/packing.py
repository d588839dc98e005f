"""Packs, micro-batches of whole sequences: which replica has which rows of a batch in which pack,
and a pack's layout; many tensors copied to a device as one. The assignment of rows follows from
lengths alone, without communication.

B rows of the batch, S positions of a pack, N response tokens of a pack, X
positions of a pack whose sequences are padded to the length of their bucket.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.batch import Batch
from megatron_rl.models.tensors import as_bytes
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
    longest: int
    tokens: int  # of its sequences; the rest is filler
    tokens_S: Tensor
    positions_S: Tensor
    starts: Tensor  # int32, one more than there are sequences: where each begins, and the end
    logit_index_N: Tensor  # positions whose logits predict the response tokens
    labels_N: Tensor  # those response tokens, row after row
    # int64: sampling support of each token, padded with -1; None: the whole vocabulary
    kept_NK: Tensor | None
    top_NM: Tensor | None  # int64: top tokens at each token, padded with -1; None: no top logprobs
    # experts that the sampler chose, of this stage's layers: see Batch.experts_PLK
    experts_SLK: Tensor | None
    read_S: Tensor  # bool: tokens that the sampler has read, all but the last of each row
    answered: int  # response tokens of its sequences
    buckets: tuple[Bucket, ...]
    padded_index_X: Tensor  # position that each padded place reads
    packed_index_S: Tensor  # padded place of each position
    blanks: Tensor  # padded places that stand for no position
    # where ranks share sequences (context.py), positions and tokens above are this rank's, but for
    # `answered`
    real_S: Tensor | None = None  # bool: which positions are no filler
    held_S: Tensor | None = None  # where in the whole pack each position is
    # where in all ranks' shares, joined, each position of the whole pack is
    order_S: Tensor | None = None
    held_N: Tensor | None = None  # which of the response tokens are here

    @property
    def whole(self) -> bool:
        """True if padding changes nothing: every bucket holds sequences of one length."""
        return len(self.blanks) == 0

    def to(self, device: torch.device) -> "Pack":
        """Copy the pack to a device, except the indices of padded buckets, which only CPU attention
        reads.
        """
        stays = ("padded_index_X", "packed_index_S", "blanks")
        tensors = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name not in stays
        }
        return Pack(**{**vars(self), **in_one_copy(tensors, device)})


def costs_of(lengths: Sequence[int], attention: float) -> list[float]:
    """Cost of each row: its length, and `attention` times its square."""
    return [length + attention * length**2 for length in lengths]


def assign_rows(
    rows: Sequence[int], costs: Sequence[float], trained: Sequence[bool], replicas: int
) -> list[list[int]]:
    """Rows of each replica, of like cost, as replicas wait for the slowest. Rows that nothing is
    trained on, which an update leaves out, come last.
    """
    ordered = sorted(rows, key=lambda row: (not trained[row], -costs[row], row))
    return _spread(ordered, costs, replicas)


def micro_batches(
    rows_of: Sequence[Sequence[int]],
    replica: int,
    lengths: Sequence[int],
    costs: Sequence[float],
    budget: int,
    at_least: int = 1,
    same_count: bool = False,
    count_multiple: int = 1,
    in_step: bool = False,
) -> list[list[int]]:
    """A replica's micro-batches of its rows; one may be empty. `rows_of`: every replica's.

    A micro-batch holds at most `budget` tokens unless a single row is longer; `at_least` of them
    are made if there are enough rows, rounded up to a multiple of `count_multiple`. They are
    balanced by tokens, which takes the least memory; with `in_step`, where pipeline stages wait for
    each other, by cost as far as the budget allows. With `same_count` replicas wait for each other
    in every micro-batch: all have equally many, and those that run at the same time have like cost.
    """
    by = costs if in_step or same_count else lengths
    if not same_count:
        return _fit(rows_of[replica], lengths, by, budget, at_least, count_multiple)
    count = 0
    most = at_least
    while count != most:
        count = most
        packs_of = [_fit(rows, lengths, by, budget, count, count_multiple) for rows in rows_of]
        most = max(map(len, packs_of))
    packs = sorted(packs_of[replica], key=lambda pack: -sum(costs[row] for row in pack))
    return packs + [[] for _ in range(count - len(packs))]


def _fit(
    rows: Sequence[int],
    lengths: Sequence[int],
    by: Sequence[float],
    budget: int,
    at_least: int,
    multiple: int,
) -> list[list[int]]:
    """Micro-batches that keep to the budget, as few as will do."""
    tokens = sum(lengths[row] for row in rows)
    count = max(1, min(max(-(-tokens // budget), at_least), len(rows)))
    while (packs := _within(rows, lengths, by, budget, count)) is None:
        count += 1
    if count % multiple == 0:
        return packs
    count = -(-count // multiple) * multiple
    return _within(rows, lengths, by, budget, count) or _spread(
        _largest_first(rows, lengths), lengths, count
    )


def _within(
    rows: Sequence[int], lengths: Sequence[int], by: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """Make `count` micro-batches balanced in `by`, or in length if only that fits; or None."""
    for weights in (lengths,) if by is lengths else (by, lengths):
        packs = _spread(_largest_first(rows, weights), weights, count)
        if all(len(pack) <= 1 or sum(lengths[row] for row in pack) <= budget for pack in packs):
            return packs
    return None


def _largest_first(rows: Sequence[int], by: Sequence[float]) -> list[int]:
    return sorted(rows, key=lambda row: (-by[row], row))


def _spread(rows: Sequence[int], by: Sequence[float], count: int) -> list[list[int]]:
    """Bins of like load: the next row goes to the emptiest one; in a bin they are ascending."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, index) for index in range(count)]
    for row in rows:
        load, index = heapq.heappop(heap)
        bins[index].append(row)
        heapq.heappush(heap, (load + by[row], index))
    return [sorted(rows) for rows in bins]


def pack(
    batch: Batch,
    rows: Sequence[int],
    multiple: int = 1,
    context: int = 1,
) -> Pack:
    """Lay out these rows; the pack's length is a multiple of `multiple`. `context`: ranks that will
    share each sequence, in two parts of one length each.
    """
    index_R = torch.tensor(sorted(rows), dtype=torch.int64)
    index_R = index_R[batch.lengths_B[index_R].argsort(descending=True, stable=True)]
    lengths = batch.lengths_B[index_R]
    prompts = batch.prompt_lengths_B[index_R]
    responses = batch.response_lengths_B[index_R]
    tokens_P = batch.taken("tokens_P", index_R).long()
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
    tokens_S = torch.zeros(positions, dtype=torch.int64).index_copy(0, real_P, tokens_P)

    row_N = torch.repeat_interleave(torch.arange(len(lengths)), responses)
    column_N = _ramp(responses)
    # the logits at the last prompt position predict the first response token
    logit_index_N = (first_R + prompts - 1)[row_N] + column_N
    buckets = _buckets(spans)
    real_S = torch.zeros(positions, dtype=torch.bool).index_fill(0, real_P, True)
    read_S = real_S.index_fill(0, real_P[lengths.cumsum(0) - 1], False)
    padded_index_X, packed_index_S, blanks = _padding(spans, buckets, starts)
    return Pack(
        rows=tuple(index_R.tolist()),
        longest=int(spans.max()),
        tokens=int(lengths.sum()),
        tokens_S=tokens_S,
        positions_S=_ramp(spans),
        starts=starts.to(torch.int32),
        logit_index_N=logit_index_N,
        labels_N=tokens_S[logit_index_N + 1],
        kept_NK=_padded(batch, "kept_counts_N", "kept_ids_K", index_R),
        top_NM=_padded(batch, "top_counts_N", "top_ids_E", index_R),
        experts_SLK=_experts(batch, index_R, real_P, positions),
        read_S=read_S,
        answered=len(row_N),
        buckets=buckets,
        padded_index_X=padded_index_X,
        packed_index_S=packed_index_S,
        blanks=blanks,
        real_S=real_S if context > 1 else None,
    )


def _experts(batch: Batch, index_R: Tensor, real_P: Tensor, positions: int) -> Tensor | None:
    """The sampler's choices at the positions of a pack."""
    if batch.experts_PLK is None:
        return None
    experts_PLK = batch.taken("experts_PLK", index_R)
    blank_SLK = experts_PLK.new_full((positions, *experts_PLK.shape[1:]), NO_EXPERT)
    return blank_SLK.index_copy(0, real_P, experts_PLK)


def _padded(batch: Batch, counts: str, ids: str, index_R: Tensor) -> Tensor | None:
    """Token ids of each response token, padded with -1; None: the batch has none."""
    if ids not in batch.columns:
        return None
    counts_N = batch.taken(counts, index_R).long()
    widest = int(counts_N.max()) if len(counts_N) else 1
    ids_NK = torch.full((len(counts_N), max(1, widest)), -1)
    held_NK = torch.arange(ids_NK.shape[1]) < counts_N[:, None]
    ids_NK[held_NK] = batch.taken(ids, index_R).long()
    return ids_NK


def unpadded(values_NM: Tensor, counts_N: Tensor, entries: int) -> Tensor:
    """Return the first `counts_N` values of each token, token after token. `entries`: sum of the
    counts, given so that the CPU need not wait for the device.
    """
    counts_N = counts_N.long()
    row_E = torch.repeat_interleave(counts_N, output_size=entries)
    # of each row's first value: its place among the padded ones, less that in the result
    gaps_N = torch.arange(len(counts_N), device=counts_N.device) * values_NM.shape[1]
    gaps_N = gaps_N - (counts_N.cumsum(0) - counts_N)
    place_E = gaps_N[row_E] + torch.arange(entries, device=counts_N.device)
    return values_NM.flatten().gather(0, place_E)


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
    rooms = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    here = torch.empty(sum(rooms), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for room, tensor in zip(here.split(rooms), tensors.values(), strict=True):
        room[: tensor.nbytes].copy_(as_bytes(tensor))
    there = here.to(device, non_blocking=True).split(rooms)
    return {
        name: room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for room, (name, tensor) in zip(there, tensors.items(), strict=True)
    }
