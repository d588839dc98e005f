"""Chunked logprobs and entropy, among all or kept tokens, against torch's softmax in float64."""

from typing import Any

import pytest
import torch
from learner_cases import most_memory
from torch import Tensor

from megatron_rl.learner.modules import costs
from megatron_rl.learner.modules import logprobs as module
from megatron_rl.learner.modules.logprobs import VocabShare, highest, judged

VOCAB = 23
COLUMNS = 25
ROWS = 31
KEPT = 6
WHOLE = VocabShare.of(0, 1, VOCAB, COLUMNS, None)


def example(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels, and 1 to KEPT kept tokens of each, the label among them; column 0 is often
    none of them.
    """
    random = torch.Generator().manual_seed(seed)
    logits_NV = 4 * torch.randn(ROWS, COLUMNS, generator=random)
    kept_NK = torch.stack([torch.randperm(VOCAB, generator=random)[:KEPT] for _ in range(ROWS)])
    counts_N = torch.randint(1, KEPT + 1, (ROWS,), generator=random)
    kept_NK = torch.where(
        torch.arange(KEPT) < counts_N[:, None],
        kept_NK,
        -1,
    )
    place_N = (torch.rand(ROWS, generator=random) * counts_N).long()
    return logits_NV, kept_NK.gather(1, place_N[:, None]).squeeze(1), kept_NK


def logprobs_and_entropy(
    logits_NV: Tensor, labels_N: Tensor, *rest: Any, **more: Any
) -> tuple[Tensor, Tensor | None]:
    """Of the labels alone."""
    found_N1, entropy_N = module.logprobs_and_entropy(logits_NV, labels_N[:, None], *rest, **more)
    return found_N1.squeeze(1), entropy_N


def reference(
    logits_NV: Tensor, labels_N: Tensor, kept_NK: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    inside_NV = torch.ones(ROWS, VOCAB, dtype=torch.bool)
    if kept_NK is not None:
        inside_NV = torch.zeros(ROWS, VOCAB + 1, dtype=torch.bool).scatter_(
            1, kept_NK % (VOCAB + 1), True
        )[:, :VOCAB]
    scaled_NV = (logits_NV[:, :VOCAB].double() / temperature).masked_fill(~inside_NV, -torch.inf)
    logprobs_NV = scaled_NV.log_softmax(1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV.masked_fill(~inside_NV, 0.0)).sum(1)
    return logprobs_NV.gather(1, labels_N[:, None]).squeeze(1), entropy_N


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
@pytest.mark.parametrize("among_kept", [False, True])
def test_values_and_gradients(
    among_kept: bool, chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both outputs, and each alone. The logits stay unchanged, also at temperature 1 in FP32."""
    monkeypatch.setattr(costs, "HOST_BYTES", 4 * chunk)
    atol = 5e-5 if among_kept else 1e-5
    for seed in range(4):
        logits_NV, labels_N, kept_NK = example(seed)
        kept = kept_NK if among_kept else None
        of_logprob, of_entropy = torch.randn(
            2,
            ROWS,
            generator=torch.Generator().manual_seed(seed),
        )
        for scales in ((of_logprob, of_entropy), (of_logprob, None), (None, of_entropy)):
            mine = logits_NV.clone().requires_grad_()
            theirs = logits_NV.double().requires_grad_()
            found = logprobs_and_entropy(mine, labels_N, WHOLE, temperature, kept)
            wanted = reference(theirs, labels_N, kept, temperature)
            for here, there in zip(found, wanted, strict=True):
                torch.testing.assert_close(here.double(), there, rtol=1e-5, atol=atol)
            for values in (found, wanted):
                parts = zip(values, scales, strict=True)
                sum((value * scale).sum() for value, scale in parts if scale is not None).backward()
            torch.testing.assert_close(
                mine.grad.double(),
                theirs.grad,
                rtol=1e-4,
                atol=atol,
            )
            assert not mine.grad[:, VOCAB:].any()  # padding of the vocabulary never learns
            assert torch.equal(mine.detach(), logits_NV)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_entropy_the_logprobs_are_the_same(
    temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    combined = module.combined
    monkeypatch.setattr(
        module, "combined", lambda stats, *rest: asked.append(len(stats)) or combined(stats, *rest)
    )
    logits_NV, labels_N, _ = example()
    both = logits_NV.to(dtype).requires_grad_()
    alone = logits_NV.to(dtype).requires_grad_()
    wanted, _ = logprobs_and_entropy(both, labels_N, WHOLE, temperature)
    found, absent = logprobs_and_entropy(alone, labels_N, WHOLE, temperature, entropy=False)
    assert absent is None and torch.equal(found, wanted)
    for value in (wanted, found):
        (value * torch.linspace(-1, 1, ROWS)).sum().backward()
    assert torch.equal(alone.grad, both.grad)
    assert asked == [3, 2]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_copies_are_alive_than_the_plan_counts(
    temperature: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 640
    columns = 1000
    chunk = 64 * columns * costs.FP32
    monkeypatch.setattr(costs, "HOST_BYTES", chunk)
    logits = torch.randn(rows, columns).to(dtype).requires_grad_()
    labels = torch.zeros(rows, dtype=torch.int64)
    share = VocabShare.of(0, 1, columns, columns, None)
    logprobs_N, entropy_N = logprobs_and_entropy(logits, labels, share, temperature)
    forward = most_memory(lambda: logprobs_and_entropy(logits, labels, share, temperature))
    # the gradient itself
    backward = most_memory((logprobs_N + entropy_N).sum().backward) - logits.nbytes
    assert 1.5 * chunk < max(forward, backward) < (costs.COPIES + 0.1) * chunk


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("among_kept", [False, True])
def test_top_tokens_with_their_gradients(
    among_kept: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels, and top tokens: some are the label, some of a token are absent (-1)."""
    monkeypatch.setattr(costs, "HOST_BYTES", 4 * 40)
    for seed in range(4):
        logits_NV, labels_N, kept_NK = example(seed)
        random = torch.Generator().manual_seed(seed)
        if among_kept:
            top_NM = kept_NK.flip(1)[:, :5]
        else:
            top_NM = torch.stack([torch.randperm(VOCAB, generator=random)[:5] for _ in labels_N])
            top_NM[torch.rand(top_NM.shape, generator=random) < 0.3] = -1
        ids_NI = torch.cat((labels_N[:, None], top_NM), 1)
        of_ids_NI = torch.randn(ids_NI.shape, generator=random).masked_fill(ids_NI < 0, 0.0)
        kept = kept_NK if among_kept else None
        mine = logits_NV.clone().requires_grad_()
        theirs = logits_NV.double().requires_grad_()
        found_NI, _ = module.logprobs_and_entropy(mine, ids_NI, WHOLE, temperature, kept)
        each = [reference(theirs, ids_N.clamp(min=0), kept, temperature)[0] for ids_N in ids_NI.t()]
        wanted_NI = torch.stack(each, 1)
        there_NI = ids_NI >= 0
        torch.testing.assert_close(
            found_NI.double()[there_NI], wanted_NI[there_NI], rtol=1e-5, atol=5e-5
        )
        (found_NI * of_ids_NI).sum().backward()
        (wanted_NI[there_NI] * of_ids_NI[there_NI]).sum().backward()
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=5e-5)


def test_a_top_token_outside_the_support_has_no_probability() -> None:
    logits_NV, labels_N, kept_NK = example()
    other_N = torch.tensor([min({*range(VOCAB)} - {*row}) for row in kept_NK.tolist()])
    ids_NI = torch.stack((labels_N, other_N), 1)
    found_NI, _ = module.logprobs_and_entropy(logits_NV, ids_NI, WHOLE, 1.0, kept_NK)
    assert found_NI[:, 0].isfinite().all() and found_NI[:, 1].isneginf().all()


def test_shares_of_the_vocabulary_combine() -> None:
    """Combine the ranks' statistics without a process group; the last rank has padding only."""
    logits_NV, labels_N, _ = example()
    # of which the last has none: 23 tokens
    ranks = 4
    columns = 8
    wide = torch.nn.functional.pad(
        logits_NV,
        (0, ranks * columns - COLUMNS),
        value=50.0,
    )
    stats = []
    for rank in range(ranks):
        share = VocabShare.of(rank, ranks, VOCAB, columns, None)
        part = wide[:, columns * rank : columns * (rank + 1)][:, : share.real]
        stats.append(module._local_stats(part, *share.places(labels_N[:, None])))
    assert share.real == 0 and stats[-1][0].isneginf().all() and not stats[-1][1:].any()
    together = torch.stack(stats)
    found = together[:, 1].sum(0) - together[:, 0].logsumexp(0)
    torch.testing.assert_close(
        found.double(), reference(logits_NV, labels_N)[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("chunk", [40, 1 << 20])
@pytest.mark.parametrize(("k", "p"), [(1, 1.0), (5, 1.0), (5, 0.7), (VOCAB, 0.5)])
def test_truncation(k: int, p: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against an engine's filters: the k highest, then the first of them whose mass reaches p."""
    monkeypatch.setattr(costs, "HOST_BYTES", 4 * chunk)
    logits_NV, labels_N, kept_NK = example()
    logprobs_N, _ = logprobs_and_entropy(logits_NV, labels_N, WHOLE, 0.8, kept_NK)
    found = judged(highest(logits_NV, labels_N, WHOLE, 0.8, k), logprobs_N, None, p)
    scaled_NV = logits_NV[:, :VOCAB].double() / 0.8
    for row in range(ROWS):
        ranked = scaled_NV[row].argsort(descending=True)[:k]
        mass = scaled_NV[row][ranked].softmax(0)
        own = {
            int(token)
            for token, before in zip(ranked, mass.cumsum(0) - mass, strict=True)
            if before < p
        }
        assert bool(found.outside_N[row]) == (int(labels_N[row]) not in own)
    mass_N = torch.where(
        kept_NK >= 0, scaled_NV.softmax(1).gather(1, kept_NK.clamp(min=0)), 0.0
    ).sum(1)
    torch.testing.assert_close(
        found.log_mass_N.double(),
        mass_N.log(),
        rtol=1e-4,
        atol=1e-5,
    )
    assert 0 < found.outside_N.float().mean() < 1
