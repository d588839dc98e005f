"""Log-ratio of each token, learner's logprob less the sampler's; treatment of non-finite values;
sums, means and extremes of token values by row, turn or prefix; slices of a batch's rows.

Shape legend: B sequences, T response positions.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_rl.config.schema import Level, NonFinite
from megatron_rl.rollout_correction.turns import Turns

EXPONENT_LIMIT = 20.0

# no logprobs of one token differ by this much, and its square still sums over a batch in float32
LARGEST_DIFFERENCE = 1e15

# Rows are handled in slices that stay in a core's cache; a GPU prefers fewer, larger ones.
CHUNK_ELEMENTS_HOST = 1 << 17
CHUNK_ELEMENTS_CUDA = 1 << 22


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp that can neither overflow nor reach zero."""
    return exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp_()


def ends_of(values_BT: Tensor) -> tuple[float, float]:
    if values_BT.numel() == 0:
        return 0.0, 0.0
    low, high = (float(end) for end in values_BT.aminmax())
    return low, high


def row_chunks(like_BT: Tensor) -> Iterator[slice]:
    """Slices of rows; none where there is no column."""
    rows, columns = like_BT.shape
    if like_BT.is_cuda:
        elements = CHUNK_ELEMENTS_CUDA
    else:
        elements = CHUNK_ELEMENTS_HOST
    step = max(1, elements // max(1, columns))
    for start in range(0, rows if columns else 0, step):
        yield slice(start, min(start + step, rows))


def wide(logprobs: Tensor) -> Tensor:
    """At least float32: a difference of two bfloat16 logprobs would be mostly rounding."""
    if logprobs.dtype in (torch.bfloat16, torch.float16):
        return logprobs.float()
    return logprobs


def as_float(mask_BT: Tensor) -> Tensor:
    """Convert a bool mask to float32 by way of bytes, several times faster on CPUs."""
    return mask_BT.view(torch.uint8).float()


def filled(mask_BT: Tensor) -> Tensor:
    """bool [B]: rows with a token under the mask."""
    if mask_BT.shape[1] == 0:
        return mask_BT.any(dim=1)
    return mask_BT.view(torch.uint8).amax(dim=1).bool()


@dataclass(frozen=True)
class LogRatio:
    """d = p - mu where there is a ratio to speak of, 0 elsewhere.

    Derived tensors are made once and kept, as rules, weights and metrics share them.
    """

    d_BT: Tensor  # float32
    stays_BT: Tensor  # bool: the response mask less what the non-finite policy dropped
    counted_BT: Tensor  # bool: stays_BT less tokens without a ratio (`non_finite: zero`)
    one_BT: Tensor | None  # bool: tokens whose weight is 1 by `non_finite: one`
    sampler_faults: int | Tensor
    learner_faults: int | Tensor
    # int64: the turn of each token, -1: none; None: a row is one turn
    turns_BT: Tensor | None = None
    prox_logprobs_BT: Tensor | None = None  # p, finite

    @cached_property
    def bounded_d_BT(self) -> Tensor:
        return self.d_BT.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)

    @cached_property
    def rho_BT(self) -> Tensor:
        return self.bounded_d_BT.exp()

    @cached_property
    def inverse_BT(self) -> Tensor:
        return self.rho_BT.reciprocal()

    @cached_property
    def prox_BT(self) -> Tensor:
        """p, and 0 where there is no ratio."""
        assert self.prox_logprobs_BT is not None
        return self.prox_logprobs_BT.float() * self.counted_float_BT

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Smallest and largest d, zeros of tokens without a ratio among them."""
        return ends_of(self.d_BT)

    @cached_property
    def prob_BT(self) -> Tensor:
        """The learner's probability, 0 without a ratio. Only the upper end needs a bound."""
        return self.prox_BT.clamp(max=EXPONENT_LIMIT).exp_().mul_(self.counted_float_BT)

    @cached_property
    def sampler_prob_BT(self) -> Tensor:
        """From p and d, which are defined wherever p is."""
        # rho is bounded, and not what lies between the two; on a GPU to compare would be to wait
        if self.d_BT.is_cuda or max(-self.ends[0], self.ends[1]) > EXPONENT_LIMIT:
            return (
                (self.prox_BT - self.d_BT)
                .clamp_(max=EXPONENT_LIMIT)
                .exp_()
                .mul_(self.counted_float_BT)
            )
        return self.prob_BT * self.inverse_BT

    def probabilities(self) -> tuple[Tensor, Tensor]:
        """The learner's and the sampler's, for the caller to write to; frees their inputs."""
        found = self.prob_BT, self.sampler_prob_BT
        for name in ("prox_BT", "inverse_BT", "prob_BT", "sampler_prob_BT"):
            self.__dict__.pop(name, None)
        return found

    @cached_property
    def counted_float_BT(self) -> Tensor:
        return as_float(self.counted_BT)

    @cached_property
    def counts_B1(self) -> Tensor:
        return self.counted_float_BT.sum(dim=1, keepdim=True)

    @cached_property
    def counts_BK(self) -> Tensor:
        return self.sums(Level.turn, self.counted_float_BT)

    @property
    def stays_B1(self) -> Tensor:
        if self.stays_BT is self.counted_BT:
            return self.counts_B1
        return as_float(self.stays_BT).sum(dim=1, keepdim=True)

    @cached_property
    def sums_B1(self) -> Tensor:
        return self.d_BT.sum(dim=1, keepdim=True)

    @cached_property
    def turns(self) -> Turns | None:
        if self.turns_BT is None:
            return None
        return Turns.of(self.turns_BT)

    def sums(self, level: Level, values_BT: Tensor) -> Tensor:
        """Sums of values, 0 at uncounted tokens: [B, 1] per row, [B, K] turn or [B, T] prefix."""
        if level == Level.prefix:
            return values_BT.cumsum(dim=1)
        if level == Level.turn and self.turns is not None:
            return self.turns.sum(values_BT)
        return values_BT.sum(dim=1, keepdim=True)

    def extremes(self, level: Level, values_BT: Tensor, largest: bool) -> Tensor:
        """In the shapes of `sums`; infinite where no token counts."""
        fill = -math.inf if largest else math.inf
        values_BT = values_BT.masked_fill(~self.counted_BT, fill)
        if level == Level.prefix:
            return (values_BT.cummax(dim=1) if largest else values_BT.cummin(dim=1)).values
        if level == Level.turn and self.turns is not None:
            return self.turns.extreme(values_BT, fill, largest)
        if largest:
            return values_BT.amax(dim=1, keepdim=True)
        return values_BT.amin(dim=1, keepdim=True)

    def counts(self, level: Level) -> Tensor:
        if level == Level.prefix:
            return self.sums(level, self.counted_float_BT)
        if level == Level.turn:
            return self.counts_BK
        return self.counts_B1

    def totals(self, level: Level) -> Tensor:
        """Sums of d."""
        if level in (Level.turn, Level.prefix):
            return self.sums(level, self.d_BT)
        return self.sums_B1

    def means(self, level: Level) -> Tensor:
        return self.totals(level) / self.counts(level).clamp(min=1.0)

    def at_tokens(self, level: Level, values: Tensor) -> Tensor:
        """Results of `sums` and its kin in a shape that broadcasts to [B, T]."""
        if level == Level.turn and self.turns is not None:
            return self.turns.at_tokens(values)
        return values

    def fix_weights_(self, weights_BT: Tensor, kept_BT: Tensor) -> None:
        """Tokens without a ratio get the weight that the non-finite policy names."""
        if self.one_BT is not None:
            weights_BT.masked_fill_(self.one_BT & kept_BT, 1.0)
        if self.counted_BT is not self.stays_BT:
            weights_BT.masked_fill_(~self.counted_BT, 0.0)


def difference(prox_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, out_BT: Tensor) -> Tensor:
    return torch.sub(wide(prox_logprobs_BT), wide(sampler_logprobs_BT), out=out_BT)


def log_ratio(
    prox_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    policy: NonFinite,
    out_BT: Tensor,
    turns_BT: Tensor | None = None,
) -> LogRatio:
    """The log-ratio of some rows, written to `out_BT`."""
    difference(prox_logprobs_BT, sampler_logprobs_BT, out_BT).mul_(as_float(mask_BT))
    flat = out_BT.reshape(-1)
    # NaN, infinities and absurd values survive a dot product: one cheap pass tells whether to look
    # closer
    if float(torch.dot(flat, flat)) < LARGEST_DIFFERENCE**2:
        return LogRatio(out_BT, mask_BT, mask_BT, None, 0, 0, turns_BT, prox_logprobs_BT)
    return exact_log_ratio(prox_logprobs_BT, sampler_logprobs_BT, mask_BT, policy, out_BT, turns_BT)


def exact_log_ratio(
    prox_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    policy: NonFinite,
    out_BT: Tensor,
    turns_BT: Tensor | None = None,
) -> LogRatio:
    """The log-ratio of rows that may hold anything. Waits for the device if `policy` may raise."""
    difference(prox_logprobs_BT, sampler_logprobs_BT, out_BT)
    found = _without_faults(prox_logprobs_BT, sampler_logprobs_BT, mask_BT, policy, out_BT)
    return replace(
        found,
        turns_BT=turns_BT,
        prox_logprobs_BT=prox_logprobs_BT.float().nan_to_num(0.0, 0.0, 0.0),
    )


def _without_faults(
    prox_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    policy: NonFinite,
    d_BT: Tensor,
) -> LogRatio:
    sampler_BT = mask_BT & ~torch.isfinite(sampler_logprobs_BT)
    # two finite logprobs too far apart for any sum of them form no ratio either
    usable_BT = d_BT.abs() < LARGEST_DIFFERENCE
    learner_BT = mask_BT & (~torch.isfinite(prox_logprobs_BT) | (~sampler_BT & ~usable_BT))
    faults = sampler_BT.sum()
    if policy == NonFinite.raise_ and faults:
        row, column = (int(place) for place in sampler_BT.nonzero()[0])
        raise ValueError(
            f"the sampler's logprob is {float(sampler_logprobs_BT[row, column])} at position "
            f"{column} of a response, and {int(faults)} are NaN or infinite among these "
            f"{len(mask_BT)} rows; correction.non_finite: raise stops here, drop, one, zero or "
            "reject go on"
        )
    stays_BT = mask_BT & ~learner_BT
    one_BT = None
    counted_BT = stays_BT
    if policy == NonFinite.one:
        one_BT = sampler_BT & stays_BT
    elif policy == NonFinite.zero:
        counted_BT = stays_BT & ~sampler_BT
    elif policy == NonFinite.reject:
        counted_BT = stays_BT = stays_BT & ~sampler_BT.any(dim=1, keepdim=True)
    else:
        counted_BT = stays_BT = stays_BT & ~sampler_BT
    d_BT.masked_fill_(~stays_BT | sampler_BT, 0.0)
    return LogRatio(d_BT, stays_BT, counted_BT, one_BT, faults, learner_BT.sum())
