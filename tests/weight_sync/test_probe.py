"""Probe after a sync: healthy differences pass, a broken sync is stopped with its likely cause."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrices import batch_of, flat_of

from megatron_rl.batch import Batch
from megatron_rl.config.schema import Format, format_number
from megatron_rl.weight_sync.probe import Probe, SyncMismatch, check, check_formats, noise

B = 8
T = 32
VOCAB = 64
NOISE = 0.008
LENGTHS_B = torch.tensor([T] * 4 + [T - 2] * 4)


def logprobs(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn(B, T, VOCAB, generator=generator) * 2, -1)[..., 0]


def mask() -> torch.Tensor:
    mask_BT = torch.ones(B, T, dtype=torch.bool)
    mask_BT[3, 10:] = False
    return mask_BT


def about(version: int) -> Probe:
    return Probe(version, VOCAB, noise=NOISE)


def run(
    sampler_BT: torch.Tensor,
    learner_BT: torch.Tensor | None = None,
    format: Format = Format.int8,
    **changes: float,
):
    learner_BT = logprobs() if learner_BT is None else learner_BT
    return check(sampler_BT, learner_BT, mask(), format, replace(about(7), **changes))


def test_within_budget() -> None:
    sampler_BT = logprobs() + 0.05
    sampler_BT[3, 20] = math.nan  # outside the mask
    result = run(sampler_BT)
    assert result.missing == 0
    assert result.metrics() == {
        "sync/probe_abs_diff": pytest.approx(0.05, rel=1e-4),
        "sync/probe_diff": pytest.approx(-0.05, rel=1e-4),
        "sync/probe_budget": 0.08,
    }
    sampler_BT[0, 0] = math.nan
    assert run(sampler_BT).missing == 1


VERDICTS = [  # nats, how they are judged, whether the run goes on
    (0.05, {}, True),
    (0.05, {"format": Format.none}, False),
    (0.05, {"format": Format.none, "budget": 0.06}, True),
    (0.05, {"budget": 0.04}, False),
    # INT8 may exceed its budget, up to its end
    (0.2, {}, True),
    (0.41, {}, False),
    (0.2, {"format": Format.fp8}, False),
    (0.2, {"budget": 0.19}, False),
    # right samplers differ by 0.91 to 1.09 times `expected`, at any size of outliers
    (0.01, {"expected": 0.0095}, True),
    (2.0, {"expected": 1.905}, True),
    (2.0, {"expected": 2.0, "unexplained": 0.04, "format": Format.fp8}, True),
    (0.2, {"expected": 0.12}, False),
    (0.01, {"expected": 0.2, "unexplained": 0.05}, False),
    (0.2, {"expected": 0.2, "unexplained": 0.15}, False),
    (0.2, {"expected": 0.2, "unexplained": math.nan}, False),
    (0.05, {"budget": 0.06, "expected": 0.0, "unexplained": 1.0}, True),
]


@pytest.mark.parametrize(("nats", "how", "goes_on"), VERDICTS)
def test_which_differences_end_a_run(nats: float, how: dict[str, Any], goes_on: bool) -> None:
    with nullcontext() if goes_on else pytest.raises(SyncMismatch):
        run(logprobs() + nats, **how)


def test_an_error_names_the_keys_of_every_way_out() -> None:
    with pytest.raises(SyncMismatch, match=r"version 7 \(none\)") as refused:
        run(logprobs() + 0.05, format=Format.none)
    for hint in ("as_sampler", "quantization.ignore", "head_precision", "sync.probe_budget"):
        assert hint in str(refused.value)


def test_noise_is_the_learner_s_own() -> None:
    learner_BT = logprobs()
    assert noise(learner_BT, learner_BT + 0.01, mask()) == pytest.approx(0.01, rel=1e-4)
    assert math.isnan(noise(learner_BT, learner_BT * math.nan, mask()))
    with pytest.raises(SyncMismatch, match="budget nan"):
        run(learner_BT, noise=math.nan)


@pytest.mark.parametrize(
    ("sampler_BT", "cause"),
    [
        (torch.full((B, T), -3.1), "logprobs are constant"),
        (torch.full((B, T), math.nan), "sampler returns NaN"),
        (-math.log(VOCAB) + 0.01 * torch.randn(B, T), "uniform guess"),
        (logprobs(seed=1) - 2, "Logits of another model"),
        (logprobs() + 0.5, "moderate excess"),
    ],
)
def test_diagnoses(sampler_BT: torch.Tensor, cause: str) -> None:
    with pytest.raises(SyncMismatch, match=cause):
        run(sampler_BT)


def test_a_broken_learner_is_not_blamed_on_the_sampler() -> None:
    learner_BT = logprobs()
    learner_BT[1, 1] = -math.inf
    with pytest.raises(SyncMismatch, match="learner's own logprobs"):
        run(logprobs(), learner_BT)


def test_empty_answers_are_not_a_pass() -> None:
    with pytest.raises(SyncMismatch, match="No tokens"):
        check(
            logprobs(),
            logprobs(),
            torch.zeros(B, T, dtype=torch.bool),
            Format.none,
            about(1),
        )


def half_off(nats: float, versions_B: torch.Tensor, **formats: torch.Tensor) -> Batch:
    """A batch whose second half is off by so much, with shorter responses."""
    sampler_BT = logprobs()
    sampler_BT[4:] += nats
    return batch_of(
        mask(),
        sampler_BT,
        response_lengths_B=LENGTHS_B,
        mask_N=flat_of(mask(), LENGTHS_B),
        sampler_logprobs_N=flat_of(sampler_BT, LENGTHS_B),
        versions_B=versions_B,
        **formats,
    )


def test_only_rows_of_the_synced_version_count() -> None:
    batch = half_off(5, torch.tensor([2] * 4 + [1] * 4))
    learner_N = flat_of(logprobs(), LENGTHS_B)
    found = check_formats(batch, learner_N, [Format.none], about(2))
    assert found["sync/probe_abs_diff"] == 0
    with pytest.raises(SyncMismatch):
        check_formats(batch, learner_N, [Format.none], about(1))
    with pytest.raises(ValueError, match=r"version 3.*\[1, 2\]"):
        check_formats(batch, learner_N, [Format.none], about(3))


def test_a_mixed_fleet_is_probed_format_by_format() -> None:
    formats_B = torch.tensor([format_number("none")] * 4 + [format_number("int8")] * 4)
    # within INT8's budget, beyond that of BF16
    batch = half_off(0.05, torch.zeros(B, dtype=torch.long), formats_B=formats_B)
    both = (Format.none, Format.int8)
    learner_N = flat_of(logprobs(), LENGTHS_B)
    metrics = check_formats(batch, learner_N, both, about(0))
    assert metrics["sync/probe_abs_diff/none"] == 0
    assert metrics["sync/probe_abs_diff/int8"] == pytest.approx(0.05, abs=1e-3)
    assert metrics["sync/probe_abs_diff"] == metrics["sync/probe_abs_diff/int8"]
    assert metrics["sync/probe_budget"] == 0.08
    with pytest.raises(SyncMismatch, match="none"):
        check_formats(
            replace(batch, formats_B=formats_B.flip(0)),
            learner_N,
            both,
            about(0),
        )
