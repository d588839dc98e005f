"""Correction of a batch: from sampler's and learner's logprobs to importance weights, a mask and
metrics; from rewards to advantages; stale tokens cut. policy_loss.py calls it too, by micro-batch,
where it alone has the learner's logprobs.

The sampler that wrote a response (mu) and the learner that trains on it (p) disagree about every
token's probability. With d = p - mu and rho = exp(d), tokens without a ratio are dealt with
(`non_finite`), tokens and sequences rejected by rules on d (`reject`), the rest weighed (`weight`),
and the disagreement measured (`metrics`, under `rollout_corr/`).

Pure: the caller hands over the rows. They are worked on in slices that fit a core's cache; only
`budget`, `target_ess` and `normalize` look at all together, and need the global batch.
`docs/corrections.md` explains how to choose.

Shape legend: B sequences, T response positions (right-padded).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.advantage import session_advantages
from megatron_rl.batch import Batch
from megatron_rl.config.prox_pass import of_the_whole_batch
from megatron_rl.config.schema import AdvantageConfig, Anchor, CorrectionConfig, NonFinite, Stat
from megatron_rl.config.shape import sound
from megatron_rl.rollout_correction.batch import (
    BatchWork,
    Source,
    apply_weights,
    weigh_again,
    weight_quality,
)
from megatron_rl.rollout_correction.metrics import PREFIX
from megatron_rl.rollout_correction.ratio import (
    LogRatio,
    exact_log_ratio,
    filled,
    log_ratio,
    row_chunks,
)
from megatron_rl.rollout_correction.rules import violations
from megatron_rl.rollout_correction.weights import bound, raw_ratio


@dataclass(frozen=True)
class Correction:
    """`weights_BT` is 0 where `mask_BT` is false; reductions count `denominator_mask_BT`."""

    weights_BT: Tensor  # float32, detached
    mask_BT: Tensor  # bool: tokens that are trained on
    denominator_mask_BT: Tensor  # bool
    metrics: dict[str, float]
    # bool: rows that had a response token and lost all to the unconditional rules
    rejected_B: Tensor
    source: Source
    cap: float | None = None  # in force: weight.high, or the one that was solved for target_ess

    def baseline_keep_B(self, config: CorrectionConfig) -> Tensor:
        """Rows that count in their group's baseline: `keep_N` of `group_advantages`.

        With `rebaseline`, neither rows that rules rejected, nor those whose mask was empty before
        (truncated responses under reward.overlong_filter); later departures still count.
        """
        if config.rebaseline:
            return filled(self.source.mask_BT) & ~self.rejected_B
        return torch.ones_like(self.rejected_B)


def correct(
    anchor_logprobs_BT: Tensor | None,
    batch: Batch,
    config: CorrectionConfig,
    advantage: AdvantageConfig,
) -> tuple[Correction, Tensor]:
    """A batch's correction and its advantages, float32 [B].

    Correction first, so that rejected responses can leave their group's baseline; then the
    advantages; then the rules that read them. A response without a score is in neither the mask nor
    the baseline. Without an anchor the loss completes the correction (`completed`).
    """
    prox_BT = anchor_logprobs_BT if config.anchor == Anchor.prox else None
    correction = rollout_correction(
        prox_BT, batch.sampler_logprobs_BT, batch.mask_BT, config, batch.turns_BT
    )
    counted_B = correction.baseline_keep_B(config) & torch.isfinite(batch.rewards_B)
    advantages_B, keep_B = session_advantages(
        batch.rewards_B, batch.groups_B, batch.samples_B, counted_B, advantage
    )
    kept = keep_rows(correction, keep_B, config)
    return apply_conditional_rules(kept, advantages_B, config), advantages_B


def completed(
    correction: Correction,
    logprobs_BT: Tensor,
    batch: Batch,
    config: CorrectionConfig,
    advantage: AdvantageConfig,
) -> Correction:
    """Redo a correction, for its metrics, with the logprobs of the batch's only update.

    They are NaN in rows that the update skipped; those are not measured. Weights and masks are the
    ones that the loss has used.
    """
    seen_B1 = filled(correction.mask_BT)[:, None]
    if not seen_B1.any():
        return correction
    return correct(
        logprobs_BT, batch.with_matrices(mask_BT=batch.mask_BT & seen_B1), config, advantage
    )[0]


@torch.no_grad()
def rollout_correction(
    prox_logprobs_BT: Tensor | None,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    config: CorrectionConfig,
    turns_BT: Tensor | None = None,
) -> Correction:
    """Weights, mask and metrics of the global batch or the loss's rows; without turns a row is one.

    Where there are no proximal logprobs before the loss (`anchor: sampler`, or one update for the
    batch) pass None, and give `config` to `policy_loss`, which finishes the correction from the
    policy's own logprobs.
    """
    source = Source(prox_logprobs_BT, sampler_logprobs_BT, mask_BT.bool(), turns_BT)
    _check(source, config)
    if prox_logprobs_BT is None:
        return _without_prox(source, config)
    work = BatchWork(source, config)
    for rows in row_chunks(source.mask_BT):
        work.observe(rows)
        if not work.needs_all_rows:
            work.weigh(rows)
    if work.needs_all_rows:
        work.apply_budgets()
        work.solve_target()
        for rows in row_chunks(source.mask_BT):
            work.weigh(rows)
    metrics = work.finish()
    # a copy, in memory that is free by now: the mask and the denominators are narrowed one without
    # the other
    if config.renormalize:
        denominator_BT = work.stays_BT.copy_(work.kept_BT)
    else:
        denominator_BT = work.stays_BT
    rejected_B = filled(source.mask_BT) & ~filled(work.kept_BT)
    return Correction(
        work.weights_BT, work.kept_BT, denominator_BT, metrics, rejected_B, source, work.cap
    )


@torch.no_grad()
def correct_micro_batch(
    prox_BT: Tensor,
    sampler_BT: Tensor,
    mask_BT: Tensor,
    turns_BT: Tensor | None,
    advantages_B: Tensor,
    config: CorrectionConfig,
) -> tuple[LogRatio, Tensor, Tensor]:
    """Log-ratio, weights and mask of rows whose learner logprobs the loss alone knows. Never waits
    for a device.
    """
    # faults of the sampler that are to raise have done so before the update: see `_without_prox`
    if config.non_finite == NonFinite.raise_:
        policy = NonFinite.drop
    else:
        policy = config.non_finite
    weights_BT = torch.empty_like(mask_BT, dtype=torch.float32)
    ratio = exact_log_ratio(
        prox_BT, sampler_BT, mask_BT, policy, torch.empty_like(weights_BT), turns_BT
    )
    kept_BT = ratio.stays_BT
    for rule in config.reject:
        if rule.stat == Stat.staleness:
            continue
        rejected = violations(rule, ratio)
        if rule.when is not None:
            rejected = rejected & (advantages_B[:, None] < 0)
        kept_BT = kept_BT & ~rejected
    bounded = bound(config.weight, raw_ratio(config.weight, ratio), config.weight.high)
    apply_weights(config.weight, ratio, bounded, kept_BT, weights_BT)
    return ratio, weights_BT, kept_BT


def staleness(batch: Batch, config: CorrectionConfig, version: int) -> Tensor | None:
    """Learner updates since each token was sampled, if the loss needs them; `version`: now."""
    if config.anchor == Anchor.interpolated:
        return (version - batch.token_versions_BT).clamp(min=0).float()
    return None


@torch.no_grad()
def without_stale(
    batch: Batch, config: CorrectionConfig, version: int
) -> tuple[Batch, dict[str, float]]:
    """The batch without the tokens that rules on staleness reject, and the share that they were.

    What they reject is in no row's statistic, weight or denominator. `version`: the learner's.
    """
    rules = [rule for rule in config.reject if rule.stat == Stat.staleness]
    if not rules:
        return batch, {}
    mask_BT = batch.mask_BT
    age_BT = (version - batch.token_versions_BT).clamp(min=0).float() * mask_BT
    ages = LogRatio(age_BT, mask_BT, mask_BT, None, 0, 0, batch.turns_BT)
    young_BT = mask_BT
    for rule in rules:
        young_BT = young_BT & ~violations(rule, ages)
    rejected = 1.0 - int(young_BT.sum()) / max(1, int(mask_BT.sum()))
    return batch.with_matrices(mask_BT=young_BT), {PREFIX + "stale_masked_fraction": rejected}


def _check(source: Source, config: CorrectionConfig) -> None:
    """Tensors that broadcast and words that are none of an enum's would pass for something else."""
    shape = source.mask_BT.shape
    for name, logprobs_BT in (
        ("proximal", source.prox_logprobs_BT),
        ("sampler", source.sampler_logprobs_BT),
    ):
        if logprobs_BT is not None and logprobs_BT.shape != shape:
            raise ValueError(
                f"the {name} logprobs are {list(logprobs_BT.shape)} and the mask is {list(shape)}: "
                "hand over one logprob and one mask entry for each position of each row"
            )
    if source.turns_BT is not None and source.turns_BT.shape != shape:
        turns = list(source.turns_BT.shape)
        raise ValueError(
            f"the turns are {turns} and the mask is {list(shape)}: one turn for each position of "
            "each row"
        )
    _, unknown = sound(config, "correction")
    if unknown:
        raise ValueError("; ".join(unknown))


def _without_prox(source: Source, config: CorrectionConfig) -> Correction:
    """Correction without the learner's logprobs: masks non-finite logprobs of the sampler."""
    for key in of_the_whole_batch(config):
        raise ValueError(
            f"{key} needs the learner's logprobs of the whole batch before the loss; they are None"
        )
    weights_BT = torch.empty(
        source.mask_BT.shape, dtype=torch.float32, device=source.mask_BT.device
    )
    stays_BT = torch.empty_like(source.mask_BT)
    faults = 0
    for rows in row_chunks(source.mask_BT):
        sampler_BT = source.sampler_logprobs_BT[rows]
        zeros_BT = torch.zeros_like(sampler_BT)
        ratio = log_ratio(
            zeros_BT, sampler_BT, source.mask_BT[rows], config.non_finite, weights_BT[rows]
        )
        stays_BT[rows] = ratio.stays_BT
        weights_BT[rows] = ratio.counted_BT.float()
        faults += int(ratio.sampler_faults)
    rejected_B = filled(source.mask_BT) & ~filled(stays_BT)
    metrics = {PREFIX + "non_finite_sampler": float(faults)}
    return Correction(weights_BT, stays_BT, stays_BT.clone(), metrics, rejected_B, source)


@torch.no_grad()
def keep_rows(correction: Correction, keep_B: Tensor, config: CorrectionConfig) -> Correction:
    """Drop rows that the advantages cannot use (a group with one survivor), like rejected ones."""
    return _narrow(correction, correction.mask_BT & keep_B.bool()[:, None], config)


@torch.no_grad()
def apply_conditional_rules(
    correction: Correction, advantages_B: Tensor, config: CorrectionConfig
) -> Correction:
    """Rules with `when`, once the advantages are known; they move no baseline.

    Adds `weight_bias` and `weight_variance`, which need the advantages too.
    """
    if correction.source.prox_logprobs_BT is None:
        return correction
    rules = [rule for rule in config.reject if rule.when is not None]
    kept_BT = correction.mask_BT
    if rules:
        kept_BT = kept_BT.clone()
        for rows in row_chunks(kept_BT):
            ratio = correction.source.ratio(rows, config)
            wrong_B1 = advantages_B[rows, None] < 0
            for rule in rules:
                kept_BT[rows] &= ~(violations(rule, ratio) & wrong_B1)
    correction = _narrow(correction, kept_BT, config)
    quality = weight_quality(
        correction.source, correction.weights_BT, correction.mask_BT, advantages_B, config
    )
    return replace(correction, metrics=correction.metrics | quality)


def _narrow(correction: Correction, kept_BT: Tensor, config: CorrectionConfig) -> Correction:
    """Restrict a correction to `kept_BT`, recomputing what depends on the surviving tokens."""
    gone_BT = correction.mask_BT & ~kept_BT
    if not gone_BT.any():
        return correction
    denominator_BT = correction.denominator_mask_BT
    weights_BT = correction.weights_BT.masked_fill(gone_BT, 0.0)
    if config.renormalize:
        denominator_BT = denominator_BT & ~gone_BT
    narrowed = replace(
        correction, weights_BT=weights_BT, mask_BT=kept_BT, denominator_mask_BT=denominator_BT
    )
    if correction.source.prox_logprobs_BT is None:
        return narrowed
    again = weigh_again(correction.source, weights_BT, kept_BT, correction.cap, config)
    return replace(narrowed, metrics=correction.metrics | again)
