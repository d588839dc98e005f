"""Data plane of the learner: splits a batch's rows among replicas, hands each replica its rows of
the driver's batch, shares the results of one rank of a replica with the others, collects results on
the driver.

Rows go from the driver to a replica's first rank and on to the ranks that share the model with it,
in pieces of bounded size; columns of all rows come back the same way. Every rank knows all lengths,
so that no rank has to request anything.

B rows of the batch, N response tokens, P tokens of all rows.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.batch import Batch, Rows, Share, Table, places_of
from megatron_rl.learner.modules.packing import assign_rows, costs_of
from megatron_rl.learner.parallel import LearnerRank

PIECE_BYTES = 32 << 20


def minibatches(groups_B: Tensor, count: int, seed: str) -> list[Tensor]:
    """Rows of the step's optimizer updates: whole groups, shuffled, in `count` like parts."""
    groups = groups_B.unique().tolist()
    count = min(count, len(groups))
    if count > 1:
        random.Random(seed).shuffle(groups)
    return [
        torch.isin(groups_B, torch.tensor(groups[part::count])).nonzero().flatten()
        for part in range(count)
    ]


@dataclass(frozen=True)
class BatchInfo:
    """A batch as every rank knows it: its table, and the columns that are handed out."""

    table: Table
    trained_B: Tensor  # bool: rows with a token that is trained on
    kept_sizes_B: Tensor  # ids in `kept_ids_K`
    top_sizes_B: Tensor  # ids in `top_ids_E`
    columns: Mapping[str, Tensor]  # without entries: dtype, and shape of one

    @classmethod
    def of(cls, batch: Batch) -> "BatchInfo":
        trained_B = batch.responses.count(batch.mask_N) > 0
        kept = batch.kept_ids_K is not None
        kept_sizes_B = batch.kept_sizes_B if kept else torch.zeros(len(batch))
        top = batch.top_counts_N is not None
        top_sizes_B = batch.top_sizes_B if top else torch.zeros(len(batch))
        columns = {
            name: torch.empty_like(column[:0])  # a view would keep the whole column
            for name, column in batch.columns.items()
            if not name.endswith("_B")
        }
        return cls(batch.table, trained_B, kept_sizes_B.long(), top_sizes_B.long(), columns)

    def sizes(self, name: str) -> Tensor:
        """Entries of a column in each row."""
        if name == "kept_ids_K":
            return self.kept_sizes_B
        if name.endswith("_E"):
            return self.top_sizes_B
        if name.endswith("_N"):
            return self.table.response_lengths_B
        return self.table.lengths_B


def rows_of_replicas(
    about: BatchInfo, parts: Sequence[Tensor], replicas: int, attention: float
) -> list[Tensor]:
    """Rows of each replica: a like share of every update. `attention`: see `costs_of`."""
    costs = costs_of(about.table.lengths_B.tolist(), attention)
    trained = about.trained_B.tolist()
    rows_of: list[list[int]] = [[] for _ in range(replicas)]
    for part in parts:
        for rows, more in zip(
            rows_of, assign_rows(part.tolist(), costs, trained, replicas), strict=True
        ):
            rows += more
    return [torch.tensor(sorted(rows), dtype=torch.int64) for rows in rows_of]


class DataPlane:
    """A rank's end of the data plane; all ranks call its methods together."""

    def __init__(self, ranks: LearnerRank) -> None:
        self._ranks = ranks
        self._driver = ranks.is_driver
        places = list(ranks.layout.places())
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

    def _group_of(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """A group of those of this rank's part; None: the world, or one rank."""
        ranks = self._ranks
        mine = None
        for part in parts if 1 < len(parts[0]) < ranks.world_size else ():
            group = dist.new_group(part, timeout=ranks.limit, backend="gloo")
            mine = group if ranks.rank in part else mine
        return mine

    def announce(self, batch: Batch | None) -> BatchInfo:
        """Broadcast the table and column sizes of the driver's batch to every rank."""
        header: Any = None
        if batch is not None:
            about = BatchInfo.of(batch)
            header = {
                "table": about.table.columns,
                "about": [about.trained_B, about.kept_sizes_B, about.top_sizes_B, about.columns],
            }
        header = self._ranks.broadcast(header)
        return BatchInfo(Table(**header["table"]), *header["about"])

    def hand_out(self, batch: Batch | None, about: BatchInfo, rows_of: Sequence[Tensor]) -> Share:
        """Send each replica its rows of the driver's batch; return this replica's."""
        got: dict[str, Tensor] = {}
        for replica, rows in enumerate(rows_of):
            for name in about.columns:
                for members, layers in self._receivers(replica, name, about):
                    if members != [0] and (self._driver or self._ranks.rank in members):
                        column = self._hand_column(batch, about, name, rows, members, layers)
                        got[name] = column
        own = rows_of[self._replica]
        if batch is not None:
            mine = batch if len(own) == len(batch) else batch.rows(own)
        else:
            mine = Batch(**about.table.rows(own).columns, **got)
        return Share(mine, about.table, rows_of, self._ranks.replicas)

    def _hand_column(
        self,
        batch: Batch | None,
        about: BatchInfo,
        name: str,
        rows: Tensor,
        members: Sequence[int],
        layers: list[int] | None,
    ) -> Tensor:
        """Rows of a column to the ranks that share them."""
        sample = about.columns[name]
        dtype = sample.dtype
        shape: Sequence[int] = sample.shape[1:]
        sizes = about.sizes(name)
        if layers is not None:
            shape = (len(layers), *shape[1:])
        got = torch.empty(0, dtype=dtype)
        if batch is None:
            got = torch.empty(int(sizes[rows].sum()), *shape, dtype=dtype)
        start = 0
        for piece in _pieces(rows, sizes, dtype.itemsize * prod(shape)):
            end = start + int(sizes[piece].sum())
            if batch is None:
                data = got[start:end]
            else:
                data = batch.taken(name, piece)
                data = (data if layers is None else data[:, layers]).contiguous()
            self._pass_on(data, members, self._group if layers is None else self._stage_group)
            start = end
        return got

    def share_values(self, values: Tensor | None, entries: int) -> Tensor:
        """So many FP32 values of the replica on all of its ranks: its speaker's."""
        members = self._members[self._replica]
        if values is None:
            values = torch.empty(entries)
        if len(members) > 1:
            dist.broadcast(values, src=self._speakers[self._replica], group=self._group)
        return values

    def join(self, values_N: Tensor, share: Share) -> Tensor:
        """Values of response tokens of all rows, on every rank."""
        sizes = share.all.response_lengths_B
        whole_N = torch.zeros(int(sizes.sum()), dtype=values_N.dtype)
        whole_N[places_of(sizes, share.own)] = values_N
        return share.replicas.sum(whole_N)

    def collect(
        self, share: Share, columns: Mapping[str, Tensor | None], part: Rows | None = None
    ) -> dict[str, Tensor | None]:
        """Columns of all rows, on the driver; elsewhere nothing. `columns`: those of this replica's
        rows; `part`: what they are columns of, where it is not the share's batch.
        """
        found = {}
        for name, column in columns.items():
            whole = None
            if column is not None:
                whole = self._collect(share, column, (part or share.batch).sizes(name))
            if self._driver:
                found[name] = whole
        return found

    def _collect(self, share: Share, column: Tensor, own_B: Tensor) -> Tensor | None:
        """`own_B`: entries of the column in each of this replica's rows."""
        if len(share.rows_of) == 1:
            return column
        sizes_B = share.everywhere(own_B)
        whole = None
        if self._driver:
            whole = torch.empty(int(sizes_B.sum()), *column.shape[1:], dtype=column.dtype)
        for rows, speaker in zip(share.rows_of, self._speakers, strict=True):
            if self._ranks.rank not in (0, speaker):
                continue
            start = 0
            for piece in _pieces(rows, sizes_B, column.element_size() * prod(column.shape[1:])):
                end = start + int(sizes_B[piece].sum())
                data = torch.empty(end - start, *column.shape[1:], dtype=column.dtype)
                if self._ranks.rank == speaker:
                    data = column[start:end].contiguous()
                if speaker != 0:
                    self._move(data, speaker, 0)
                if whole is not None:
                    whole[places_of(sizes_B, piece)] = data
                start = end
        return whole

    def _receivers(
        self, replica: int, name: str, about: BatchInfo
    ) -> Iterator[tuple[list[int], list[int] | None]]:
        """Yield ranks that receive the same part of a column, and its layers; None: all. Stages
        receive their own layers.
        """
        layout = self._ranks.layout
        stages = self._stages[replica]
        if not name.endswith("_PLK") or len(stages) == 1:
            yield self._members[replica], None
            return
        layers = about.columns[name].shape[1]
        for stage, members in enumerate(stages):
            yield members, layout.own_layers(layers, stage)

    def _pass_on(
        self, data: Tensor, members: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        """From the driver to the first of these ranks, and from there to the others."""
        first = members[0]
        if first != 0 and self._ranks.rank in (0, first):
            self._move(data, 0, first)
        if self._ranks.rank in members and len(members) > 1:
            dist.broadcast(_bytes(data), src=first, group=group)

    def _move(self, data: Tensor, source: int, to: int) -> None:
        if self._ranks.rank == source:
            dist.send(_bytes(data), to)
        else:
            dist.recv(_bytes(data), source)


def _pieces(rows: Tensor, sizes_B: Tensor, entry_bytes: int) -> Iterator[Tensor]:
    """Runs of rows of at most PIECE_BYTES, or of one row."""
    start = held = 0
    sizes = sizes_B[rows].tolist()
    for at, size in enumerate(sizes):
        if at > start and held + size * entry_bytes > PIECE_BYTES:
            yield rows[start:at]
            start = at
            held = 0
        held += size * entry_bytes
    if start < len(sizes):
        yield rows[start:]


def _bytes(data: Tensor) -> Tensor:
    return data.view(torch.uint8) if data.dim() else data
