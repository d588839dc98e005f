"""Log-ratio of each token, learner's logprob less the sampler's; treatment of non-finite values;
sums, means and extremes of token values by row, turn, segment or prefix.

Shape legend: N response tokens, B rows, U rows, turns, segments or, for prefixes, tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_rl.config.schema import Level, NonFinite
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.segments import Segments

EXPONENT_LIMIT = 20.0
SEGMENT_TOKENS = 64
SHARED_LEVELS = (Level.sequence, Level.turn, Level.segment)  # of which tokens share one value

# no logprobs of one token differ by this much, and its square still sums over a batch in float32
LARGEST_DIFFERENCE = 1e15


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp that can neither overflow nor reach zero."""
    return exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp_()


def ends_of(values: Tensor) -> tuple[float, float]:
    if values.numel() == 0:
        return 0.0, 0.0
    low, high = (float(end) for end in values.aminmax())
    return low, high


def wide(logprobs: Tensor) -> Tensor:
    """At least float32: a difference of two bfloat16 logprobs would be mostly rounding."""
    if logprobs.dtype in (torch.bfloat16, torch.float16):
        return logprobs.float()
    return logprobs


def as_float(mask: Tensor) -> Tensor:
    """Convert a bool mask to float32 by way of bytes, several times faster on CPUs."""
    return mask.view(torch.uint8).float()


@dataclass(frozen=True)
class LogRatio:
    """d = p - mu where there is a ratio to speak of, 0 elsewhere.

    Derived tensors are made once and kept, as rules, weights and metrics share them.
    """

    d_N: Tensor  # float32
    stays_N: Tensor  # bool: the response mask less what the non-finite policy dropped
    counted_N: Tensor  # bool: stays_N less tokens without a ratio (`non_finite: zero`)
    rows: Segments
    turns: Segments | None = None  # None: a row is one turn
    one_N: Tensor | None = None  # bool: tokens whose weight is 1 by `non_finite: one`
    sampler_faults: int | Tensor = 0
    learner_faults: int | Tensor = 0
    prox_logprobs_N: Tensor | None = None  # p, finite
    top: TopLogprobs | None = None  # None: not reported, or not read

    @cached_property
    def bounded_d_N(self) -> Tensor:
        return self.d_N.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)

    @cached_property
    def rho_N(self) -> Tensor:
        return self.bounded_d_N.exp()

    @cached_property
    def inverse_N(self) -> Tensor:
        return self.rho_N.reciprocal()

    @cached_property
    def prox_N(self) -> Tensor:
        """p, and 0 where there is no ratio."""
        assert self.prox_logprobs_N is not None
        return self.prox_logprobs_N.float() * self.counted_float_N

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Smallest and largest d, zeros of tokens without a ratio among them."""
        return ends_of(self.d_N)

    @cached_property
    def prob_N(self) -> Tensor:
        """The learner's probability, 0 without a ratio. Only the upper end needs a bound."""
        return self.prox_N.clamp(max=EXPONENT_LIMIT).exp_().mul_(self.counted_float_N)

    @cached_property
    def sampler_prob_N(self) -> Tensor:
        """The sampler's probability, from p and d; 0 without a ratio."""
        # rho is bounded, and not what lies between the two; on a GPU to compare would be to wait
        if self.d_N.is_cuda or max(-self.ends[0], self.ends[1]) > EXPONENT_LIMIT:
            sampler_N = (self.prox_N - self.d_N).clamp_(max=EXPONENT_LIMIT)
            return sampler_N.exp_().mul_(self.counted_float_N)
        return self.prob_N * self.inverse_N

    def probabilities(self) -> tuple[Tensor, Tensor]:
        """The learner's and the sampler's, for the caller to write to; frees their inputs."""
        found = self.prob_N, self.sampler_prob_N
        for name in ("prox_N", "inverse_N", "prob_N", "sampler_prob_N"):
            self.__dict__.pop(name, None)
        return found

    @cached_property
    def counted_float_N(self) -> Tensor:
        return as_float(self.counted_N)

    @cached_property
    def counts_B(self) -> Tensor:
        return self.rows.count(self.counted_N).float()

    @cached_property
    def sums_B(self) -> Tensor:
        return self.rows.sum(self.d_N)

    def segments(self, level: Level) -> Segments:
        """Rows, their segments, or the turns of sessions."""
        if level == Level.turn and self.turns is not None:
            return self.turns
        if level == Level.segment:
            return self._segments
        return self.rows

    @cached_property
    def _segments(self) -> Segments:
        """Each row cut after every SEGMENT_TOKENS tokens that stay; some of them empty."""
        rows = self.rows
        stays_N = self.stays_N.double()
        before_N = rows.running_sum(stays_N) - stays_N
        most_B = rows.lengths_R.div(SEGMENT_TOKENS, rounding_mode="floor") + 1
        first_N = rows.at_tokens(most_B.cumsum(0) - most_B)
        segment_N = first_N + before_N.div(SEGMENT_TOKENS, rounding_mode="floor").long()
        # no more than these: to count them would be to wait for a device
        count = rows.tokens // SEGMENT_TOKENS + rows.units
        lengths_U = torch.zeros(count, dtype=torch.int64, device=segment_N.device)
        lengths_U.index_add_(0, segment_N, torch.ones_like(segment_N))
        return Segments(lengths_U, rows.tokens, count)

    def sums(self, level: Level, values_N: Tensor) -> Tensor:
        """Sums of values, 0 at uncounted tokens, per row, turn or prefix."""
        if level == Level.prefix:
            return self.rows.running_sum(values_N)
        return self.segments(level).sum(values_N)

    def extremes(self, level: Level, values_N: Tensor, largest: bool) -> Tensor:
        """Per row, turn or prefix; infinite where no token counts."""
        values_N = values_N.masked_fill(~self.counted_N, -torch.inf if largest else torch.inf)
        if level == Level.prefix:
            return self.rows.running_extreme(values_N, largest)
        return self.segments(level).extreme(values_N, largest)

    def counts(self, level: Level) -> Tensor:
        if level == Level.prefix:
            return self.rows.running_sum(self.counted_float_N)
        if self.segments(level) is self.rows:
            return self.counts_B
        return self.segments(level).count(self.counted_N).float()

    def totals(self, level: Level) -> Tensor:
        """Sums of d."""
        if self.segments(level) is self.rows and level != Level.prefix:
            return self.sums_B
        return self.sums(level, self.d_N)

    def means(self, level: Level) -> Tensor:
        return self.totals(level) / self.counts(level).clamp(min=1.0)

    def at_tokens(self, level: Level, values: Tensor) -> Tensor:
        """Values per row, turn or prefix (or token) as one of each token."""
        if level in SHARED_LEVELS:
            return self.segments(level).at_tokens(values)
        return values

    def fix_weights_(self, weights_N: Tensor, kept_N: Tensor) -> None:
        """Tokens without a ratio get the weight that the non-finite policy names."""
        if self.one_N is not None:
            weights_N.masked_fill_(self.one_N & kept_N, 1.0)
        if self.counted_N is not self.stays_N:
            weights_N.masked_fill_(~self.counted_N, 0.0)


def difference(prox_logprobs_N: Tensor, sampler_logprobs_N: Tensor, out_N: Tensor) -> Tensor:
    return torch.sub(wide(prox_logprobs_N), wide(sampler_logprobs_N), out=out_N)


def log_ratio(
    prox_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    mask_N: Tensor,
    policy: NonFinite,
    rows: Segments,
    turns: Segments | None,
    out_N: Tensor,
) -> LogRatio:
    """The log-ratio of some rows, written to `out_N`."""
    difference(prox_logprobs_N, sampler_logprobs_N, out_N).mul_(as_float(mask_N))
    # NaN, infinities and absurd values survive a dot product: one cheap pass tells whether to look
    # closer
    if float(torch.dot(out_N, out_N)) < LARGEST_DIFFERENCE**2:
        return LogRatio(out_N, mask_N, mask_N, rows, turns, prox_logprobs_N=prox_logprobs_N)
    return exact_log_ratio(prox_logprobs_N, sampler_logprobs_N, mask_N, policy, rows, turns, out_N)


def exact_log_ratio(
    prox_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    mask_N: Tensor,
    policy: NonFinite,
    rows: Segments,
    turns: Segments | None,
    out_N: Tensor,
) -> LogRatio:
    """The log-ratio of rows that may hold anything. Never waits for a device."""
    d_N = difference(prox_logprobs_N, sampler_logprobs_N, out_N)
    sampler_N = mask_N & ~torch.isfinite(sampler_logprobs_N)
    # two finite logprobs too far apart for any sum of them form no ratio either
    usable_N = d_N.abs() < LARGEST_DIFFERENCE
    learner_N = mask_N & (~torch.isfinite(prox_logprobs_N) | (~sampler_N & ~usable_N))
    stays_N = mask_N & ~learner_N
    one_N = None
    counted_N = stays_N
    if policy == NonFinite.one:
        one_N = sampler_N & stays_N
    elif policy == NonFinite.zero:
        counted_N = stays_N & ~sampler_N
    elif policy == NonFinite.reject:
        faulty_B = rows.count(sampler_N) > 0
        counted_N = stays_N = stays_N & ~rows.at_tokens(faulty_B)
    else:
        counted_N = stays_N = stays_N & ~sampler_N
    d_N.masked_fill_(~stays_N | sampler_N, 0.0)
    return LogRatio(
        d_N,
        stays_N,
        counted_N,
        rows,
        turns,
        one_N,
        sampler_N.sum(),
        learner_N.sum(),
        prox_logprobs_N.float().nan_to_num(0.0, 0.0, 0.0),
    )
