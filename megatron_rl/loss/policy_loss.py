"""Policy loss of a micro-batch: a formula of `table.py`, reduced by counts of the whole batch.

With KL, entropy and metrics; and with rejection and weights, where only the update's own logprobs
complete them (no prox pass).

Every loss is a sum over tokens of (row coefficient) x (per-token loss), so that with `Totals` of
the whole batch the sum over micro-batches and data-parallel ranks is the loss of the whole batch,
and so is the sum of each metric. `mask_BT` selects the trained tokens; `denominator_mask_BT` those
that are counted in denominators.

Shape legend: B sequences (rows of a micro-batch), T response positions, P prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.batch import LossInputs
from megatron_rl.config.schema import (
    Anchor,
    CorrectionConfig,
    KlOn,
    KlTo,
    Level,
    LossConfig,
    Reduction,
)
from megatron_rl.loss.table import LOSSES
from megatron_rl.loss.terms import Terms, divergence
from megatron_rl.rollout_correction.correction import correct_micro_batch
from megatron_rl.rollout_correction.metrics import MASKED_FRACTION, token_sums
from megatron_rl.rollout_correction.ratio import LogRatio, bounded_exp, wide

__all__ = [
    "LossConfig",
    "LossInputs",
    "Totals",
    "count_totals",
    "policy_loss",
    "reduction_of",
    "seen_tokens",
]


@dataclass(frozen=True)
class Totals:
    """Counts of the global batch that reductions divide by."""

    tokens: int
    sequences: int  # rows with a counted token
    prompt_ids_P: Tensor  # ascending; prompts with a counted token
    prompt_tokens_P: Tensor
    horizon: int  # what seq_mean_token_sum_norm divides by
    measured: int  # tokens with a log-ratio, under `anchor: sampler`

    @property
    def prompts(self) -> int:
        return len(self.prompt_ids_P)

    def to(self, device: torch.device) -> Totals:
        return replace(
            self,
            prompt_ids_P=self.prompt_ids_P.to(device),
            prompt_tokens_P=self.prompt_tokens_P.to(device),
        )


def count_totals(
    denominator_mask_BT: Tensor,
    prompt_ids_B: Tensor,
    horizon: int,
    weights_BT: Tensor | None = None,
) -> Totals:
    """`weights_BT` of `anchor: sampler`, before the loss, are 0 where a token has no log-ratio."""
    counts_B = denominator_mask_BT.bool().sum(dim=1)
    filled_B = counts_B > 0
    prompt_ids_P, place_F = prompt_ids_B[filled_B].unique(return_inverse=True)
    prompt_tokens_P = torch.zeros(len(prompt_ids_P), dtype=torch.int64, device=counts_B.device)
    prompt_tokens_P.index_add_(0, place_F, counts_B[filled_B])
    tokens = int(counts_B.sum())
    if weights_BT is None:
        measured = tokens
    else:
        measured = int((weights_BT > 0).sum())
    return Totals(tokens, int(filled_B.sum()), prompt_ids_P, prompt_tokens_P, horizon, measured)


def reduction_of(config: LossConfig) -> Reduction:
    """The reduction in force: the loss's own where the config names none."""
    if config.reduction is not None:
        return Reduction(config.reduction)
    if LOSSES[config.name].per_row:
        return Reduction.seq_mean_token_mean
    return Reduction.token_mean


def policy_loss(
    inputs: LossInputs,
    config: LossConfig,
    totals: Totals | None = None,
    correction: CorrectionConfig | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of some rows and its metrics: 0-dim tensors, sums over rows that add up alike.

    Without `totals` these rows are the batch. `correction` is read where the policy's own logprobs
    complete it here: with another anchor than prox, or with none (the policy is its own).
    """
    if totals is None:
        counted_BT = inputs.denominator_mask_BT
        totals = count_totals(
            counted_BT, inputs.prompt_ids_B, _extent(counted_BT), inputs.weights_BT
        )
    mismatch: dict[str, Tensor] = {}
    if correction is not None and correction.anchor != Anchor.prox:
        inputs, mismatch = _anchored_to_sampler(inputs, config, correction, totals)
    elif inputs.anchor_logprobs_BT is None:
        inputs = _anchored_to_itself(inputs, correction)
    terms = _terms(inputs)
    logprobs_BT = terms.logprobs_BT
    mask_BT = terms.mask_BT
    scale_B = row_scale(inputs, reduction_of(config), totals).to(logprobs_BT.dtype)
    per_token_BT, clipped = LOSSES[config.name].formula(terms, config)

    loss = reduced(per_token_BT, mask_BT, scale_B)
    metrics = {"loss/policy": loss.detach()}
    for name, coefficient, term in _beside(inputs, config, logprobs_BT, mask_BT, scale_B):
        loss = loss + coefficient * term
        metrics[name] = term.detach()
    metrics["loss/total"] = loss.detach()
    return loss, metrics | mismatch | _token_metrics(
        terms, clipped, totals, not LOSSES[config.name].supervised
    )


def _terms(inputs: LossInputs) -> Terms:
    """Inputs of loss formulas: wide, detached but for the policy's logprobs, 0 outside the mask."""
    assert inputs.anchor_logprobs_BT is not None
    mask_BT = inputs.mask_BT.bool()
    logprobs_BT = wide(inputs.logprobs_BT.masked_fill(~mask_BT, 0.0))
    anchor_BT = inputs.anchor_logprobs_BT.detach().to(logprobs_BT.dtype).masked_fill(~mask_BT, 0.0)
    if inputs.selected_BT is not None:
        selected_BT = inputs.selected_BT.bool() & mask_BT
    else:
        selected_BT = None
    if inputs.advantages_BT is None:
        advantages_B1 = inputs.advantages_B[:, None]
    else:
        advantages_B1 = inputs.advantages_BT
    return Terms(
        logprobs_BT=logprobs_BT,
        anchor_BT=anchor_BT,
        advantages_B1=advantages_B1.detach().to(logprobs_BT.dtype),
        weights_BT=inputs.weights_BT.detach().to(logprobs_BT.dtype).masked_fill(~mask_BT, 0.0),
        mask_BT=mask_BT,
        selected_BT=selected_BT,
        turns_BT=inputs.turns_BT,
    )


def reduced(values_BT: Tensor, mask_BT: Tensor, scale_B: Tensor) -> Tensor:
    return (values_BT.masked_fill(~mask_BT, 0.0).sum(dim=1) * scale_B).sum()


def seen_tokens(config: LossConfig, mask_BT: Tensor, denominator_mask_BT: Tensor) -> Tensor:
    """bool [B, T]: tokens that some term of the loss looks at; the others need no forward pass."""
    beside = config.kl_coef != 0.0 or config.entropy_coef != 0.0
    if beside and config.kl_on == KlOn.counted:
        return mask_BT | denominator_mask_BT
    return mask_BT


def _beside(
    inputs: LossInputs, config: LossConfig, logprobs_BT: Tensor, mask_BT: Tensor, scale_B: Tensor
) -> Iterator[tuple[str, float, Tensor]]:
    """The KL penalty and the entropy: name, coefficient and value of each that is on."""
    seen_BT = seen_tokens(config, mask_BT, inputs.denominator_mask_BT.bool())
    if seen_BT is not mask_BT:
        # rejected tokens are seen where the policy has a number for them
        seen_BT = mask_BT | (seen_BT & inputs.logprobs_BT.isfinite())
        logprobs_BT = inputs.logprobs_BT.to(logprobs_BT.dtype).masked_fill(~seen_BT, 0.0)
    if config.kl_coef != 0.0:
        yield (
            "loss/kl",
            config.kl_coef,
            reduced(_penalty(inputs, config, logprobs_BT, seen_BT), seen_BT, scale_B),
        )
    if config.entropy_coef != 0.0:
        if inputs.entropy_BT is None:
            raise ValueError(
                f"loss.entropy_coef is {config.entropy_coef}, which needs the entropy; there is "
                "none"
            )
        yield (
            "loss/entropy",
            -config.entropy_coef,
            reduced(inputs.entropy_BT.to(logprobs_BT.dtype), seen_BT, scale_B),
        )


def _penalty(
    inputs: LossInputs, config: LossConfig, logprobs_BT: Tensor, seen_BT: Tensor
) -> Tensor:
    """The KL of each token: to the reference, or from the sampler or the anchor."""
    there = {
        KlTo.reference: inputs.ref_logprobs_BT,
        KlTo.sampler: inputs.sampler_logprobs_BT,
        KlTo.anchor: inputs.anchor_logprobs_BT,
    }
    other_BT = there[config.kl_to]
    if other_BT is None:
        raise ValueError(
            f"loss.kl_coef is {config.kl_coef}, which needs {config.kl_to} logprobs; there are none"
        )
    other_BT = other_BT.detach().to(logprobs_BT.dtype).masked_fill(~seen_BT, 0.0)
    if config.kl_to == KlTo.reference:
        plain_BT = divergence(config.kl_estimator, logprobs_BT, other_BT)
        if config.kl_cap is None:
            return plain_BT
        return _weighted(inputs, config.kl_cap, plain_BT, logprobs_BT, other_BT)
    # where nothing was reported there is nothing to be far from
    other_BT = torch.where(other_BT.isfinite(), other_BT, logprobs_BT.detach())
    return divergence(config.kl_estimator, other_BT, logprobs_BT)


def _weighted(
    inputs: LossInputs, cap: float, kl_BT: Tensor, logprobs_BT: Tensor, ref_BT: Tensor
) -> Tensor:
    """The value of an estimate, and the gradient of KL(pi || ref) itself: w (pi - ref) grad pi."""
    assert inputs.anchor_logprobs_BT is not None
    now_BT = logprobs_BT.detach()
    anchor_BT = inputs.anchor_logprobs_BT.detach().to(now_BT.dtype)
    weight_BT = bounded_exp((now_BT - anchor_BT).nan_to_num(0.0)).clamp(max=cap)
    return weight_BT * (kl_BT.detach() + (now_BT - ref_BT) * (logprobs_BT - now_BT))


@torch.no_grad()
def _token_metrics(
    terms: Terms, clipped: dict[str, Tensor], totals: Totals, against_anchor: bool
) -> dict[str, Tensor]:
    """Averages over the counted tokens of the global batch."""
    n = max(1, totals.tokens)
    found = {
        "loss/trained_fraction": terms.mask_BT.sum() / n,
        "loss/empty_microbatches": (~terms.mask_BT.any()).float(),
    }
    if against_anchor:
        found["loss/approx_kl"] = -terms.shift_BT.sum() / n
        found["loss/ratio_mean"] = (terms.ratio_BT * terms.mask_BT).sum() / n
    for name, where_BT in clipped.items():
        found[f"loss/{name}"] = (where_BT & terms.mask_BT).sum() / n
    return found


def over_trained(metrics: dict[str, float]) -> dict[str, float]:
    """The batch's metrics, with means that are of the tokens that rules in the loss have left."""
    trained = metrics.get("loss/trained_fraction") or 1.0
    return metrics | {
        name: metrics[name] / trained
        for name in ("loss/approx_kl", "loss/ratio_mean")
        if name in metrics
    }


def row_scale(inputs: LossInputs, reduction: Reduction, totals: Totals) -> Tensor:
    """Coefficient of each row's sum of token losses; 0 for a row without a counted token."""
    counts_B = inputs.denominator_mask_BT.bool().sum(dim=1)
    filled_B = (counts_B > 0).double()
    if reduction == Reduction.token_mean:
        return filled_B / max(1, totals.tokens)
    if reduction == Reduction.seq_mean_token_mean:
        return filled_B / counts_B.clamp(min=1) / max(1, totals.sequences)
    if reduction == Reduction.seq_mean_token_sum:
        return filled_B / max(1, totals.sequences)
    if reduction == Reduction.seq_mean_token_sum_norm:
        return filled_B / max(1, totals.sequences) / max(1, totals.horizon)
    if reduction == Reduction.prompt_mean:
        if totals.prompts == 0:
            return filled_B
        place_B = torch.searchsorted(totals.prompt_ids_P, inputs.prompt_ids_B.contiguous())
        tokens_B = totals.prompt_tokens_P[place_B.clamp(max=totals.prompts - 1)]
        return filled_B / tokens_B / totals.prompts
    raise ValueError(f"loss.reduction is {reduction!r}; one of {', '.join(Reduction)}")


def _extent(mask_BT: Tensor) -> int:
    """Columns up to the last counted one: what padding cannot change."""
    columns = mask_BT.any(dim=0).nonzero()
    if len(columns):
        return int(columns[-1]) + 1
    return 1


def _correct_now(
    inputs: LossInputs, prox_BT: Tensor, correction: CorrectionConfig
) -> tuple[LogRatio, Tensor, Tensor]:
    """Log-ratio, weights and mask by the update's own logprobs; denominators stay the batch's."""
    mask_BT = inputs.mask_BT.bool()
    turns_BT = inputs.turns_BT
    return correct_micro_batch(
        prox_BT, inputs.sampler_logprobs_BT, mask_BT, turns_BT, inputs.advantages_B, correction
    )


def _anchored_to_itself(inputs: LossInputs, correction: CorrectionConfig | None) -> LossInputs:
    """The only update on a batch begins where the anchor is. What it found is measured by those who
    see all rows.
    """
    inputs = replace(inputs, anchor_logprobs_BT=inputs.logprobs_BT.detach())
    if correction is None:
        return inputs
    _, weights_BT, mask_BT = _correct_now(inputs, inputs.logprobs_BT.detach(), correction)
    return replace(inputs, weights_BT=weights_BT, mask_BT=mask_BT)


def _anchored_to_sampler(
    inputs: LossInputs, config: LossConfig, correction: CorrectionConfig, totals: Totals
) -> tuple[LossInputs, dict[str, Tensor]]:
    """`anchor: sampler`: the ratio is pi over mu. `interpolated`: over a policy between the two,
    and that over mu.
    """
    by_sampler = correction.anchor == Anchor.sampler
    if by_sampler and correction.weight.level != Level.none and LOSSES[config.name].ratio:
        raise ValueError(
            f"correction.weight.level is {correction.weight.level} with correction.anchor sampler "
            f"and loss.name {config.name}, whose ratio already holds the mismatch; set "
            "correction.weight.level: none, or loss.name: reinforce"
        )
    current_BT = inputs.logprobs_BT.detach()
    sampler_BT = inputs.sampler_logprobs_BT
    ratio, weights_BT, mask_BT = _correct_now(inputs, current_BT, correction)
    # where the sampler reported nothing, and the policy says to go on, the ratio is 1
    anchor_BT = torch.where(torch.isfinite(sampler_BT), sampler_BT, current_BT.to(sampler_BT.dtype))
    # sums over these rows' tokens, divided so that those of micro-batches add up to means over the
    # batch
    mismatch = {name: total / max(1, totals.measured) for name, total in token_sums(ratio).items()}
    if not by_sampler:
        anchor_BT = _between(anchor_BT, current_BT, inputs.staleness_BT)
        ratio, weights_BT, mask_BT = _correct_now(inputs, anchor_BT, correction)
    mismatch[MASKED_FRACTION] = (ratio.stays_BT & ~mask_BT).sum() / max(1, totals.tokens)
    corrected = replace(
        inputs, anchor_logprobs_BT=anchor_BT, weights_BT=weights_BT, mask_BT=mask_BT
    )
    return corrected, mismatch


def _between(sampler_BT: Tensor, current_BT: Tensor, staleness_BT: Tensor | None) -> Tensor:
    """The policy before this update, taken to lie on a line of equal steps from the one that
    sampled the token.
    """
    if staleness_BT is None:
        raise ValueError(
            "correction.anchor is interpolated, which needs each token's staleness; there is none"
        )
    share_BT = staleness_BT / (staleness_BT + 1.0)
    return sampler_BT + share_BT * (current_BT - sampler_BT)
