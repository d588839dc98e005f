"""Data plane of the learner: sends each replica its rows of the driver's batch, collects results.

Rows go from the driver to a replica's first rank and on to the ranks that share the model with it,
in pieces of bounded size; results of their tokens come back the same way. Every rank knows all
lengths, so that no rank has to request anything. Where each rank holds the whole batch, as in a
probe of the sync, nothing moves.

B rows of the batch, T response positions, N response tokens, P tokens of all rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batch import Batch, Lengths, Sequences, Targets, flat_of, sizes_of
from megatron_rl.learner.parallel import LearnerRank
from megatron_rl.models.tensors import dtype_name, torch_dtype

PIECE_BYTES = 32 << 20
# by a forward pass
READ = tuple(one.name for one in fields(Sequences) if not one.name.endswith("_B"))
# by a loss, beside what it finds in the targets
OF_BATCH = ("sampler_logprobs_N", "turns_N", "groups_B")

Kind = tuple[torch.dtype, tuple[int, ...]]  # of a column: dtype, shape of one entry


@dataclass
class _Held:
    """Rows of a batch that were sent out for the last pass."""

    rows: list[list[int]]  # to each replica
    mine: Sequences | None = None  # in this rank's memory; the driver has them all


@dataclass(frozen=True, kw_only=True)
class Shared(Lengths):
    """A batch on one rank: lengths and groups of all rows; the rows on the driver alone."""

    whole: Batch | None  # None on the other ranks
    groups_B: Tensor
    kept_sizes_B: Tensor  # ids in `kept_ids_K`
    kinds: Mapping[str, Kind]
    held: _Held

    def sizes(self, name: str) -> list[int]:
        """Entries of a column in each row."""
        told = name.endswith("_K")
        if told:
            sizes_B = self.kept_sizes_B
        else:
            sizes_B = sizes_of(name, self.prompt_lengths_B, self.response_lengths_B)
        return sizes_B.tolist()


@dataclass(frozen=True)
class SharedTargets:
    """An update's targets as one rank sees them."""

    batch: Shared
    whole: Targets | None
    kinds: Mapping[str, Kind] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """Some rows of a batch in this rank's memory."""

    sequences: Sequences
    # of the batch's rows in it; None: it is the batch itself
    place: Mapping[int, int] | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # what a loss reads of them

    def at(self, rows: Sequence[int]) -> list[int]:
        return [row if self.place is None else self.place[row] for row in rows]


class DataPlane:
    """A rank's end of the data plane: receives the driver's rows, returns their results."""

    def __init__(self, ranks: LearnerRank) -> None:
        self._ranks = ranks
        self._driver = ranks.is_driver
        places = [ranks.layout.place(rank) for rank in range(ranks.world_size)]
        self._members = [
            [rank for rank, place in enumerate(places) if place.replica == one]
            for one in range(ranks.layout.dp)
        ]
        last = ranks.layout.pp - 1
        self._speakers = [
            next(rank for rank in members if places[rank].pp == last and places[rank].tp == 0)
            for members in self._members
        ]
        self._stages = [
            [[rank for rank in members if places[rank].pp == stage] for stage in range(last + 1)]
            for members in self._members
        ]
        self._replica = ranks.place.replica
        # of the ranks that share a replica, and of those that share its stage
        self._group = self._group_of(self._members)
        self._stage_group = self._group_of([stage for stages in self._stages for stage in stages])
        self.sent = self.received = 0  # bytes, on this rank

    def _group_of(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """A group of those of this rank's part; None: the world, or one rank."""
        ranks = self._ranks
        mine = None
        for part in parts if 1 < len(parts[0]) < ranks.world_size else ():
            group = dist.new_group(part, timeout=ranks.limit, backend="gloo")
            mine = group if ranks.rank in part else mine
        return mine

    def share(self, batch: Batch | None) -> Shared:
        """The driver's batch, for all ranks."""
        about: dict[str, Any] = {}
        if batch is not None:
            columns = {name: getattr(batch, name) for name in READ}
            about = {
                name: getattr(batch, name)
                for name in ("prompt_lengths_B", "response_lengths_B", "groups_B")
            }
            about["kept_sizes_B"] = (
                torch.zeros(0) if batch.kept_ids_K is None else batch.sizes("kept_ids_K")
            )
            about["kinds"] = _kinds(columns)
        about = self._ranks.broadcast(about)
        kinds = _read_kinds(about.pop("kinds"))
        held = _Held([[] for _ in self._members])
        return Shared(whole=batch if self._driver else None, kinds=kinds, held=held, **about)

    def share_targets(self, batch: Shared, targets: Targets | None) -> SharedTargets:
        kinds = self._ranks.broadcast(None if targets is None else _kinds(loss_columns(targets)))
        return SharedTargets(batch, targets if self._driver else None, _read_kinds(kinds))

    def read(self, batch: Sequences | Shared, wanted: Sequence[Sequence[int]]) -> Share:
        """The rows that this replica passes. `wanted`: those of each replica."""
        if isinstance(batch, Sequences):
            return Share(batch)
        held = batch.held
        sets = [{*rows} for rows in wanted]
        missing = [sorted(rows - {*had}) for rows, had in zip(sets, held.rows, strict=True)]
        # what is passed no more goes
        stays = [
            at for at, row in enumerate(held.rows[self._replica]) if row in sets[self._replica]
        ]
        if batch.whole is None:
            columns = None
        else:
            columns = {name: getattr(batch.whole, name) for name in batch.kinds}
        got = self._hand_out(batch, batch.kinds, columns, missing)
        held.rows = [
            [row for row in had if row in rows] + new
            for had, rows, new in zip(held.rows, sets, missing, strict=True)
        ]
        if batch.whole is not None:
            return Share(batch.whole)
        new = _sequences(batch, missing[self._replica], got)
        if held.mine is None:
            held.mine = new
        else:
            held.mine = _joined(held.mine.rows(torch.tensor(stays, dtype=torch.int64)), new)
        return Share(held.mine, {row: at for at, row in enumerate(held.rows[self._replica])})

    def loss_rows(self, targets: Targets | SharedTargets, wanted: Sequence[Sequence[int]]) -> Share:
        """Columns that a loss reads, for the rows that this replica passes."""
        mine = sorted(wanted[self._replica])
        got = {}
        batch = targets.batch
        whole = targets if isinstance(targets, Targets) else targets.whole
        columns = None if whole is None else loss_columns(whole)
        if isinstance(targets, SharedTargets):
            got = self._hand_out(
                targets.batch, targets.kinds, columns, [sorted(rows) for rows in wanted]
            )
        if columns is not None:
            got = {
                name: _rows_of(name, one, batch, mine)
                for name, one in columns.items()
                if one is not None
            }
        lengths = batch.response_lengths_B[mine]
        nothing = torch.zeros(0, dtype=torch.int32)
        bare = Sequences(prompt_lengths_B=0 * lengths, response_lengths_B=lengths, tokens_P=nothing)
        place = {row: at for at, row in enumerate(mine)}
        return Share(
            bare,
            place,
            {name.replace("_BT", "_N"): one for name, one in got.items()},
        )

    def collect(
        self, batch: Shared, rows: Sequence[Sequence[int]], mine: Mapping[int, Tensor]
    ) -> Tensor | None:
        """FP32 values of response tokens, on the driver: of each replica's `rows`, whose speaker
        has them in `mine`; zero elsewhere.
        """
        sizes = batch.response_lengths_B.tolist()
        starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        if self._driver:
            found = torch.zeros(starts[-1])
        else:
            found = None
        for speaker, theirs in zip(self._speakers, rows, strict=True):
            if self._ranks.rank not in (0, speaker):
                continue
            for piece in _pieces(sorted(theirs), sizes, torch.float32.itemsize):
                data = torch.empty(sum(sizes[row] for row in piece))
                if self._ranks.rank == speaker:
                    data = torch.cat([data[:0], *(mine[row] for row in piece)])
                if speaker != 0:
                    self._move(data, speaker, 0)
                if found is not None:
                    for row, part in zip(
                        piece, data.split([sizes[row] for row in piece]), strict=True
                    ):
                        found[starts[row] : starts[row] + len(part)] = part
        return found

    def _hand_out(
        self,
        batch: Shared,
        kinds: Mapping[str, Kind],
        whole: Mapping[str, Tensor | None] | None,
        wanted: Sequence[Sequence[int]],
    ) -> dict[str, Tensor]:
        """This replica's rows of each column, in the order of `wanted`. The driver needs no copy
        and gets nothing.
        """
        got: dict[str, Tensor] = {}
        for replica, rows in enumerate(wanted):
            for name, kind in kinds.items():
                for members, layers in self._receivers(replica, name, kind):
                    if members != [0] and (self._driver or self._ranks.rank in members):
                        column = None if whole is None else whole[name]
                        found = self._hand_column(batch, name, kind, column, rows, members, layers)
                        if found is not None:
                            got[name] = found
        return got

    def _hand_column(
        self,
        batch: Shared,
        name: str,
        kind: Kind,
        column: Tensor | None,
        rows: Sequence[int],
        members: Sequence[int],
        layers: list[int] | None,
    ) -> Tensor | None:
        """Rows of a column to the ranks that share them; on these, what has come."""
        sizes, (dtype, shape), start, got = batch.sizes(name), kind, 0, None
        if column is None:
            entry = shape if layers is None else (len(layers), *shape[1:])
            got = torch.empty(sum(sizes[row] for row in rows), *entry, dtype=dtype)
        for piece in _pieces(rows, sizes, dtype.itemsize * prod(shape)):
            end = start + sum(sizes[row] for row in piece)
            if column is not None:
                data = _rows_of(name, column, batch, piece)
                data = data if layers is None else data[:, layers]
            elif got is not None:
                data = got[start:end]
            self._pass_on(data, members, self._group if layers is None else self._stage_group)
            start = end
        return got

    def _receivers(
        self, replica: int, name: str, kind: Kind
    ) -> Iterator[tuple[list[int], list[int] | None]]:
        """Ranks that have the same of a column, and of which layers; None: all of it. A stage
        chooses for its own.
        """
        layout = self._ranks.layout
        stages = self._stages[replica]
        if not name.endswith("_PLK") or len(stages) == 1:
            yield self._members[replica], None
            return
        for stage, members in enumerate(stages):
            yield members, layout.own_layers(kind[1][0], stage)

    def _pass_on(
        self, data: Tensor, members: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        """From the driver to the first of these ranks, and from there to the others."""
        first = members[0]
        if first != 0 and self._ranks.rank in (0, first):
            self._move(data, 0, first)
        if self._ranks.rank in members and len(members) > 1:
            dist.broadcast(_bytes(data), src=first, group=group)
            self._count(data, first)

    def _move(self, data: Tensor, source: int, to: int) -> None:
        if self._ranks.rank == source:
            dist.send(_bytes(data), to)
        else:
            dist.recv(_bytes(data), source)
        self._count(data, source)

    def _count(self, data: Tensor, source: int) -> None:
        sends = self._ranks.rank == source
        self.sent = self.sent + sends * data.nbytes
        self.received = self.received + (not sends) * data.nbytes


def loss_columns(targets: Targets) -> dict[str, Tensor | None]:
    """Columns that a loss reads, beside the policy's own logprobs."""
    columns = {name: value for name, value in vars(targets).items() if name != "batch"}
    return columns | {name: getattr(targets.batch, name) for name in OF_BATCH}


def _kinds(columns: Mapping[str, Tensor | None]) -> dict[str, Any]:
    told = {name: one for name, one in columns.items() if one is not None}
    return {name: [dtype_name(one.dtype), list(_entry(name, one))] for name, one in told.items()}


def _entry(name: str, column: Tensor) -> torch.Size:
    return column.shape[2 if name.endswith("_BT") else 1 :]


def _read_kinds(about: Mapping[str, Any]) -> dict[str, Kind]:
    return {name: (torch_dtype(dtype), tuple(shape)) for name, (dtype, shape) in about.items()}


def _rows_of(name: str, column: Tensor, batch: Shared | Batch, rows: Sequence[int]) -> Tensor:
    """The rows' part of a column, which may be a right-padded matrix."""
    index = torch.tensor(rows, dtype=torch.int64)
    if name.endswith("_BT"):
        return flat_of(column, batch.response_lengths_B[index], rows)
    whole = batch.whole if isinstance(batch, Shared) else batch
    assert whole is not None
    taken = whole.taken(name, column, index)
    assert taken is not None
    return taken.contiguous()


def _sequences(batch: Shared, rows: Sequence[int], columns: Mapping[str, Tensor]) -> Sequences:
    index = torch.tensor(rows, dtype=torch.int64)
    lengths = {
        name: getattr(batch, name)[index] for name in ("prompt_lengths_B", "response_lengths_B")
    }
    return Sequences(**lengths, **columns)


def _joined(first: Sequences, second: Sequences) -> Sequences:
    parts = {
        one.name: (getattr(first, one.name), getattr(second, one.name)) for one in fields(Sequences)
    }
    joined: dict[str, Any] = {
        name: None if pair[0] is None else torch.cat(pair) for name, pair in parts.items()
    }
    return Sequences(**joined)


def _pieces(rows: Sequence[int], sizes: Sequence[int], entry_bytes: int) -> Iterator[list[int]]:
    """Runs of rows of at most PIECE_BYTES, or of one row."""
    piece: list[int] = []
    held = 0
    for row in rows:
        if piece and held + sizes[row] * entry_bytes > PIECE_BYTES:
            yield piece
            piece = []
            held = 0
        piece.append(row)
        held += sizes[row] * entry_bytes
    if piece:
        yield piece


def _bytes(data: Tensor) -> Tensor:
    if data.dim():
        return data.view(torch.uint8)
    return data
