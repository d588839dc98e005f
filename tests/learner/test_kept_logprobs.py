"""Logprobs among the kept tokens against torch's own softmax in float64, with everything else masked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_rl.learner import logit_chunks
from megatron_rl.learner.kept_logprobs import kept_logprobs_and_entropy, truncation
from megatron_rl.learner.logprobs import VocabShare, logprobs_and_entropy

VOCAB, COLUMNS, ROWS, KEPT = 23, 25, 31, 6
WHOLE = VocabShare.of(0, 1, VOCAB, COLUMNS, None)


def example(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels, and 1 to KEPT kept tokens of each, the label among them; column 0 is often none of them."""
    random = torch.Generator().manual_seed(seed)
    logits_NV = 4 * torch.randn(ROWS, COLUMNS, generator=random)
    kept_NK = torch.stack([torch.randperm(VOCAB, generator=random)[:KEPT] for _ in range(ROWS)])
    counts_N = torch.randint(1, KEPT + 1, (ROWS,), generator=random)
    kept_NK = torch.where(torch.arange(KEPT) < counts_N[:, None], kept_NK, -1)
    place_N = (torch.rand(ROWS, generator=random) * counts_N).long()
    return logits_NV, kept_NK.gather(1, place_N[:, None]).squeeze(1), kept_NK


def reference(logits_NV: Tensor, labels_N: Tensor, kept_NK: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    inside_NV = torch.zeros(ROWS, VOCAB + 1, dtype=torch.bool).scatter_(1, kept_NK % (VOCAB + 1), True)[:, :VOCAB]
    scaled_NV = (logits_NV[:, :VOCAB].double() / temperature).masked_fill(~inside_NV, -torch.inf)
    logprobs_NV = scaled_NV.log_softmax(1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV.masked_fill(~inside_NV, 0.0)).sum(1)
    return logprobs_NV.gather(1, labels_N[:, None]).squeeze(1), entropy_N


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients(temperature: float, seed: int) -> None:
    logits_NV, labels_N, kept_NK = example(seed)
    random = torch.Generator().manual_seed(seed)
    of_logprob, of_entropy = torch.randn(2, ROWS, generator=random)
    for scales in ((of_logprob, of_entropy), (of_logprob, None), (None, of_entropy)):
        mine, theirs = logits_NV.clone().requires_grad_(), logits_NV.double().requires_grad_()
        found = kept_logprobs_and_entropy(mine, labels_N, kept_NK, WHOLE, temperature)
        wanted = reference(theirs, labels_N, kept_NK, temperature)
        for here, there in zip(found, wanted, strict=True):
            torch.testing.assert_close(here.double(), there, rtol=1e-5, atol=5e-5)
        sum((value * scale).sum() for value, scale in zip(found, scales, strict=True) if scale is not None).backward()
        sum((value * scale).sum() for value, scale in zip(wanted, scales, strict=True) if scale is not None).backward()
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=5e-5)


def test_all_tokens_kept_is_the_plain_softmax() -> None:
    logits_NV, labels_N, _ = example()
    everything_NK = torch.arange(VOCAB).expand(ROWS, VOCAB)
    found = kept_logprobs_and_entropy(logits_NV, labels_N, everything_NK, WHOLE)
    for here, there in zip(found, logprobs_and_entropy(logits_NV, labels_N, WHOLE), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


def test_a_token_alone_is_certain_and_teaches_nothing() -> None:
    logits_NV, labels_N, _ = example()
    mine = logits_NV.clone().requires_grad_()
    logprobs_N, entropy_N = kept_logprobs_and_entropy(mine, labels_N, labels_N[:, None], WHOLE)
    (logprobs_N + entropy_N).sum().backward()
    assert not logprobs_N.any() and not entropy_N.any() and not mine.grad.any()


@pytest.mark.parametrize("chunk", [40, 1 << 20])
@pytest.mark.parametrize(("k", "p"), [(1, 1.0), (5, 1.0), (5, 0.7), (VOCAB, 0.5)])
def test_truncation(k: int, p: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the filters as an engine applies them: the k highest, of those the first whose mass reaches p."""
    monkeypatch.setattr(logit_chunks, "HOST_BYTES", 4 * chunk)
    logits_NV, labels_N, kept_NK = example()
    logprobs_N, _ = kept_logprobs_and_entropy(logits_NV, labels_N, kept_NK, WHOLE, 0.8)
    found = truncation(logits_NV, labels_N, logprobs_N, WHOLE, 0.8, k, p)
    scaled_NV = logits_NV[:, :VOCAB].double() / 0.8
    for row in range(ROWS):
        ranked = scaled_NV[row].argsort(descending=True)[:k]
        mass = scaled_NV[row][ranked].softmax(0)
        own = {int(token) for token, before in zip(ranked, mass.cumsum(0) - mass, strict=True) if before < p}
        assert bool(found.outside_N[row]) == (int(labels_N[row]) not in own)
    mass_N = torch.where(kept_NK >= 0, scaled_NV.softmax(1).gather(1, kept_NK.clamp(min=0)), 0.0).sum(1)
    torch.testing.assert_close(found.log_mass_N.double(), mass_N.log(), rtol=1e-4, atol=1e-5)
    assert 0 < found.outside_N.float().mean() < 1
