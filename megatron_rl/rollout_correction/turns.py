"""Reductions of token values to a number per turn of each row, and their broadcast to tokens.

Shape legend: B sequences, T response positions, K turns and the tokens of none, R runs of a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Turns:
    """Runs of neighbours of one turn, reduced in a pass; on CPUs by numpy, four times faster."""

    starts_R: Tensor  # int64: each run's first token, row after row
    cells_R: Tensor  # int64: each run's place in a flat [B, K]
    shape_BK: tuple[int, int]
    shape_BT: torch.Size

    @classmethod
    def of(cls, turns_BT: Tensor) -> Turns:
        """`turns_BT`: the turn of each token, -1: none."""
        rows, columns = turns_BT.shape
        begins_BT = torch.ones_like(turns_BT, dtype=torch.bool)
        begins_BT[:, 1:] = turns_BT[:, 1:] != turns_BT[:, :-1]
        if turns_BT.is_cuda:
            starts_R = begins_BT.flatten().nonzero().flatten()
        else:
            starts_R = torch.from_numpy(np.flatnonzero(begins_BT.numpy()))
        slots_R = turns_BT.reshape(-1)[starts_R] + 1
        width = int(slots_R.amax()) + 1 if len(slots_R) else 1
        cells_R = starts_R.div(max(1, columns), rounding_mode="floor") * width + slots_R
        return cls(starts_R, cells_R, (rows, width), turns_BT.shape)

    @cached_property
    def lengths_R(self) -> Tensor:
        return torch.diff(self.starts_R, append=self.starts_R.new_tensor([self.shape_BT.numel()]))

    def _runs(self, values_BT: Tensor, reduce: str) -> Tensor:
        values = values_BT.reshape(-1)
        if values.is_cuda:
            return torch.segment_reduce(values, reduce, lengths=self.lengths_R, unsafe=True)
        return torch.from_numpy(REDUCE[reduce].reduceat(values.numpy(), self.starts_R.numpy()))

    def sum(self, values_BT: Tensor) -> Tensor:
        """[B, K]."""
        # torch adds one after the other, which loses a millionth in a long float32 turn; numpy adds
        # pairs
        runs_R = self._runs(values_BT.double() if values_BT.is_cuda else values_BT, "sum")
        table = (
            runs_R.new_zeros(self.shape_BK)
            .view(-1)
            .index_add_(
                0,
                self.cells_R,
                runs_R,
            )
        )
        return table.view(self.shape_BK).to(values_BT.dtype)

    def extreme(self, values_BT: Tensor, fill: float, largest: bool) -> Tensor:
        """[B, K], `fill` where a row has no such turn."""
        runs_R = self._runs(values_BT, "max" if largest else "min")
        table = runs_R.new_full(self.shape_BK, fill).view(-1)
        return table.scatter_reduce_(0, self.cells_R, runs_R, "amax" if largest else "amin").view(
            self.shape_BK
        )

    def at_tokens(self, values_BK: Tensor) -> Tensor:
        """[B, T]: every token has what its turn has."""
        runs_R = values_BK.reshape(-1)[self.cells_R]
        if runs_R.is_cuda:
            return runs_R.repeat_interleave(self.lengths_R, output_size=self.shape_BT.numel()).view(
                self.shape_BT
            )
        return torch.from_numpy(np.repeat(runs_R.numpy(), self.lengths_R.numpy())).view(
            self.shape_BT
        )
