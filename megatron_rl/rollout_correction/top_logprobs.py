"""Top tokens: the sampler's most likely tokens at the prefix of each sampled token, with logprobs of
both policies. The tail is the rest of the vocabulary, taken as one token.

Shape legend: N response tokens, E top tokens at all tokens, V top tokens, then tails: E + N.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_rl.segments import Segments

SMALLEST_MASS = 1e-6  # of a tail


@dataclass(frozen=True)
class TopLogprobs:
    """Logprobs of the top tokens, finite, and of the tails, by sampler and learner."""

    tokens: Segments  # the top tokens at each token as segments of E
    usable_N: Tensor  # bool: tokens with a top token, all of whose logprobs are finite
    sampler_E: Tensor
    learner_E: Tensor

    @classmethod
    def of(cls, counts_N: Tensor, sampler_E: Tensor, learner_E: Tensor) -> TopLogprobs:
        counts_N = counts_N.long()
        learner_E = learner_E.detach()
        tokens = Segments(counts_N, len(learner_E), len(counts_N))
        finite_E = sampler_E.isfinite() & learner_E.isfinite()
        usable_N = (counts_N > 0) & (tokens.count(finite_E) == counts_N)
        unusable_E = ~tokens.at_tokens(usable_N)
        # at least float32, as float16 logprobs are too coarse for differences
        kind = torch.promote_types(learner_E.dtype, torch.float32)
        return cls(
            tokens,
            usable_N,
            sampler_E.to(kind).masked_fill(unusable_E, 0.0),
            learner_E.to(kind).masked_fill(unusable_E, 0.0),
        )

    @cached_property
    def sampler_V(self) -> Tensor:
        return self.with_tails(self.sampler_E)

    @cached_property
    def learner_V(self) -> Tensor:
        return self.with_tails(self.learner_E)

    def mass(self, logprobs_E: Tensor) -> Tensor:
        """[N]: probability of the top tokens."""
        return self.tokens.sum(logprobs_E.clamp(max=0.0).exp())

    def with_tails(self, logprobs_E: Tensor) -> Tensor:
        """[V]: logprobs of the top tokens and of the tails, which have the rest of the mass."""
        tail_N = (1.0 - self.mass(logprobs_E)).clamp(min=SMALLEST_MASS)
        return torch.cat((logprobs_E, tail_N.log()))

    def at_all(self, values_N: Tensor) -> Tensor:
        """[V]: the value of each token at its top tokens and its tail."""
        return torch.cat((self.tokens.at_tokens(values_N), values_N))

    def split(self, values_V: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the top tokens and of the tails: [E], [N]."""
        top = self.tokens.tokens
        return values_V[:top], values_V[top:]

    @cached_property
    def kl_N(self) -> Tensor:
        """KL(q || p) over top tokens and tail, a lower bound of that over the vocabulary."""
        return self._kl(self.sampler_E, self.learner_E)

    @cached_property
    def reverse_kl_N(self) -> Tensor:
        """KL(p || q), bounded alike."""
        return self._kl(self.learner_E, self.sampler_E)

    @cached_property
    def total_variation_N(self) -> Tensor:
        """Half the sum of |p - q|, bounded alike."""
        gaps_N = self.tokens.sum((self.learner_E.exp() - self.sampler_E.exp()).abs())
        tails_N = (self.mass(self.learner_E) - self.mass(self.sampler_E)).abs()
        return ((gaps_N + tails_N) / 2).masked_fill(~self.usable_N, 0.0)

    def _kl(self, one_E: Tensor, other_E: Tensor) -> Tensor:
        inside_N = self.tokens.sum(one_E.exp() * (one_E - other_E))
        # with the first tail as it is and a floor of the second, it stays a lower bound
        tail_N = (1.0 - self.mass(one_E)).clamp(min=0.0)
        other_N = (1.0 - self.mass(other_E)).clamp(min=SMALLEST_MASS)
        kl_N = inside_N + torch.xlogy(tail_N, tail_N / other_N)
        return kl_N.masked_fill(~self.usable_N, 0.0)
