"""Parts of a batch that fit a core's cache, with their log-ratios.

Shape legend: N response tokens, B rows, E top tokens at all tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.batch import Batch
from megatron_rl.config.schema import CorrectionConfig
from megatron_rl.rollout_correction.ratio import LogRatio, log_ratio
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.segments import Segments

PART_TOKENS = 1 << 17  # that stay in a core's cache


@dataclass(frozen=True)
class Part:
    """Neighbouring rows."""

    rows: slice
    tokens: slice
    ratio: LogRatio


def parts_of(
    batch: Batch,
    prox_logprobs_N: Tensor | None,
    config: CorrectionConfig,
    d_N: Tensor,
    top_prox_E: Tensor | None = None,
) -> Iterator[Part]:
    """Parts of a batch with their log-ratios, written to `d_N`. One of them at least."""
    top_ends = None
    if top_prox_E is not None:
        top_ends = batch.top_sizes_B.cumsum(0)
    top_start = 0
    lengths = batch.response_lengths_B
    ends = lengths.cumsum(0)
    first = start = 0
    while True:
        last = int(torch.searchsorted(ends, start + PART_TOKENS, right=True))
        last = min(max(last, first + 1), len(lengths))
        end = int(ends[last - 1]) if last else 0
        rows = slice(first, last)
        tokens = slice(start, end)
        segments = Segments.rows(lengths[rows], end - start)
        turns = None
        if batch.turns_N is not None:
            turns = Segments.turns(batch.turns_N[tokens], segments)
        sampler_N = batch.sampler_logprobs_N[tokens]
        if prox_logprobs_N is None:
            prox_N = torch.zeros_like(sampler_N)
        else:
            prox_N = prox_logprobs_N[tokens]
        ratio = log_ratio(
            prox_N, sampler_N, batch.mask_N[tokens], config.non_finite, segments, turns, d_N[tokens]
        )
        if top_ends is not None and top_prox_E is not None:
            top_end = int(top_ends[last - 1]) if last else 0
            entries = slice(top_start, top_end)
            assert batch.top_counts_N is not None and batch.top_logprobs_E is not None
            top = TopLogprobs.of(
                batch.top_counts_N[tokens], batch.top_logprobs_E[entries], top_prox_E[entries]
            )
            ratio = replace(ratio, top=top)
            top_start = top_end
        yield Part(rows, tokens, ratio)
        first = last
        start = end
        if last == len(lengths):
            return
