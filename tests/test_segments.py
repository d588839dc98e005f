"""Segments against plain loops over rows and turns.

Shape legend: N tokens, B rows.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.segments import Segments

EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]]]:
    """Values of rows, some of them empty, and the turn of each."""
    lengths = draw(st.lists(st.integers(0, 6), max_size=6))
    value = st.floats(-100, 100, width=32)
    values = [draw(st.lists(value, min_size=one, max_size=one)) for one in lengths]
    turns = [
        draw(
            st.lists(
                st.integers(-1, 2),
                min_size=one,
                max_size=one,
            )
        )
        for one in lengths
    ]
    return values, turns


def flat(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([one for row in rows for one in row], dtype=dtype)


def rows_of(rows: list[list[float]]) -> Segments:
    lengths = [len(row) for row in rows]
    return Segments.rows(torch.tensor(lengths, dtype=torch.int64), sum(lengths))


@EXAMPLES
@given(tables())
def test_rows(table: tuple[list[list[float]], list[list[int]]]) -> None:
    values, _ = table
    rows = rows_of(values)
    values_N = flat(values)
    sums = [math.fsum(row) for row in values]
    torch.testing.assert_close(
        rows.sum(values_N),
        torch.tensor(sums),
        rtol=1e-6,
        atol=1e-4,
    )
    positive = [sum(one > 0 for one in row) for row in values]
    assert rows.count(values_N > 0).tolist() == positive
    for largest, pick in ((True, max), (False, min)):
        none = -math.inf if largest else math.inf
        found_B = rows.extreme(values_N, largest)
        assert found_B.tolist() == [pick(row, default=none) for row in values]
        running = [pick(row[: at + 1]) for row in values for at in range(len(row))]
        assert rows.running_extreme(values_N, largest).tolist() == running
    running = [math.fsum(row[: at + 1]) for row in values for at in range(len(row))]
    torch.testing.assert_close(
        rows.running_sum(values_N), torch.tensor(running), rtol=1e-6, atol=1e-10
    )
    numbers = torch.arange(len(values))
    assert rows.at_tokens(numbers).tolist() == [
        number for number, row in enumerate(values) for _ in row
    ]
    assert rows.place_N.tolist() == [at for row in values for at in range(len(row))]


@EXAMPLES
@given(tables())
def test_turns_may_come_back(table: tuple[list[list[float]], list[list[int]]]) -> None:
    values, turns = table
    rows = rows_of(values)
    segments = Segments.turns(flat(turns, torch.int32), rows)
    of_turn: dict[tuple[int, int], list[float]] = {}
    keys = []
    for row, (numbers, kinds) in enumerate(zip(values, turns, strict=True)):
        for value, turn in zip(numbers, kinds, strict=True):
            of_turn.setdefault((row, turn), []).append(value)
            keys.append((row, turn))
    assert segments.units == len(of_turn)
    for found_U, reduce in (
        (segments.sum(flat(values)), math.fsum),
        (segments.extreme(flat(values), True), max),
        (segments.extreme(flat(values), False), min),
    ):
        expected = torch.tensor([reduce(of_turn[key]) for key in keys], dtype=torch.float32)
        torch.testing.assert_close(segments.at_tokens(found_U), expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_long_row_loses_nothing(dtype: torch.dtype) -> None:
    """A sequential float32 sum of a million values of 0.1 is off by a thousandth."""
    values_N = torch.full((1_000_000,), 0.1, dtype=dtype)
    rows = Segments.rows(torch.tensor([1_000_000]), 1_000_000)
    exact = torch.tensor([float(values_N[0]) * 1_000_000], dtype=torch.float64).to(dtype)
    torch.testing.assert_close(rows.sum(values_N), exact, rtol=1e-6, atol=0.0)
