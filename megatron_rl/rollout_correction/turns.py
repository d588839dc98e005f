"""Sums and extremes over turns: one number for each turn of each row, and back to the tokens.

Shape legend: B sequences, T response positions, K turns and the tokens of none, R runs of tokens of one turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST_NARROW = 4096
KEY = 1 << 32  # more than a row has turns


@dataclass(frozen=True)
class Turns:
    """Neighbours of one turn are a run, summed in one pass: a scatter of every token takes three times as long."""

    lengths_R: Tensor  # int64, of the runs, row after row
    cells_R: Tensor  # int64: each run's place in a flat [B, K]
    shape_BK: tuple[int, int]
    shape_BT: torch.Size

    @classmethod
    def of(cls, turns_BT: Tensor) -> Turns:
        """`turns_BT`: the turn of each token, -1: none."""
        rows_B1 = torch.arange(len(turns_BT), device=turns_BT.device)[:, None]
        keys_R, lengths_R = (turns_BT + (rows_B1 * KEY + 1)).flatten().unique_consecutive(return_counts=True)
        slots_R = keys_R % KEY
        width = int(slots_R.amax()) + 1 if len(slots_R) else 1
        cells_R = keys_R.div(KEY, rounding_mode="floor") * width + slots_R
        return cls(lengths_R, cells_R, (len(turns_BT), width), turns_BT.shape)

    def _runs(self, values_BT: Tensor, reduce: str) -> Tensor:
        return torch.segment_reduce(values_BT.reshape(-1), reduce, lengths=self.lengths_R, unsafe=True)

    def sum(self, values_BT: Tensor, whole: bool = False) -> Tensor:
        """[B, K]. `whole`: whole numbers, of which float32 loses nothing."""
        # one addition after the other loses what torch's own sums keep: a millionth in the longest float32 turn
        narrow = whole or self.shape_BT[1] <= LONGEST_NARROW
        runs_R = self._runs(values_BT if narrow else values_BT.double(), "sum")
        table = runs_R.new_zeros(self.shape_BK).view(-1).index_add_(0, self.cells_R, runs_R)
        return table.view(self.shape_BK).to(values_BT.dtype)

    def extreme(self, values_BT: Tensor, fill: float, largest: bool) -> Tensor:
        """[B, K], `fill` where a row has no such turn."""
        runs_R = self._runs(values_BT, "max" if largest else "min")
        table = runs_R.new_full(self.shape_BK, fill).view(-1)
        return table.scatter_reduce_(0, self.cells_R, runs_R, "amax" if largest else "amin").view(self.shape_BK)

    def at_tokens(self, values_BK: Tensor) -> Tensor:
        """[B, T]: every token has what its turn has."""
        runs_R = values_BK.reshape(-1)[self.cells_R]
        return runs_R.repeat_interleave(self.lengths_R, output_size=self.shape_BT.numel()).view(self.shape_BT)
