"""The probe lets healthy differences pass and says what a broken sync looks like."""

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


def logprobs(seed: int = 0) -> torch.Tensor:
    return torch.log_softmax(
        torch.randn(B, T, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2, -1
    )[..., 0]


def mask() -> torch.Tensor:
    mask_BT = torch.ones(B, T, dtype=torch.bool)
    mask_BT[3, 10:] = False
    return mask_BT


NOISE = 0.008


def about(version: int) -> Probe:
    return Probe(version, VOCAB, tied=False, noise=NOISE)


def run(sampler_BT: torch.Tensor, learner_BT: torch.Tensor | None = None, **changes: object):
    format = Format(str(changes.pop("format", Format.int8)))
    probe = replace(Probe(7, VOCAB, tied=True, noise=NOISE), **changes)  # type: ignore[arg-type]
    return check(
        sampler_BT, logprobs() if learner_BT is None else learner_BT, mask(), format, probe
    )


def test_within_budget() -> None:
    sampler_BT = logprobs() + 0.05
    sampler_BT[3, 20] = math.nan  # outside the mask
    result = run(sampler_BT)
    assert result.ok
    assert result.mean_abs == pytest.approx(0.05, rel=1e-4)
    assert result.missing == 0
    assert result.mean == pytest.approx(-0.05, rel=1e-4)
    told = {
        "sync/probe_abs_diff": result.mean_abs,
        "sync/probe_diff": result.mean,
        "sync/probe_budget": 0.08,
    }
    assert result.metrics() == told
    sampler_BT[0, 0] = math.nan
    assert run(sampler_BT).missing == 1, "a few do not count"


def test_budget_depends_on_the_format_and_can_be_set() -> None:
    assert run(logprobs() + 0.05, format=Format.int8).ok
    pattern = r"policy version 7 \(none\).*0\.05 nats over 234 tokens, budget 0\.0"
    with pytest.raises(SyncMismatch, match=pattern) as said:
        run(logprobs() + 0.05, format=Format.none)
    told = str(said.value)
    origin = f"6 times the learner's noise of {NOISE}; BF16 weights in the sampler, a BF16 learner); largest"
    assert origin in told, "where it comes from"
    ways_out = (
        "as_sampler",
        "quantization.ignore",
        "head_precision",
        "`megatron-rl mismatch`",
        "sync.probe_budget",
    )
    assert all(way_out in told for way_out in ways_out), "what to try"
    assert run(logprobs() + 0.05, format=Format.none, budget=0.06).ok
    with pytest.raises(SyncMismatch, match=r"budget 0\.04 \(sync\.probe_budget\)"):
        run(logprobs() + 0.05, budget=0.04)


def test_between_the_budget_of_int8_and_its_end_the_run_goes_on_where_nothing_more_is_known() -> (
    None
):
    beyond = logprobs() + 0.2
    result = run(beyond)
    assert result.mean_abs > result.budget
    for ends in ({"sampler_BT": logprobs() + 0.41}, {"format": Format.fp8}, {"budget": 0.19}):
        with pytest.raises(SyncMismatch):
            run(**{"sampler_BT": beyond} | ends)
    some = beyond.clone()
    some[0, :9] = math.nan
    for known in ({}, {"expected": 0.2}, {"expected": 0.2, "unexplained": 0.0}):
        with pytest.raises(SyncMismatch, match="NaN"):
            run(some, **known)


def test_a_learner_that_rounds_as_the_format_does_knows_what_it_may_do() -> None:
    """`expected`: of right samplers 0.91 to 1.09 times the difference, at any size of outliers."""
    for nats in (0.01, 0.05, 0.2, 2.0):
        assert run(logprobs() + nats, expected=nats / 1.05).mean_abs == pytest.approx(
            nats, rel=1e-4
        )
        assert run(logprobs() + nats, expected=nats, unexplained=0.04, format=Format.fp8)
    with pytest.raises(
        SyncMismatch, match=r"the learner differs by 0\.12 from itself\. A moderate"
    ):
        run(logprobs() + 0.2, expected=0.12)
    for nats, left in ((0.01, 0.05), (0.2, 0.15), (0.2, math.nan)):
        with pytest.raises(
            SyncMismatch,
            match=rf"0\.2 from itself, by {left:.3g} from the sampler \(at most 0\.048",
        ):
            run(logprobs() + nats, expected=0.2, unexplained=left)
    assert run(logprobs() + 0.05, budget=0.06, expected=0.0, unexplained=1.0), (
        "nats that are set say it all"
    )


def test_the_noise_is_the_learner_s_own_and_no_sampler_raises_it() -> None:
    learner_BT = logprobs()
    assert noise(learner_BT, learner_BT + 0.01, mask()) == pytest.approx(0.01, rel=1e-4)
    assert math.isnan(noise(learner_BT, learner_BT * math.nan, mask()))
    with pytest.raises(SyncMismatch, match="budget nan"):
        run(learner_BT, noise=math.nan)


@pytest.mark.parametrize(
    ("sampler_BT", "diagnosis"),
    [
        (torch.full((B, T), -3.1), "constant whatever the token: the kernel state"),
        (torch.full((B, T), math.nan), "NaN: its quantized kernels were not rebuilt"),
        (
            -math.log(VOCAB) + 0.01 * torch.randn(B, T),
            "uniform guess: the output layer.*tied lm_head",
        ),
        (logprobs(seed=1) - 2, "Logits of another model: with tied embeddings, a lm_head"),
        (logprobs() + 0.5, "A moderate excess"),
    ],
)
def test_diagnoses(sampler_BT: torch.Tensor, diagnosis: str) -> None:
    with pytest.raises(SyncMismatch, match=diagnosis):
        run(sampler_BT)


def test_a_broken_learner_is_not_blamed_on_the_sampler() -> None:
    learner_BT = logprobs()
    learner_BT[1, 1] = -math.inf
    with pytest.raises(SyncMismatch, match="The learner's own logprobs are not finite"):
        run(logprobs(), learner_BT)


def test_empty_answers_are_not_a_pass() -> None:
    with pytest.raises(SyncMismatch, match="No tokens to compare"):
        check(logprobs(), logprobs(), torch.zeros(B, T, dtype=torch.bool), Format.none, about(1))


def half_off(nats: float, *more_B: torch.Tensor) -> Batch:
    """The second half of the sampler's logprobs is off by so much, and its responses are shorter."""
    zeros_B = torch.zeros(B, dtype=torch.long)
    sampler_BT = logprobs()
    sampler_BT[4:] += nats
    rows_B = zeros_B.float(), zeros_B, more_B[0]
    formats = {"formats_B": more_B[1]} if len(more_B) > 1 else {}
    tokens_BS = zeros_B[:, None].expand(B, T)
    lengths_B = torch.tensor([T] * 4 + [T - 2] * 4)
    return Batch.of_matrices(tokens_BS, zeros_B, lengths_B, mask(), sampler_BT, *rows_B, **formats)


def test_only_rows_of_the_synced_version_count() -> None:
    batch = half_off(5, torch.tensor([2] * 4 + [1] * 4))  # sampled by an older policy
    assert check_formats(batch, logprobs(), [Format.none], about(2))["sync/probe_abs_diff"] == 0
    with pytest.raises(SyncMismatch):
        check_formats(batch, logprobs(), [Format.none], about(1))
    with pytest.raises(ValueError, match=r"version 3, the batch holds versions \[1, 2\]"):
        check_formats(batch, logprobs(), [Format.none], about(3))


def test_a_mixed_fleet_is_probed_format_by_format() -> None:
    formats_B = torch.tensor([format_number("none")] * 4 + [format_number("int8")] * 4)
    # within INT8's budget, beyond that of BF16
    batch = half_off(0.05, torch.zeros(B, dtype=torch.long), formats_B)
    both = (Format.none, Format.int8)
    metrics = check_formats(batch, logprobs(), both, about(0))
    assert metrics["sync/probe_abs_diff/none"] == 0
    assert (
        metrics["sync/probe_abs_diff/int8"]
        == pytest.approx(0.05, abs=1e-3)
        == metrics["sync/probe_abs_diff"]
    )
    assert metrics["sync/probe_budget"] == 0.08
    with pytest.raises(SyncMismatch, match="\\(none\\)"):
        check_formats(replace(batch, formats_B=formats_B.flip(0)), logprobs(), both, about(0))
    assert "sync/probe_abs_diff/int8" not in check_formats(
        batch.rows(torch.arange(4)), logprobs()[:4], both, about(0)
    )
