"""Packs: every row once, within the budget, every index where it belongs; what attention costs
beside the matrices.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import make_batch, make_targets, tokens_of, with_top

from megatron_rl.learner.modules.costs import attention_share, operations
from megatron_rl.learner.modules.packing import (
    Pack,
    assign_rows,
    costs_of,
    micro_batches,
    pack,
    unpadded,
)
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config

LENGTHS = st.lists(st.integers(1, 60), min_size=0, max_size=40)
ATTENTION = st.sampled_from([0.0, 1e-3, 0.05, 1.0])


def _plan(
    lengths: list[int], replicas: int, budget: int, attention: float, **how: Any
) -> list[list[list[int]]]:
    """Each replica's micro-batches."""
    costs = costs_of(lengths, attention)
    # nothing is trained on in some rows
    trained = [length % 3 > 0 for length in lengths]
    rows_of = assign_rows(range(len(lengths)), costs, trained, replicas)
    return [
        micro_batches(
            rows_of,
            one,
            lengths,
            costs,
            budget,
            **how,
        )
        for one in range(replicas)
    ]


@settings(deadline=None)
@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(1, 150),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    ATTENTION,
    st.booleans(),
)
def test_a_plan_holds_every_row_once_and_keeps_to_the_budget(
    lengths: list[int],
    replicas: int,
    budget: int,
    at_least: int,
    multiple: int,
    same_count: bool,
    attention: float,
    in_step: bool,
) -> None:
    assign = partial(
        _plan,
        lengths,
        replicas,
        budget,
        attention,
        at_least=at_least,
        same_count=same_count,
        in_step=in_step,
    )
    shares = assign()
    rounded = assign(count_multiple=multiple)
    for plan in (shares, rounded):
        placed = [row for share in plan for rows in share for row in rows]
        assert sorted(placed) == [*range(len(lengths))]
        assert len(plan) == replicas and all(plan)
        assert not same_count or len({len(share) for share in plan}) == 1
    assert all(len(share) % multiple == 0 for share in rounded)
    for share in shares:
        for group in share:
            assert len(group) <= 1 or sum(lengths[row] for row in group) <= budget
        rows = sum(map(len, share))
        assert len(share) >= min(at_least, max(1, rows))
        assert same_count or all(share) or not rows, (
            "an empty micro-batch costs as much as a small one"
        )
    assert assign() == shares
    costs = costs_of(lengths, attention)
    loads = [[sum(costs[row] for row in group) for group in share] for share in shares]
    if same_count:  # replicas that wait in every micro-batch begin with the costly ones
        assert all(load == sorted(load, reverse=True) for load in loads)
    for counts in (lengths, [length for length in lengths if length % 3]):
        totals = [
            sum(costs[row] for group in share for row in group if lengths[row] in counts)
            for share in shares
        ]
        # replicas differ by one row's cost at most
        assert max(totals) - min(totals) <= max(costs, default=0) * (1 + 1e-9)


def test_the_budget_goes_before_cost() -> None:
    """At equal cost three short rows would share a pack of 29 tokens; another pack costs more."""
    lengths = [12, 12, 5, 20]
    assert _plan(lengths, 1, 25, 1.0, in_step=True) == [[[2, 3], [0, 1]]]
    assert _plan(lengths, 1, 29, 1.0, in_step=True) == [[[3], [0, 1, 2]]]


def test_long_rows_weigh_more_than_their_tokens() -> None:
    """Balanced by tokens, the long row's replica would have far more work than the other."""
    lengths = [64, *[8] * 30]
    costs = costs_of(lengths, 1 / 16)
    for attention, least, most in ((0.0, 1.2, 2.0), (1 / 16, 1.0, 1.02)):
        shares = _plan(lengths, 2, 1000, attention)
        loads = [sum(costs[row] for group in share for row in group) for share in shares]
        assert least <= max(loads) / (sum(costs) / 2) <= most


@pytest.mark.parametrize("multiple", [1, 2, 7])
@pytest.mark.parametrize("rows", [range(14), [5, 2, 9], [3], [0, 1]])
def test_every_index_of_a_pack(rows: list[int], multiple: int) -> None:
    batch = make_batch()
    tokens = tokens_of(batch)
    made = pack(batch, rows, multiple)
    assert sorted(made.rows) == sorted(rows)
    assert len(made.tokens_S) == len(made.positions_S) == made.starts[-1]
    assert len(made.tokens_S) % multiple == 0
    assert len(made.tokens_S) - multiple < int(batch.lengths_B[[*rows]].sum())
    for place, row in enumerate(made.rows):
        start = int(made.starts[place])
        length = int(batch.lengths_B[row])
        assert torch.equal(made.tokens_S[start : start + length], tokens[row])
        assert made.positions_S[start : start + length].tolist() == list(range(length))
    # a token's own position is one behind the position whose logits predict it
    assert torch.equal(made.tokens_S[made.logit_index_N + 1], made.labels_N)
    answers = [tokens[row][batch.prompt_lengths_B[row] :] for row in made.rows]
    assert torch.equal(made.labels_N, torch.cat(answers))


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.integers(0, 13),
        min_size=1,
        max_size=14,
        unique=True,
    ),
    st.sampled_from([1, 2, 8]),
)
def test_buckets_hold_every_position_once(rows: list[int], multiple: int) -> None:
    made = pack(make_batch(), rows, multiple)
    assert sum(bucket.sequences * bucket.length for bucket in made.buckets) == len(
        made.padded_index_X
    )
    assert sum(bucket.sequences for bucket in made.buckets) == len(made.starts) - 1
    values = torch.randn(len(made.tokens_S))
    assert torch.equal(values[made.padded_index_X][made.packed_index_S], values)
    assert len(made.blanks) == len(made.padded_index_X) - len(made.tokens_S)
    assert not set(made.blanks.tolist()) & set(made.packed_index_S.tolist())
    _check_bucket_rows(made)


def _check_bucket_rows(made: Pack) -> None:
    """Each padded row of a bucket is one sequence from its first position on."""
    at = 0
    place = 0
    for bucket in made.buckets:
        for _ in range(bucket.sequences):
            start = int(made.starts[place])
            stop = int(made.starts[place + 1])
            assert stop - start <= bucket.length
            assert made.padded_index_X[at : at + stop - start].tolist() == [*range(start, stop)]
            at += bucket.length
            place += 1


@pytest.mark.parametrize("rows", [[*range(14)], [7, 0, 3, 12], [3], []])
def test_top_tokens_without_padding_are_in_the_order_of_a_loss_s_columns(rows: list[int]) -> None:
    batch = with_top(make_batch())
    made = pack(batch, rows)
    top = {name: getattr(batch, name) for name in ("top_counts_N", "top_logprobs_E")}
    inputs = replace(make_targets(batch, None), **top, top_anchor_E=batch.top_ids_E.float())
    columns = inputs.rows(torch.tensor(made.rows, dtype=torch.int64))
    entries = len(columns.top_logprobs_E)
    assert made.top_NM is not None and bool(entries) == (rows not in ([3], []))
    found_E = unpadded(made.top_NM, columns.top_counts_N, entries)
    assert torch.equal(found_E.float(), columns.top_anchor_E)
    assert torch.equal(found_E, made.top_NM[made.top_NM >= 0])


# at so many tokens attention costs as much as all matrices do, counted by hand from config.json:
# hidden, heads, layers
AS_LONG = {
    "Qwen3-8B": (36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288) + 4096 * 151936)
    / (36 * 4096),
    "Qwen3-30B-A3B": (48 * (2048 * (2 * 4096 + 2 * 512 + 128) + 8 * 3 * 2048 * 768) + 2048 * 151936)
    / (48 * 4096),
}


@pytest.mark.parametrize("name", AS_LONG)
def test_where_attention_is_half_of_the_work(name: str) -> None:
    model = Model.of(read_hf_config(f"conf/model/{name}.json"), Layout())
    assert 1 / attention_share(model) == pytest.approx(AS_LONG[name])
    each = operations(model, AS_LONG[name])
    assert each.attention == pytest.approx(each.dense + each.experts + each.head)
