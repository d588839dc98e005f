"""Probe after a sync: healthy differences pass, a broken sync is stopped with its likely cause."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.batch import Batch
from megatron_rl.config.schema import Format, format_number
from megatron_rl.weight_sync.probe import Probe, SyncMismatch, check, check_formats, noise

B = 8
T = 32
VOCAB = 64
NOISE = 0.008


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


def test_budget_depends_on_the_format_and_can_be_set() -> None:
    run(logprobs() + 0.05)
    with pytest.raises(SyncMismatch, match=r"version 7 \(none\).*0\.05 nats") as refused:
        run(logprobs() + 0.05, format=Format.none)
    for way_out in ("as_sampler", "quantization.ignore", "head_precision", "sync.probe_budget"):
        assert way_out in str(refused.value)
    run(logprobs() + 0.05, format=Format.none, budget=0.06)
    with pytest.raises(SyncMismatch, match=r"0\.04 \(sync\.probe_budget\)"):
        run(logprobs() + 0.05, budget=0.04)


def test_int8_may_exceed_its_budget_up_to_its_end() -> None:
    beyond = logprobs() + 0.2
    result = run(beyond)
    assert result.mean_abs > result.budget
    with pytest.raises(SyncMismatch):
        run(logprobs() + 0.41)
    with pytest.raises(SyncMismatch):
        run(beyond, format=Format.fp8)
    with pytest.raises(SyncMismatch):
        run(beyond, budget=0.19)


def test_a_learner_that_rounds_as_the_format_bounds_the_difference() -> None:
    """Right samplers differ by 0.91 to 1.09 times `expected`, at any size of outliers."""
    for nats in (0.01, 2.0):
        run(logprobs() + nats, expected=nats / 1.05)
        run(logprobs() + nats, expected=nats, unexplained=0.04, format=Format.fp8)
    with pytest.raises(SyncMismatch, match=r"differs by 0\.12"):
        run(logprobs() + 0.2, expected=0.12)
    for nats, left in ((0.01, 0.05), (0.2, 0.15), (0.2, math.nan)):
        with pytest.raises(SyncMismatch, match=rf"by {left:.3g} from the sampler"):
            run(logprobs() + nats, expected=0.2, unexplained=left)
    run(logprobs() + 0.05, budget=0.06, expected=0.0, unexplained=1.0)


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
        check(logprobs(), logprobs(), torch.zeros(B, T, dtype=torch.bool), Format.none, about(1))


def half_off(nats: float, versions_B: torch.Tensor, **formats: torch.Tensor) -> Batch:
    """A batch whose second half is off by so much, with shorter responses."""
    zeros_B = torch.zeros(B, dtype=torch.long)
    sampler_BT = logprobs()
    sampler_BT[4:] += nats
    tokens_BS = zeros_B[:, None].expand(B, T)
    lengths_B = torch.tensor([T] * 4 + [T - 2] * 4)
    rows_B = zeros_B.float(), zeros_B, versions_B
    return Batch.of_matrices(tokens_BS, zeros_B, lengths_B, mask(), sampler_BT, *rows_B, **formats)


def test_only_rows_of_the_synced_version_count() -> None:
    batch = half_off(5, torch.tensor([2] * 4 + [1] * 4))
    assert check_formats(batch, logprobs(), [Format.none], about(2))["sync/probe_abs_diff"] == 0
    with pytest.raises(SyncMismatch):
        check_formats(batch, logprobs(), [Format.none], about(1))
    with pytest.raises(ValueError, match=r"version 3.*\[1, 2\]"):
        check_formats(batch, logprobs(), [Format.none], about(3))


def test_a_mixed_fleet_is_probed_format_by_format() -> None:
    formats_B = torch.tensor([format_number("none")] * 4 + [format_number("int8")] * 4)
    # within INT8's budget, beyond that of BF16
    batch = half_off(0.05, torch.zeros(B, dtype=torch.long), formats_B=formats_B)
    both = (Format.none, Format.int8)
    metrics = check_formats(batch, logprobs(), both, about(0))
    assert metrics["sync/probe_abs_diff/none"] == 0
    assert metrics["sync/probe_abs_diff/int8"] == pytest.approx(0.05, abs=1e-3)
    assert metrics["sync/probe_abs_diff"] == metrics["sync/probe_abs_diff/int8"]
    assert metrics["sync/probe_budget"] == 0.08
    with pytest.raises(SyncMismatch, match="none"):
        check_formats(replace(batch, formats_B=formats_B.flip(0)), logprobs(), both, about(0))
