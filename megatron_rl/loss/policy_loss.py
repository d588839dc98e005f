"""Policy loss of a micro-batch: a formula of `table.py`, reduced by counts of the whole batch.

With KL, entropy and metrics; and with rejection and weights, where only the update's own logprobs
complete them (no prox pass).

Every loss is a sum over tokens of (row coefficient) x (per-token loss), so that with `Totals` of
the whole batch the sum over micro-batches and data-parallel ranks is the loss of the whole batch,
and so is the sum of each metric. `mask_N` selects the trained tokens; `denominator_mask_N` those
that are counted in denominators.

Shape legend: N response tokens, B rows of a micro-batch, G prompts, F rows with counted tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.batch import UpdateInputs
from megatron_rl.config.schema import (
    Anchor,
    CorrectionConfig,
    KlOn,
    KlTo,
    LossConfig,
    Reduction,
)
from megatron_rl.loss.centering import (
    CENTERED_FRACTION,
    OF_CENTERED,
    centering_term,
    drift_cosine,
)
from megatron_rl.loss.table import LOSSES
from megatron_rl.loss.terms import Terms, divergence
from megatron_rl.rollout_correction.correction import correct_micro_batch
from megatron_rl.rollout_correction.metrics import (
    MASKED_FRACTION,
    PREFIX,
    TOP_DIVERGENCES,
    divergences,
    token_sums,
)
from megatron_rl.rollout_correction.ratio import bounded_exp, wide
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.types import Metrics


@dataclass(frozen=True)
class Totals:
    """Counts of the global batch that reductions divide by."""

    tokens: int
    sequences: int  # rows with a counted token
    prompt_ids_G: Tensor  # ascending; prompts with a counted token
    prompt_tokens_G: Tensor
    horizon: int  # what seq_mean_token_sum_norm divides by
    measured: int  # tokens with a log-ratio, under `anchor: sampler`

    @property
    def prompts(self) -> int:
        return len(self.prompt_ids_G)

    def to(self, device: torch.device) -> "Totals":
        return replace(
            self,
            prompt_ids_G=self.prompt_ids_G.to(device),
            prompt_tokens_G=self.prompt_tokens_G.to(device),
        )


def count_totals(
    counts_B: Tensor, prompt_ids_B: Tensor, horizon: int, measured: int | None = None
) -> Totals:
    """`counts_B`: counted tokens of each row; `measured`: tokens with a log-ratio, if they differ."""
    filled_B = counts_B > 0
    prompt_ids_G, place_F = prompt_ids_B[filled_B].unique(return_inverse=True)
    prompt_tokens_G = torch.zeros(len(prompt_ids_G), dtype=torch.int64, device=counts_B.device)
    prompt_tokens_G.index_add_(0, place_F, counts_B[filled_B])
    tokens = int(counts_B.sum())
    if measured is None:
        measured = tokens
    return Totals(tokens, int(filled_B.sum()), prompt_ids_G, prompt_tokens_G, horizon, measured)


def reduction_of(config: LossConfig) -> Reduction:
    """The reduction in force: the loss's own where the config names none."""
    if config.reduction is not None:
        return Reduction(config.reduction)
    if LOSSES[config.name].per_row:
        return Reduction.seq_mean_token_mean
    return Reduction.token_mean


def policy_loss(
    logprobs_N: Tensor,
    targets: UpdateInputs,
    config: LossConfig,
    totals: Totals,
    correction: CorrectionConfig | None = None,
    entropy_N: Tensor | None = None,
    top_logprobs_E: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of some rows and its metrics: 0-dim tensors, sums over rows that add up alike.

    `logprobs_N`, `top_logprobs_E`: the policy's own, which carry the gradient, of the response
    tokens and of the top tokens. `correction` is read where they complete it here: with another
    anchor than prox, or with none (the policy is its own).
    """
    top = _top(targets, top_logprobs_E)
    targets, top, mismatch = _anchored(logprobs_N.detach(), targets, correction, totals, top)
    terms = _terms(logprobs_N, targets)
    mask_N = terms.mask_N
    scale_B = row_scale(targets, reduction_of(config), totals).to(terms.logprobs_N.dtype)
    scale_N = targets.responses.at_tokens(scale_B)
    per_token_N, clipped = LOSSES[config.name].formula(terms, config)

    loss = reduced(per_token_N, mask_N, scale_N)
    metrics = {"loss/policy": loss.detach()}
    if top is not None and top_logprobs_E is not None and targets.top_weights_E is not None:
        centering, of_center = centering_term(
            top_logprobs_E, top, targets, terms.advantages_N, scale_N, config, totals.tokens
        )
        loss = loss + centering
        metrics |= of_center
    seen_N = seen_tokens(config, mask_N, targets.denominator_mask_N)
    if seen_N is mask_N:
        seen_logprobs_N = terms.logprobs_N
    else:
        # rejected tokens are seen where the policy has a number for them
        seen_N = mask_N | (seen_N & logprobs_N.isfinite())
        seen_logprobs_N = logprobs_N.to(terms.logprobs_N.dtype).masked_fill(~seen_N, 0.0)
    if config.kl_coef != 0.0:
        penalty_N = _penalty(targets, config, seen_logprobs_N, seen_N)
        penalty = reduced(penalty_N, seen_N, scale_N)
        loss = loss + config.kl_coef * penalty
        metrics["loss/kl"] = penalty.detach()
    if config.entropy_coef != 0.0:
        assert entropy_N is not None
        entropy = reduced(entropy_N.to(seen_logprobs_N.dtype), seen_N, scale_N)
        loss = loss - config.entropy_coef * entropy
        metrics["loss/entropy"] = entropy.detach()
    metrics["loss/total"] = loss.detach()
    return loss, metrics | mismatch | _token_metrics(
        terms, clipped, totals, not LOSSES[config.name].supervised
    )


def _top(targets: UpdateInputs, top_logprobs_E: Tensor | None) -> TopLogprobs | None:
    """Top tokens with the learner's logprobs before the update."""
    if top_logprobs_E is None:
        return None
    assert targets.top_counts_N is not None and targets.top_logprobs_E is not None
    before_E = targets.top_anchor_E
    if before_E is None:
        before_E = top_logprobs_E
    return TopLogprobs.of(targets.top_counts_N, targets.top_logprobs_E, before_E)


def _divergences(top: TopLogprobs, mask_N: Tensor, totals: Totals) -> dict[str, Tensor]:
    sums = divergences(top, mask_N)
    return {PREFIX + name: sums[name] / max(1, totals.measured) for name in TOP_DIVERGENCES}


def _terms(logprobs_N: Tensor, targets: UpdateInputs) -> Terms:
    """Inputs of loss formulas: wide, detached but for the policy's logprobs, 0 outside the mask."""
    assert targets.anchor_logprobs_N is not None
    mask_N = targets.mask_N
    logprobs_N = wide(logprobs_N.masked_fill(~mask_N, 0.0))
    kind = logprobs_N.dtype
    selected_N = targets.selected_N
    advantages_N = targets.advantages_N
    if advantages_N is None:
        advantages_N = targets.responses.at_tokens(targets.advantages_B.detach())
    return Terms(
        logprobs_N=logprobs_N,
        anchor_N=targets.anchor_logprobs_N.detach().to(kind).masked_fill(~mask_N, 0.0),
        advantages_N=advantages_N.detach().to(kind),
        weights_N=targets.weights_N.detach().to(kind).masked_fill(~mask_N, 0.0),
        mask_N=mask_N,
        selected_N=None if selected_N is None else selected_N & mask_N,
        rows=targets.responses,
        turns=targets.turns,
    )


def reduced(values_N: Tensor, mask_N: Tensor, scale_N: Tensor) -> Tensor:
    return (values_N.masked_fill(~mask_N, 0.0) * scale_N).sum()


def seen_tokens(config: LossConfig, mask_N: Tensor, denominator_mask_N: Tensor) -> Tensor:
    """bool [N]: tokens that some term of the loss looks at; the others need no forward pass."""
    beside = config.kl_coef != 0.0 or config.entropy_coef != 0.0
    if beside and config.kl_on == KlOn.counted:
        return mask_N | denominator_mask_N
    return mask_N


def read_tokens(config: LossConfig, targets: UpdateInputs) -> Tensor:
    """bool [N]: `seen_tokens`, and rejected ones that may be centered."""
    seen_N = seen_tokens(config, targets.mask_N, targets.denominator_mask_N)
    if targets.top_weights_E is None:
        return seen_N
    return seen_N | targets.denominator_mask_N


def _penalty(
    targets: UpdateInputs, config: LossConfig, logprobs_N: Tensor, seen_N: Tensor
) -> Tensor:
    """The KL of each token: to the reference, or from the sampler or the anchor."""
    there = {
        KlTo.reference: targets.ref_logprobs_N,
        KlTo.sampler: targets.sampler_logprobs_N,
        KlTo.anchor: targets.anchor_logprobs_N,
    }
    other_N = there[config.kl_to]
    assert other_N is not None
    other_N = other_N.detach().to(logprobs_N.dtype).masked_fill(~seen_N, 0.0)
    if config.kl_to == KlTo.reference:
        plain_N = divergence(config.kl_estimator, logprobs_N, other_N)
        if config.kl_cap is None:
            return plain_N
        return _weighted(targets, config.kl_cap, plain_N, logprobs_N, other_N)
    # where nothing was reported there is nothing to be far from
    other_N = torch.where(other_N.isfinite(), other_N, logprobs_N.detach())
    return divergence(config.kl_estimator, other_N, logprobs_N)


def _weighted(
    targets: UpdateInputs, cap: float, kl_N: Tensor, logprobs_N: Tensor, ref_N: Tensor
) -> Tensor:
    """The value of an estimate, and the gradient of KL(pi || ref) itself: w (pi - ref) grad pi."""
    assert targets.anchor_logprobs_N is not None
    now_N = logprobs_N.detach()
    anchor_N = targets.anchor_logprobs_N.detach().to(now_N.dtype)
    weight_N = bounded_exp((now_N - anchor_N).nan_to_num(0.0)).clamp(max=cap)
    return weight_N * (kl_N.detach() + (now_N - ref_N) * (logprobs_N - now_N))


@torch.no_grad()
def _token_metrics(
    terms: Terms, clipped: dict[str, Tensor], totals: Totals, against_anchor: bool
) -> dict[str, Tensor]:
    """Averages over the counted tokens of the global batch."""
    n = max(1, totals.tokens)
    found = {
        "loss/trained_fraction": terms.mask_N.sum() / n,
        "loss/empty_microbatches": (~terms.mask_N.any()).float(),
    }
    if against_anchor:
        found["loss/approx_kl"] = -terms.shift_N.sum() / n
        found["loss/ratio_mean"] = (terms.ratio_N * terms.mask_N).sum() / n
    for name, where_N in clipped.items():
        found[f"loss/{name}"] = (where_N & terms.mask_N).sum() / n
    return found


def over_trained(metrics: Metrics) -> Metrics:
    """The batch's metrics, with means that are of the tokens that rules in the loss have left, or
    that are centered.
    """
    found = drift_cosine(metrics)
    for names, fraction in (
        (("loss/approx_kl", "loss/ratio_mean"), "loss/trained_fraction"),
        (OF_CENTERED, CENTERED_FRACTION),
    ):
        tokens = metrics.get(fraction) or 1.0
        found |= {name: metrics[name] / tokens for name in names if name in metrics}
    return found


def row_scale(targets: UpdateInputs, reduction: Reduction, totals: Totals) -> Tensor:
    """Coefficient of each row's sum of token losses; 0 for a row without a counted token."""
    counts_B = targets.responses.count(targets.denominator_mask_N)
    filled_B = (counts_B > 0).double()
    if reduction == Reduction.token_mean:
        return filled_B / max(1, totals.tokens)
    if reduction == Reduction.seq_mean_token_mean:
        return filled_B / counts_B.clamp(min=1) / max(1, totals.sequences)
    if reduction == Reduction.seq_mean_token_sum:
        return filled_B / max(1, totals.sequences)
    if reduction == Reduction.seq_mean_token_sum_norm:
        return filled_B / max(1, totals.sequences) / max(1, totals.horizon)
    # the prompts' mean
    if totals.prompts == 0:
        return filled_B
    place_B = torch.searchsorted(totals.prompt_ids_G, targets.groups_B)
    tokens_B = totals.prompt_tokens_G[place_B.clamp(max=totals.prompts - 1)]
    return filled_B / tokens_B / totals.prompts


def _anchored(
    now_N: Tensor,
    targets: UpdateInputs,
    correction: CorrectionConfig | None,
    totals: Totals,
    top: TopLogprobs | None,
) -> tuple[UpdateInputs, TopLogprobs | None, dict[str, Tensor]]:
    """Inputs with an anchor, weights and masks; top tokens with that anchor; metrics of what is
    completed here.
    """
    mismatch: dict[str, Tensor] = {}
    if top is not None and targets.top_anchor_E is None:
        mismatch = _divergences(top, targets.mask_N, totals)
    if correction is not None and correction.anchor != Anchor.prox:
        targets, of_tokens = _anchored_to_sampler(now_N, targets, correction, totals, top)
        if top is not None:
            top = replace(top, learner_E=top.sampler_E)
        return targets, top, mismatch | of_tokens
    if targets.anchor_logprobs_N is None:
        targets = _anchored_to_itself(now_N, targets, correction, top)
    return targets, top, mismatch


def _anchored_to_itself(
    now_N: Tensor,
    targets: UpdateInputs,
    correction: CorrectionConfig | None,
    top: TopLogprobs | None,
) -> UpdateInputs:
    """The only update on a batch begins where the anchor is. What it found is measured by those who
    see all rows.
    """
    targets = replace(targets, anchor_logprobs_N=now_N)
    if correction is None:
        return targets
    return correct_micro_batch(now_N, targets, correction, top)[1]


def _anchored_to_sampler(
    now_N: Tensor,
    targets: UpdateInputs,
    correction: CorrectionConfig,
    totals: Totals,
    top: TopLogprobs | None,
) -> tuple[UpdateInputs, dict[str, Tensor]]:
    """`anchor: sampler`: the ratio is pi over mu. `interpolated`: over a policy between the two,
    and that over mu.
    """
    sampler_N = targets.sampler_logprobs_N
    ratio, corrected = correct_micro_batch(now_N, targets, correction, top)
    # where the sampler reported nothing, and the policy says to go on, the ratio is 1
    anchor_N = torch.where(torch.isfinite(sampler_N), sampler_N, now_N.to(sampler_N.dtype))
    # sums over these rows' tokens, divided so that those of micro-batches add up to means over the
    # batch
    mismatch = {name: total / max(1, totals.measured) for name, total in token_sums(ratio).items()}
    if correction.anchor == Anchor.interpolated:
        assert targets.staleness_N is not None
        # before this update, on a line of equal steps from the policy that sampled the token
        share_N = targets.staleness_N / (targets.staleness_N + 1.0)
        anchor_N = anchor_N + share_N * (now_N - anchor_N)
        ratio, corrected = correct_micro_batch(anchor_N, targets, correction, top)
    rejected_N = ratio.stays_N & ~corrected.mask_N
    mismatch[MASKED_FRACTION] = rejected_N.sum() / max(1, totals.tokens)
    return replace(corrected, anchor_logprobs_N=anchor_N), mismatch
