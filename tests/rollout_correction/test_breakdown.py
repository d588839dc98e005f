"""The breakdowns add up to the whole, and each line of cutting shows the fault that it is there
for.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from matrices import batch_of, flat_of, matrix, rollout_correction
from rollouts import rollout

from megatron_rl.apps.reports.run_data import recorded_breakdowns, session_table
from megatron_rl.batch import Share, collate
from megatron_rl.config.schema import CorrectionConfig
from megatron_rl.rollout_correction.breakdown import (
    LABELS,
    OF_SESSIONS,
    Slice,
    breakdowns,
    mismatch_by_format,
    mismatch_in_sessions,
    pooled,
)
from megatron_rl.tracking.metrics import unknown
from megatron_rl.tracking.rollout_file import load_recorded, write_rollouts
from megatron_rl.types import Prompt, Rollout, Scored, Session, SessionTurn

ROWS = 6
COLUMNS = 20
REASONS = ["stop", "length", "stop", "stop", "abort", "length"]
VERSIONS = torch.tensor([7, 7, 6, 4, 7, 6])


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mu_BT = -4 * torch.rand(ROWS, COLUMNS, generator=generator).square()
    prox_BT = mu_BT + 0.01 * torch.randn(ROWS, COLUMNS, generator=generator)
    lengths_B = torch.tensor([20, 20, 10, 3, 1, 0])
    return prox_BT, mu_BT, torch.arange(COLUMNS)[None] < lengths_B[:, None]


def cut(
    prox_BT: torch.Tensor, mu_BT: torch.Tensor, mask_BT: torch.Tensor, version: int | None = None
) -> dict[str, list[Slice]]:
    batch = batch_of(mask_BT, mu_BT, versions_B=VERSIONS)
    slices = breakdowns(prox_BT.flatten(), batch, finish_reasons=REASONS, policy_version=version)
    return {
        by: [one for one in slices if one.by == by]
        for by in dict.fromkeys(one.by for one in slices)
    }


def test_every_cut_adds_up_to_the_batch() -> None:
    prox_BT, mu_BT, mask_BT = batch()
    metrics = rollout_correction(prox_BT, mu_BT, mask_BT, CorrectionConfig()).metrics
    found = cut(prox_BT, mu_BT, mask_BT)
    assert list(found) == ["position", "probability", "length", "staleness", "finish"]
    for slices in found.values():
        assert sum(one.tokens for one in slices) == int(mask_BT.sum())
        for name in ("kl", "k3_kl", "mult_prob_error"):
            mean = sum(one.tokens * getattr(one, name) for one in slices) / int(mask_BT.sum())
            assert mean == pytest.approx(metrics[f"rollout_corr/{name}"], abs=1e-7)


def test_labels() -> None:
    found = cut(*batch())
    assert [one.label for one in found["length"]] == ["1 to 1", "2 to 3", "8 to 15", "16 to 31"]
    assert [(one.label, one.tokens) for one in found["staleness"]] == [
        ("0", 41),
        ("1", 10),
        ("3", 3),
    ]
    assert Counter({one.label: one.tokens for one in found["finish"]}) == Counter(
        stop=33, length=20, abort=1
    )
    assert [one.label for one in found["position"]] == [
        f"{10 * i}-{10 * i + 10} %" for i in range(10)
    ]
    assert found["probability"][0].label == "0.01 to 0.1"


def test_each_cut_finds_its_fault() -> None:
    prox_BT, mu_BT, mask_BT = batch()
    row_B1 = torch.arange(ROWS)[:, None]
    column_T = torch.arange(COLUMNS)
    for by, label, where_BT in [
        ("position", "90-100 %", (column_T >= 18) & (row_B1 < 2)),
        (
            "probability",
            "0.01 to 0.1",
            (mu_BT.exp() > 0.01) & (mu_BT.exp() <= 0.1),
        ),
        ("length", "8 to 15", row_B1 == 2),
        ("staleness", "3", row_B1 == 3),
        ("finish", "abort", row_B1 == 4),
    ]:
        slices = cut(torch.where(where_BT, prox_BT - 1.0, prox_BT), mu_BT, mask_BT)[by]
        assert max(slices, key=lambda one: one.kl).label == label


def test_tokens_without_a_ratio_are_left_out_and_padding_is_ignored() -> None:
    prox_BT, mu_BT, mask_BT = batch()
    mu_BT = mu_BT.masked_fill(~mask_BT, math.nan)
    prox_BT = prox_BT.masked_fill(~mask_BT, math.inf)
    mu_BT[0, 5] = math.nan
    for slices in cut(prox_BT, mu_BT, mask_BT).values():
        assert sum(one.tokens for one in slices) == int(mask_BT.sum()) - 1
        assert all(math.isfinite(one.kl) for one in slices)
    assert cut(prox_BT, mu_BT, mask_BT & False) == {}


def test_a_recorded_step(tmp_path: Path) -> None:
    prox_BT, mu_BT, mask_BT = batch()
    lengths_B = mask_BT.sum(1)
    prox_N = flat_of(prox_BT, lengths_B)
    scored = [
        Scored(
            Rollout(
                prompt=Prompt(i, (1, 2), "", {}),
                group=i,
                sample=0,
                token_ids=(5,) * n,
                logprobs=tuple(mu_BT[i, :n].tolist()),
                loss_mask=(True,) * n,
                finish_reason=REASONS[i],
                policy_version=int(VERSIONS[i]),
            ),
            reward=1.0,
        )
        for i, n in enumerate(lengths_B.tolist())
    ]
    path = tmp_path / "step_6.parquet"
    write_rollouts(path, scored, prox_logprobs_N=prox_N)
    direct = cut(prox_BT, mu_BT, mask_BT, version=6)
    slices = [one for slices in direct.values() for one in slices]
    assert recorded_breakdowns(load_recorded(path), policy_version=6) == slices
    # rows newer than the policy are not stale
    assert [one.label for one in direct["staleness"]] == ["0", "2"]
    write_rollouts(path, scored)
    assert recorded_breakdowns(load_recorded(path)) == []

    names = ["int8" if i % 2 else "none" for i in range(len(scored))]
    mixed = [
        replace(one, rollout=replace(one.rollout, format=name))
        for one, name in zip(scored, names, strict=True)
    ]
    write_rollouts(path, mixed, prox_logprobs_N=prox_N)
    parts = [one for one in recorded_breakdowns(load_recorded(path)) if one.by == "format"]
    assert [one.label for one in parts] == ["int8", "none"]
    assert sum(one.tokens for one in parts) == int(mask_BT.sum())

    share = Share.alone(collate(mixed))
    metrics = mismatch_by_format(prox_N, share)
    for part in parts:
        assert metrics[f"rollout_corr/{part.label}/k3_kl"] == pytest.approx(part.k3_kl)
        assert metrics[f"rollout_corr/{part.label}/logp_abs_diff_mean"] == pytest.approx(
            part.abs_diff
        )
    assert unknown(metrics) == []


def test_several_batches_are_pooled_as_one() -> None:
    """Rows of 1 to 40 tokens, in two unequal halves that do not hold the same labels."""
    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.tensor([1, 2, 3, 9, 12, 20, 33, 40])
    mask_BT = torch.arange(40)[None, :] < lengths_B[:, None]
    sampler_BT = -torch.rand(8, 40, generator=generator)
    prox_BT = sampler_BT + 0.1 * torch.randn(8, 40, generator=generator)
    versions_B = torch.tensor([0, 1, 2, 12, 3, 1, 2, 12])
    reasons = ["stop", "length"] * 4

    def cuts(rows: slice) -> list[Slice]:
        return breakdowns(
            prox_BT[rows].flatten(),
            batch_of(mask_BT[rows], sampler_BT[rows], versions_B=versions_B[rows]),
            finish_reasons=reasons[rows],
            policy_version=12,
        )

    whole = cuts(slice(0, 8))
    halves = pooled([*cuts(slice(3, 8)), *cuts(slice(0, 3))])
    assert [(part.by, part.label) for part in halves] == [(part.by, part.label) for part in whole]
    for one, other in zip(halves, whole, strict=True):
        assert asdict(one) == pytest.approx(asdict(other))


BY_TURN = ("first_turn", "middle_turns", "last_turn")
BY_PLACE = ("turn_start", "turn_end")
SAMPLED = [
    [3, 5],
    [4, 7, 6],
    [90, 2],
    [4, 2],
]


def sessions() -> list[Scored]:
    """Rows of tokens by turn, behind two of the environment's; the last two are one session's."""
    scored = []
    for row, turns in enumerate(SAMPLED):
        ids = [5, 5]
        mask = [0, 0]
        of_turn = [-1, -1]
        for turn, count in enumerate(turns, start=2 * (row // 3)):
            ids += [7] * count + [5] * 2
            mask += [1] * count + [0] * 2
            of_turn += [turn] * count + [-1] * 2
        session = Session(turns=tuple(SessionTurn() for _ in turns))
        one = rollout(
            ids,
            sample=min(row, 2),
            loss_mask=mask,
            turns=of_turn,
            session=session,
            row=row // 3,
        )
        scored.append(Scored(one, 1.0))
    return scored


def test_a_planted_mismatch_shows_in_its_turn_and_place_alone(
    tmp_path: Path,
) -> None:
    scored = sessions()
    batch = collate(scored)
    assert batch.turns_N is not None
    lengths_B = batch.response_lengths_B
    turns_BT = matrix(batch.turns_N.long(), lengths_B, -1)
    mask_BT = matrix(batch.mask_N, lengths_B)
    order_BT = torch.full_like(turns_BT, -1)
    for row, turns in enumerate(SAMPLED):
        for turn, count in enumerate(turns, start=2 * (row // 3)):
            order_BT[row, turns_BT[row] == turn] = torch.arange(count)
    # of the session: the third row's turns are followed by those of the fourth
    last_B = torch.tensor([1, 2, 3, 3])
    last_BT = turns_BT == last_B[:, None]
    ends_BT = mask_BT & ~torch.nn.functional.pad(mask_BT, (0, 1))[:, 1:]
    path = tmp_path / "step_1.parquet"
    for by, label, metric, where_BT in [
        ("turn", "0", "first_turn", turns_BT == 0),
        ("turn", "1", "middle_turns", (turns_BT == 1) & ~last_BT),
        ("turn", "2", "middle_turns", (turns_BT == 2) & ~last_BT),
        ("turn", "last", "last_turn", last_BT),
        ("place", "first", "turn_start", order_BT == 0),
        ("place", "5 to 16", None, (order_BT >= 4) & (order_BT < 16) & ~ends_BT),
        ("place", "65 on", None, (order_BT >= 64) & ~ends_BT),
        ("place", "last", "turn_end", ends_BT),
    ]:
        assert bool(where_BT.any()), label
        prox_N = batch.sampler_logprobs_N - 0.5 * flat_of(where_BT, lengths_B)
        write_rollouts(path, scored, prox_logprobs_N=prox_N)
        found = {one.label: one for one in recorded_breakdowns(load_recorded(path)) if one.by == by}
        assert {name for name, one in found.items() if one.abs_diff > 0} == {label}
        assert found[label].kl == pytest.approx(0.5)
        assert found[label].tokens == int(where_BT.sum())
        assert sum(one.tokens for one in found.values()) == int(mask_BT.sum())
        lines = [
            " ".join(line.split()) for line in session_table([load_recorded(path)]).splitlines()
        ]
        (row,) = [line for line in lines if line.startswith(f"{by} ") and "-5.00e-01" in line]
        assert row.startswith(f"{by} {label} ")

        metrics = mismatch_in_sessions(prox_N, Share.alone(batch))
        assert unknown(metrics) == []
        names = {"turn": BY_TURN, "place": BY_PLACE}[by]
        off = {name for name in names if metrics.get(f"rollout_corr/{name}/kl")}
        assert off == ({metric} if metric else set())
        if metric:
            part = (
                metrics[f"rollout_corr/{metric}/kl"]
                * metrics[f"rollout_corr/{metric}/token_fraction"]
            )
            assert part * int(mask_BT.sum()) == pytest.approx(0.5 * int(where_BT.sum()))


def test_single_answers_have_no_turns_to_cut_and_no_metrics_of_them(tmp_path: Path) -> None:
    alone = [
        replace(one, rollout=replace(one.rollout, turns=None, session=None)) for one in sessions()
    ]
    batch = collate(alone)
    path = tmp_path / "step_1.parquet"
    assert batch.turns_N is None
    share = Share.alone(batch)
    assert mismatch_in_sessions(batch.sampler_logprobs_N, share) == {}
    write_rollouts(path, alone, prox_logprobs_N=batch.sampler_logprobs_N)
    assert {one.by for one in recorded_breakdowns(load_recorded(path))} == {
        "position",
        "probability",
        "length",
        "staleness",
        "finish",
    }
    assert session_table([load_recorded(path)]) == ""
    (one, *_) = sessions()
    alike = replace(one.rollout, turns=[min(turn, 0) for turn in one.rollout.turns or ()])
    one_turn = Share.alone(collate([replace(one, rollout=alike)]))
    prox_N = one_turn.batch.sampler_logprobs_N
    assert {name.split("/")[1] for name in mismatch_in_sessions(prox_N, one_turn)} == {
        "turn_start",
        "turn_end",
    }


def test_labels_of_several_batches_keep_their_order() -> None:
    parts = [
        Slice(by, label, 1, 0.0, 0.0, 0.0, 1.0)
        for by in OF_SESSIONS
        for label in reversed(LABELS[by])
    ]
    assert [(one.by, one.label) for one in pooled(parts)] == [
        (by, label) for by in OF_SESSIONS for label in LABELS[by]
    ]
