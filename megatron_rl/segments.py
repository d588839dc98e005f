"""Segments of flat values: rows of unlike lengths that stand one after another, and the turns of
rows of sessions. Sums and extremes by segment, their broadcast to tokens, running sums and extremes.

Shape legend: N tokens, R runs of neighbouring tokens, U units that runs belong to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Consecutive runs of tokens. A unit is one run (a row), or several of them (a turn that tool
    output interrupts).
    """

    lengths_R: Tensor  # int64, may be 0
    tokens: int
    units: int
    unit_R: Tensor | None = None  # int64; None: each run is a unit

    @classmethod
    def rows(cls, lengths_B: Tensor, tokens: int) -> Segments:
        return cls(lengths_B, tokens, len(lengths_B))

    @classmethod
    def turns(cls, turns_N: Tensor, rows: Segments) -> Segments:
        """The turns of each row; tokens of no turn (-1) are a unit of their row's own."""
        row_N = rows.at_tokens(torch.arange(rows.units, device=turns_N.device))
        changes_N = torch.ones_like(turns_N, dtype=torch.bool)
        changes_N[1:] = (turns_N[1:] != turns_N[:-1]) | (row_N[1:] != row_N[:-1])
        starts_R = changes_N.nonzero().flatten()
        turn_R = turns_N[starts_R].long() + 1
        keys_R = turn_R * rows.units + row_N[starts_R]
        keys, unit_R = keys_R.unique(return_inverse=True)
        lengths_R = starts_R.diff(append=starts_R.new_tensor([len(turns_N)]))
        return cls(lengths_R, len(turns_N), len(keys), unit_R)

    def sum(self, values_N: Tensor) -> Tensor:
        """[U], in the dtype of the values; added up pairwise or in float64."""
        wide_N = values_N
        if values_N.is_cuda or values_N.dtype not in (torch.float32, torch.float64):
            wide_N = values_N.double()
        return self._over_units(self._reduced(wide_N, "sum", 0.0)).to(values_N.dtype)

    def count(self, mask_N: Tensor) -> Tensor:
        """int64 [U]: tokens under the mask."""
        if mask_N.is_cuda:
            return self.sum(mask_N.double()).long()
        return self._over_units(self._reduced(mask_N, "sum", 0, dtype=np.int32)).long()

    def extreme(self, values_N: Tensor, largest: bool) -> Tensor:
        """[U]; infinite for a unit without tokens."""
        none = -math.inf if largest else math.inf
        found_R = self._reduced(values_N, "max" if largest else "min", none)
        if self.unit_R is None:
            return found_R
        found_U = found_R.new_full((self.units,), none)
        return found_U.scatter_reduce_(0, self.unit_R, found_R, "amax" if largest else "amin")

    def at_tokens(self, values_U: Tensor) -> Tensor:
        """[N]: the value of each token's unit."""
        values_R = values_U if self.unit_R is None else values_U[self.unit_R]
        if values_R.is_cuda:
            return values_R.repeat_interleave(self.lengths_R, output_size=self.tokens)
        # several times faster than torch's on a CPU
        return torch.from_numpy(np.repeat(values_R.numpy(), self._lengths))

    def running_sum(self, values_N: Tensor) -> Tensor:
        """[N]: of each token and those before it in its run."""
        total_N = values_N.double().cumsum(0)
        before_N = torch.nn.functional.pad(total_N, (1, 0))
        return (total_N - self._at_runs(before_N[self._starts_R])).to(values_N.dtype)

    def running_extreme(self, values_N: Tensor, largest: bool) -> Tensor:
        """[N]: of each token and those before it in its run."""
        place_N = self.place_N
        pick = torch.maximum if largest else torch.minimum
        distance = 1
        while distance < self.tokens:  # after each turn, of the last 2 x distance tokens
            earlier_N = values_N.roll(distance)
            values_N = torch.where(place_N >= distance, pick(values_N, earlier_N), values_N)
            distance = 2 * distance
        return values_N

    @cached_property
    def place_N(self) -> Tensor:
        """int64: each token's place in its run, from 0."""
        return torch.arange(self.tokens, device=self.lengths_R.device) - self._at_runs(
            self._starts_R
        )

    @cached_property
    def _starts_R(self) -> Tensor:
        return self.lengths_R.cumsum(0) - self.lengths_R

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.lengths_R.numpy()

    @cached_property
    def _filled(self) -> np.ndarray | None:
        """Mask of the runs that have a token; None: all."""
        filled = self._lengths > 0
        return None if filled.all() else filled

    def _over_units(self, sums_R: Tensor) -> Tensor:
        """The sum over the runs of each unit, in float64 if it has several."""
        if self.unit_R is None:
            return sums_R
        sums_R = sums_R.double()
        return sums_R.new_zeros(self.units).index_add_(0, self.unit_R, sums_R)

    def _at_runs(self, values_R: Tensor) -> Tensor:
        return Segments.rows(self.lengths_R, self.tokens).at_tokens(values_R)

    def _reduced(self, values_N: Tensor, by: str, none: float, dtype: Any = None) -> Tensor:
        if values_N.is_cuda:
            return torch.segment_reduce(
                values_N, by, lengths=self.lengths_R, unsafe=True, initial=none
            )
        reduce = {"sum": np.add, "max": np.maximum, "min": np.minimum}[by].reduceat
        starts = self._starts_R.numpy()
        values = values_N.detach().numpy()
        # of a run without tokens it would return the value at its start
        if self._filled is None and len(starts):
            return torch.from_numpy(reduce(values, starts, dtype=dtype))
        found = np.full(len(starts), none, dtype=dtype or values.dtype)
        if self.tokens:
            found[self._filled] = reduce(values, starts[self._filled], dtype=dtype)
        return torch.from_numpy(found)
