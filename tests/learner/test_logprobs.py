"""Chunked logprobs and entropy against torch's own softmax in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_rl.learner import logit_chunks
from megatron_rl.learner import logprobs as module
from megatron_rl.learner.logprobs import VocabShare, logprobs_alone, logprobs_and_entropy

VOCAB, COLUMNS, ROWS = 11, 13, 17


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(ROWS, COLUMNS, generator=random)
    labels = torch.randint(0, VOCAB, (ROWS,), generator=random)
    weights = torch.randn(2, ROWS, generator=random)
    return logits, labels, weights[0], weights[1]


def _reference(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = torch.log_softmax(logits[:, :VOCAB].double() / temperature, -1)
    return log_probs.gather(1, labels[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
def test_values_and_gradients(temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "HOST_BYTES", 4 * chunk)
    logits, labels, of_logprob, of_entropy = _inputs()
    mine, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = logprobs_and_entropy(mine, labels, VocabShare.of(0, 1, VOCAB, COLUMNS, None), temperature)
    wanted = _reference(theirs, labels, temperature)
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here.double(), there, rtol=1e-5, atol=1e-5)
    (found[0] * of_logprob + found[1] * of_entropy).sum().backward()
    (wanted[0] * of_logprob + wanted[1] * of_entropy).sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
    assert not mine.grad[:, VOCAB:].any()  # padding of the vocabulary never learns


def test_each_output_has_a_gradient_of_its_own() -> None:
    logits, labels, _, _ = _inputs()
    share = VocabShare.of(0, 1, VOCAB, COLUMNS, None)
    for which in (0, 1):
        mine, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
        logprobs_and_entropy(mine, labels, share)[which].sum().backward()
        _reference(theirs, labels, 1.0)[which].sum().backward()
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_entropy_the_logprobs_are_the_same(
    temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, combined = [], module.combined
    monkeypatch.setattr(module, "combined", lambda stats, group: asked.append(len(stats)) or combined(stats, group))
    logits, labels, of_logprob, _ = _inputs()
    share = VocabShare.of(0, 1, VOCAB, COLUMNS, None)
    both, alone = logits.to(dtype).requires_grad_(), logits.to(dtype).requires_grad_()
    wanted, _ = logprobs_and_entropy(both, labels, share, temperature)
    found = logprobs_alone(alone, labels, share, temperature)
    assert torch.equal(found, wanted)
    for value in (wanted, found):
        (value * of_logprob).sum().backward()
    assert torch.equal(alone.grad, both.grad)  # type: ignore[arg-type]
    assert asked == [3, 2]


def test_nothing_writes_to_the_logits() -> None:
    """At temperature 1 a chunk of FP32 logits is the logits themselves."""
    logits, labels, of_logprob, of_entropy = _inputs()
    mine = logits.clone().requires_grad_()
    logprobs_N, entropy_N = logprobs_and_entropy(mine, labels, VocabShare.of(0, 1, VOCAB, COLUMNS, None))
    (logprobs_N * of_logprob + entropy_N * of_entropy).sum().backward()
    assert torch.equal(mine.detach(), logits)


def test_chunks_hold_as_many_bytes_as_the_device_likes() -> None:
    share = VocabShare.of(0, 4, 151_936, 37_984, None)
    for device, nbytes in (("cpu", 4 << 20), ("meta", 64 << 20)):
        logits = torch.empty(4000, 37_984, dtype=torch.bfloat16, device="meta")
        if device == "cpu":
            logits = torch.empty(100, 37_984, dtype=torch.bfloat16)
        sizes = [chunk.numel() * chunk.element_size() for _, chunk in module.chunks(logits, share, 1.0)]
        assert nbytes - 4 * 37_984 < sizes[0] <= nbytes
        assert sum(sizes) == 2 * logits.numel() * logits.element_size()
    assert logit_chunks.chunk_rows(1 << 40, host=True) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_copies_are_alive_than_the_plan_counts(
    temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 640, 1000
    chunk = 64 * columns * logit_chunks.FP32
    monkeypatch.setattr(logit_chunks, "HOST_BYTES", chunk)
    logits = torch.randn(rows, columns).to(dtype).requires_grad_()
    labels, share = torch.zeros(rows, dtype=torch.int64), VocabShare.of(0, 1, columns, columns, None)
    logprobs_N, entropy_N = logprobs_and_entropy(logits, labels, share, temperature)
    forward = _most_memory(lambda: logprobs_and_entropy(logits, labels, share, temperature))
    backward = _most_memory((logprobs_N + entropy_N).sum().backward) - logits.nbytes  # the gradient itself
    assert 1.5 * chunk < max(forward, backward) < (logit_chunks.COPIES + 0.1) * chunk


def _most_memory(work: Callable[[], object]) -> int:
    """Bytes allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def test_bf16_logits_lose_nothing_more() -> None:
    """Only the logits are rounded: the arithmetic on them is FP32."""
    logits, labels, _, _ = _inputs()
    rounded = logits.bfloat16()
    found, _ = logprobs_and_entropy(rounded, labels, VocabShare.of(0, 1, VOCAB, COLUMNS, None))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), _reference(rounded, labels, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_shares_of_the_vocabulary_combine() -> None:
    """What each rank contributes, put together without a process group; the last rank holds padding only."""
    logits, labels, _, _ = _inputs()
    wide = torch.nn.functional.pad(logits, (0, 2), value=50.0)
    stats = []
    for rank in range(3):
        share = VocabShare.of(rank, 3, VOCAB, 5, None)
        local = labels - share.start
        held = (local >= 0) & (local < share.real)
        part = wide[:, 5 * rank : 5 * rank + 5][:, : share.real]
        stats.append(module._local_stats(part, torch.where(held, local, 0), held))
    together = torch.stack(stats)
    log_norm = together[:, 0].logsumexp(0)
    wanted = _reference(logits, labels, 1.0)
    torch.testing.assert_close((together[:, 1].sum(0) - log_norm).double(), wanted[0], rtol=1e-5, atol=1e-5)


def test_all_padding_shares_hold_no_probability() -> None:
    share = VocabShare.of(3, 4, VOCAB, 4, None)
    assert share.real == 0
    stats = module._local_stats(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
    assert stats[0].tolist() == [-torch.inf, -torch.inf]
    assert not stats[1:].any()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature: float) -> None:
    logits, labels, _, _ = _inputs()
    with pytest.raises(ValueError, match=r"rollout\.temperature"):
        logprobs_and_entropy(logits, labels, VocabShare.of(0, 1, VOCAB, COLUMNS, None), temperature)
