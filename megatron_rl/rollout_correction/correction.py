"""Correction of a batch: from sampler's and learner's logprobs to importance weights, a mask and
metrics; from rewards to advantages; stale tokens cut. policy_loss.py calls it too, by micro-batch,
where it alone has the learner's logprobs.

The sampler that wrote a response (mu) and the learner that trains on it (p) disagree about every
token's probability. With d = p - mu and rho = exp(d), tokens without a ratio are dealt with
(`non_finite`), tokens and sequences rejected by rules on d (`reject`), the rest weighed (`weight`),
and the disagreement measured (`metrics`, under `rollout_corr/`).

Every replica corrects its own rows. What looks at all rows (`budget`, `target_ess`, `normalize`, a
group's baseline, metrics) is solved on sums over replicas, the same on each. Rows are worked on in
parts that fit a core's cache. `docs/concepts/rollout-correction.md` explains how to choose.

Shape legend: N response tokens, B rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.advantage import session_advantages
from megatron_rl.batch import Batch, OneReplica, Replicas, Share, UpdateInputs
from megatron_rl.config.schema import (
    AdvantageConfig,
    Anchor,
    Center,
    CorrectionConfig,
    Level,
    NonFinite,
    RejectRule,
    Stat,
)
from megatron_rl.rollout_correction.centering import center_weights
from megatron_rl.rollout_correction.metrics import (
    PREFIX,
    MismatchSums,
    Sums,
    WeightSums,
    log_odds_differences,
)
from megatron_rl.rollout_correction.parts import Part, parts_of
from megatron_rl.rollout_correction.ratio import (
    SHARED_LEVELS,
    LogRatio,
    as_float,
    exact_log_ratio,
)
from megatron_rl.rollout_correction.rules import (
    budget_cutoff,
    judged,
    next_below,
    stat_of,
    violations,
)
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.rollout_correction.weights import (
    Weighted,
    bound,
    cap_of,
    fraction_bounds,
    raw_ratio,
    solve_cap,
    units,
)
from megatron_rl.types import Metrics

# of the rows that count in their group's baseline: advantages, and which of them have one
Judge = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Correction:
    """`weights_N` is 0 where `mask_N` is false; reductions count `denominator_mask_N`."""

    weights_N: Tensor  # float32, detached
    mask_N: Tensor  # bool: tokens that are trained on
    denominator_mask_N: Tensor  # bool
    metrics: Metrics
    # bool: rows that had a response token and lost all to the unconditional rules
    rejected_B: Tensor
    advantages_B: Tensor  # float32
    prox_logprobs_N: Tensor | None
    # float32: weights of score centering, of top tokens and tails; None: not centered, or the loss
    # completes them
    top_weights_E: Tensor | None = None
    tail_weights_N: Tensor | None = None


def correct(
    share: Share,
    anchor_logprobs_N: Tensor | None,
    config: CorrectionConfig,
    advantage: AdvantageConfig,
    top_anchor_E: Tensor | None = None,
) -> tuple[Correction, Tensor, Tensor]:
    """The correction of a replica's rows; advantages of all rows, float32, and which rows count in
    their group's baseline.

    Rules first, so that rejected responses can leave their group's baseline; then the advantages;
    then the rules that read them. A response without a score is in neither the mask nor the
    baseline. Without an anchor the loss completes the correction (`completed`).
    """
    table = share.all
    of_all = []

    def judge(own_baseline_B: Tensor) -> tuple[Tensor, Tensor]:
        baseline_B = share.everywhere(own_baseline_B)
        counted_B = baseline_B & torch.isfinite(table.rewards_B)
        advantages_B, kept_B = session_advantages(
            table.rewards_B, table.groups_B, table.samples_B, counted_B, advantage
        )
        of_all.append((advantages_B, baseline_B))
        return advantages_B[share.own], kept_B[share.own]

    prox_N = anchor_logprobs_N if config.anchor == Anchor.prox else None
    correction = rollout_correction(
        share.batch, prox_N, config, share.replicas, judge, top_anchor_E
    )
    return correction, *of_all[0]


def completed(
    correction: Correction,
    logprobs_N: Tensor,
    share: Share,
    config: CorrectionConfig,
    advantage: AdvantageConfig,
) -> Correction:
    """Redo a correction, for its metrics, with the logprobs of the batch's only update.

    They are NaN in rows that the update skipped; those are not measured. Weights and masks are the
    ones that the loss has used.
    """
    batch = share.batch
    seen_B = batch.responses.count(correction.mask_N) > 0
    if not share.everywhere(seen_B).any():
        return correction
    seen = replace(batch, mask_N=batch.mask_N & batch.responses.at_tokens(seen_B))
    return correct(replace(share, batch=seen), logprobs_N, config, advantage)[0]


@torch.no_grad()
def rollout_correction(
    batch: Batch,
    prox_logprobs_N: Tensor | None,
    config: CorrectionConfig,
    replicas: Replicas | None = None,
    judge: Judge | None = None,
    top_prox_E: Tensor | None = None,
) -> Correction:
    """Weights, mask and metrics of a replica's rows. `top_prox_E`: proximal logprobs of the top
    tokens.

    Where there are no proximal logprobs before the loss (`anchor: sampler`, or one update for the
    batch) pass None, and give `config` to `policy_loss`, which finishes the correction from the
    policy's own logprobs.
    """
    replicas = replicas or OneReplica()
    if config.non_finite == NonFinite.raise_:
        _refuse_faults(batch, replicas)
    if prox_logprobs_N is None:
        return _without_prox(batch, config, replicas, judge)
    rules = [rule for rule in config.reject if rule.stat != Stat.staleness]
    unconditional = [rule for rule in rules if rule.when is None]
    kept_N = torch.empty_like(batch.mask_N)
    stays_N = torch.empty_like(kept_N)
    weights_N = torch.empty(kept_N.shape, dtype=torch.float32)  # holds d until they are known
    mismatch = MismatchSums()
    parts = []
    for part in parts_of(batch, prox_logprobs_N, config, weights_N, top_prox_E):
        ratio = part.ratio
        stays_N[part.tokens] = kept_part_N = ratio.stays_N
        for rule in unconditional:
            if rule.budget is None:
                kept_part_N = kept_part_N & ~violations(rule, ratio)
        kept_N[part.tokens] = kept_part_N
        mismatch.count(ratio)
        parts.append(replace(part, ratio=replace(ratio)))  # without derived tensors
    rules = _apply_budgets(parts, kept_N, rules, replicas)
    cap = config.weight.high
    if config.weight.target_ess is not None:
        cap = _solved_cap(parts, kept_N, config, replicas)
    judged_rows = _judged(batch, kept_N, config, judge)
    _apply_conditional(parts, kept_N, rules, judged_rows.advantages_B)
    metrics = mismatch.metrics(replicas)
    centered = _center(parts, rules, judged_rows, cap, config)
    of_weights, scale = _weigh(
        parts, kept_N, weights_N, judged_rows.advantages_B, cap, config, replicas
    )
    counted_N = kept_N.clone() if config.renormalize else stays_N
    return Correction(
        weights_N,
        kept_N,
        counted_N,
        metrics | of_weights,
        judged_rows.rejected_B,
        judged_rows.advantages_B,
        prox_logprobs_N,
        *(one.mul_(scale) for one in centered),
    )


def _without_prox(
    batch: Batch, config: CorrectionConfig, replicas: Replicas, judge: Judge | None
) -> Correction:
    """Masks non-finite logprobs of the sampler; the loss does the rest."""
    stays_N = torch.empty_like(batch.mask_N)
    weights_N = torch.empty(stays_N.shape, dtype=torch.float32)
    faults = Sums()
    for part in parts_of(batch, None, config, weights_N):
        stays_N[part.tokens] = part.ratio.stays_N
        weights_N[part.tokens] = as_float(part.ratio.counted_N)
        faults.add(sampler=part.ratio.sampler_faults)
    kept_N = stays_N.clone()
    rows = _judged(batch, kept_N, config, judge)
    weights_N.masked_fill_(~kept_N, 0.0)
    metrics = {PREFIX + "non_finite_sampler": faults.reduced(replicas)["sampler"]}
    counted_N = kept_N.clone() if config.renormalize else stays_N
    return Correction(
        weights_N, kept_N, counted_N, metrics, rows.rejected_B, rows.advantages_B, None
    )


@dataclass(frozen=True)
class _Judged:
    """Rows after the unconditional rules."""

    rejected_B: Tensor  # bool
    advantages_B: Tensor
    keep_B: Tensor  # bool: rows with an advantage


def _judged(batch: Batch, kept_N: Tensor, config: CorrectionConfig, judge: Judge | None) -> _Judged:
    """Rows that the rules rejected, and advantages. Rows without one are taken out of `kept_N`."""
    rows = batch.responses
    had_B = rows.count(batch.mask_N) > 0
    rejected_B = had_B & (rows.count(kept_N) == 0)
    if judge is None:
        return _Judged(rejected_B, torch.ones(len(batch)), torch.ones_like(had_B))
    # with `rebaseline`, neither rows that rules rejected, nor those whose mask was empty before
    # (truncated responses under reward.overlong_filter); later departures still count
    counted_B = had_B & ~rejected_B if config.rebaseline else torch.ones_like(had_B)
    advantages_B, keep_B = judge(counted_B)
    kept_N &= rows.at_tokens(keep_B)
    return _Judged(rejected_B, advantages_B, keep_B)


def _apply_budgets(
    parts: list[Part], kept_N: Tensor, rules: list[RejectRule], replicas: Replicas
) -> list[RejectRule]:
    """Apply rules with a budget, on the statistic of the whole batch before any rule masked; return
    all rules, with the bounds that were found in the place of budgets.
    """
    bounded = []
    for rule in rules:
        if rule.budget is None or rule.when is not None:
            bounded.append(rule)
            continue
        stats = [stat_of(rule, part.ratio)[judged(rule, part.ratio)] for part in parts]
        cutoff = budget_cutoff(torch.cat(stats), rule.budget, replicas)
        for part in parts:
            beyond = (stat_of(rule, part.ratio) >= cutoff) & judged(rule, part.ratio)
            kept_N[part.tokens] &= ~part.ratio.at_tokens(rule.level, beyond)
        bounded.append(replace(rule, budget=None, high=next_below(cutoff)))
    return bounded


def _center(
    parts: list[Part],
    rules: list[RejectRule],
    rows: _Judged,
    cap: float | None,
    config: CorrectionConfig,
) -> list[Tensor]:
    """Weights of top tokens and tails, before the normalization; none without centering."""
    if config.center == Center.none or any(part.ratio.top is None for part in parts):
        return []
    found = [_centered(part, rules, rows, cap, config) for part in parts]
    return [torch.cat(columns) for columns in zip(*found, strict=True)]


def _centered(
    part: Part, rules: list[RejectRule], rows: _Judged, cap: float | None, config: CorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Weights of top tokens and tails, before the normalization. Rows without an advantage have
    none.
    """
    ratio = replace(part.ratio)  # its derived tensors are freed before the next part
    assert ratio.top is not None
    of_top, of_tails = center_weights(
        ratio, ratio.top, config, rules, cap, rows.advantages_B[part.rows]
    )
    keep_N = ratio.rows.at_tokens(rows.keep_B[part.rows]).float()
    return of_top * ratio.top.tokens.at_tokens(keep_N), of_tails * keep_N


def _solved_cap(
    parts: list[Part], kept_N: Tensor, config: CorrectionConfig, replicas: Replicas
) -> float:
    weight = config.weight
    found = []
    for part in parts:
        ratio = part.ratio
        weighed_N = kept_N[part.tokens] & ratio.counted_N
        ones = 0
        if ratio.one_N is not None:
            ones = int((ratio.one_N & kept_N[part.tokens]).sum())
            weighed_N = weighed_N & ~ratio.one_N
        tokens = as_float(weighed_N)
        if weight.level in SHARED_LEVELS:
            tokens = ratio.sums(weight.level, tokens)
        found.append(Weighted(raw_ratio(weight, ratio), tokens, ones))
    kept = float(replicas.sum(kept_N.sum(dtype=torch.float64)))
    return solve_cap(found, weight, kept, replicas)


def _apply_conditional(
    parts: list[Part], kept_N: Tensor, rules: list[RejectRule], advantages_B: Tensor
) -> None:
    """Rules with `when`, once the advantages are known; they move no baseline."""
    for rule in rules:
        if rule.when is None:
            continue
        for part in parts:
            wrong_N = part.ratio.rows.at_tokens(advantages_B[part.rows] < 0)
            kept_N[part.tokens] &= ~(violations(rule, part.ratio) & wrong_N)


def _weigh(
    parts: list[Part],
    kept_N: Tensor,
    weights_N: Tensor,
    advantages_B: Tensor,
    cap: float | None,
    config: CorrectionConfig,
    replicas: Replicas,
) -> tuple[Metrics, float]:
    """Weights of the kept tokens, into `weights_N`; metrics of them, and what normalized them."""
    weight = config.weight
    applied = WeightSums()
    for part in parts:
        ratio = replace(part.ratio)  # its derived tensors are freed before the next part
        out_N = weights_N[part.tokens]  # the memory of `ratio.d_N`
        kept_float_N = as_float(kept_N[part.tokens])
        kept_B = ratio.rows.count(kept_N[part.tokens])
        applied.count_rows(ratio.rows.count(ratio.stays_N), kept_B)
        raw = raw_ratio(weight, ratio)
        own_cap = cap_of(weight, ratio, cap)
        if weight.cap.confidence is not None:
            applied.add(**log_odds_differences(ratio))
        bounded = bound(weight, raw, own_cap)
        applied.count_units(
            raw, bounded, units(weight, ratio, kept_float_N), *fraction_bounds(weight, own_cap)
        )
        raw_N = ratio.at_tokens(weight.level, raw)
        _fill_weights(weight.level, ratio, bounded, kept_float_N, out_N)
        if weight.level == Level.none:
            measured_N = kept_float_N * ratio.counted_float_N
            applied.count_weights(raw_N * measured_N, measured_N)
        else:
            applied.count_weights(out_N, kept_float_N)
        applied.count_returns(
            ratio.rows.sum(out_N),
            ratio.rows.sum(out_N.square()),
            ratio.rows.sum(raw_N * kept_float_N),
            advantages_B[part.rows],
        )
    found = applied.reduced(replicas)
    scale = 1.0
    if weight.normalize and weight.level != Level.none:
        if weight.level in SHARED_LEVELS:
            total, count = found["unit_total"], found["units"]
        else:
            total, count = found["weight"], found["n"]
        if total:
            scale = count / total
            weights_N.div_(total / count)
    metrics = applied.metrics(found, scale)
    if weight.target_ess is not None and cap is not None:
        metrics[PREFIX + "cap"] = cap
    return metrics, scale


def _fill_weights(
    level: Level, ratio: LogRatio, bounded: Tensor, kept_float_N: Tensor, out_N: Tensor
) -> None:
    """Write weights of kept tokens to `out_N`, 0 elsewhere, from bounded ratios of the level."""
    torch.mul(ratio.at_tokens(level, bounded), kept_float_N, out=out_N)
    ratio.fix_weights_(out_N, kept_float_N > 0)


@torch.no_grad()
def correct_micro_batch(
    prox_N: Tensor,
    targets: UpdateInputs,
    config: CorrectionConfig,
    top: TopLogprobs | None = None,
) -> tuple[LogRatio, UpdateInputs]:
    """Log-ratio of rows whose learner logprobs the loss alone knows, and their inputs with weights
    and masks. Never waits for a device.
    """
    ratio = exact_log_ratio(
        prox_N,
        targets.sampler_logprobs_N,
        targets.mask_N,
        config.non_finite,
        targets.responses,
        targets.turns,
        torch.empty_like(targets.mask_N, dtype=torch.float32),
    )
    ratio = replace(ratio, top=top)
    kept_N = ratio.stays_N
    for rule in config.reject:
        if rule.stat == Stat.staleness:
            continue
        rejected_N = violations(rule, ratio)
        if rule.when is not None:
            wrong_N = targets.responses.at_tokens(targets.advantages_B < 0)
            rejected_N = rejected_N & wrong_N
        kept_N = kept_N & ~rejected_N
    weight = config.weight
    cap = cap_of(weight, ratio, weight.high)
    bounded = bound(weight, raw_ratio(weight, ratio), cap)
    weights_N = torch.empty_like(ratio.d_N)
    _fill_weights(weight.level, ratio, bounded, as_float(kept_N), weights_N)
    targets = replace(targets, weights_N=weights_N, mask_N=kept_N)
    if top is not None and config.center != Center.none:
        of_top, of_tails = center_weights(
            ratio, top, config, config.reject, config.weight.high, targets.advantages_B
        )
        targets = replace(targets, top_weights_E=of_top, tail_weights_N=of_tails)
    return ratio, targets


def staleness(batch: Batch, config: CorrectionConfig, version: int) -> Tensor | None:
    """Steps (policy versions) since each token was sampled, if the loss needs them; `version`: now."""
    if config.anchor == Anchor.interpolated:
        return (version - batch.token_versions_N).clamp(min=0).float()
    return None


@torch.no_grad()
def without_stale(batch: Batch, config: CorrectionConfig, version: int) -> tuple[Batch, Metrics]:
    """The batch without the tokens that rules on staleness reject, and the share that they were.

    What they reject is in no row's statistic, weight or denominator. `version`: the learner's.
    """
    rules = [rule for rule in config.reject if rule.stat == Stat.staleness]
    if not rules:
        return batch, {}
    mask_N = batch.mask_N
    age_N = (version - batch.token_versions_N).clamp(min=0).float() * mask_N
    ages = LogRatio(age_N, mask_N, mask_N, batch.responses, batch.turns)
    young_N = mask_N
    for rule in rules:
        young_N = young_N & ~violations(rule, ages)
    rejected = 1.0 - int(young_N.sum()) / max(1, int(mask_N.sum()))
    return replace(batch, mask_N=young_N), {PREFIX + "stale_masked_fraction": rejected}


def _refuse_faults(batch: Batch, replicas: Replicas) -> None:
    """Raise, on every replica, where the sampler has reported no logprob of a token."""
    faulty_N = batch.mask_N & ~torch.isfinite(batch.sampler_logprobs_N)
    faults = int(replicas.sum(faulty_N.sum()))
    if not faults:
        return
    first = ""
    for place in faulty_N.nonzero().flatten().tolist()[:1]:
        value = float(batch.sampler_logprobs_N[place])
        at = int(batch.responses.place_N[place])
        first = f"; one is {value} at position {at} of a response"
    raise ValueError(
        f"{faults} of the sampler's logprobs are NaN or infinite{first}; correction.non_finite: "
        "raise stops the run; drop, one, zero or reject continue"
    )
