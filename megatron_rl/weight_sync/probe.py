"""Probe after a weight sync: compares sampler and learner by logprobs of new responses, each weight
format under its own budget; raises with likely causes if they differ by more.

On such tokens healthy engines agree to a few thousandths of a nat; on random tokens ten times
worse.

N response tokens, B rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.batch import Batch
from megatron_rl.config.schema import Format, format_number
from megatron_rl.types import Metrics
from megatron_rl.weight_sync.probe_budget import Budget, Numerics, noise_budget

MAX_MISSING = 0.01  # share of tokens without a sampler logprob
CONSTANT_STD = 1e-4
WHERE = "On a CPU `megatron-rl mismatch RUN` shows where they first differ."
WAYS_OUT = (
    "`megatron-rl mismatch` on the model says at which point of a forward pass the difference "
    "enters. Then try quantization.smoothing=0.5 (int8: outliers), learner.forward=as_sampler "
    "(CPUs, int8 and fp8), quantization.ignore for the worst layers, model.head_precision=fp32 "
    "(logits of both in FP32); a number of nats in sync.probe_budget where the difference is "
    "known and meant."
)
# relative to the format's effect on the learner; 0.91 to 1.09 in correct setups
EXPLAINED = 1.3
UNIFORM_MARGIN = 0.15  # nats between the sampler's mean logprob and a uniform guess


class SyncMismatch(RuntimeError):
    """Sampler and learner disagree by more than their formats explain."""

    process = "the sampler's engine"
    hint = (
        "Compare with quantization.format=none; a number in sync.probe_budget is for a difference "
        "that the format alone explains."
    )


@dataclass(frozen=True)
class ProbeResult:
    mean_abs: float  # over tokens where both logprobs are finite
    max_abs: float
    mean: float  # learner minus sampler; positive: the learner is more certain
    tokens: int
    missing: int  # tokens without a finite sampler logprob
    learner_missing: int
    budget: float

    @property
    def ok(self) -> bool:
        return self.within(self.budget)

    def within(self, nats: float) -> bool:
        return self.compared and self.mean_abs <= nats  # false for NaN too

    @property
    def compared(self) -> bool:
        """True if almost all tokens have a logprob on both sides."""
        return (
            self.tokens > 0
            and self.missing <= MAX_MISSING * self.tokens
            and self.learner_missing == 0
        )

    def metrics(self) -> Metrics:
        return {
            "sync/probe_abs_diff": self.mean_abs,
            "sync/probe_diff": self.mean,
            "sync/probe_budget": self.budget,
        }


@dataclass(frozen=True)
class Probe:
    """Inputs of the comparison after one sync."""

    version: int  # the policy version just synced
    vocab: int
    budget: float | None = None  # nats; None: derived from the noise
    noise: float = math.nan  # nats: effect of one more rounding on the learner's logprobs
    learner: Numerics = Numerics.bf16
    # nats; None: unknown. The format's effect on the learner, and the difference that is left when
    # the learner rounds the same way
    expected: float | None = None
    # True if no difference should be left: the learner has all other roundings of the engine, too
    unexplained: float | None = None

    def budget_of(self, format: Format) -> Budget:
        if self.budget is None:
            return noise_budget(self.noise, format, self.learner)
        return Budget(self.budget, "sync.probe_budget", end=self.budget)

    @property
    def pair(self) -> Budget:
        """Budget of a BF16 sampler, if the format's own effect is fully explained."""
        return noise_budget(self.noise, Format.none, self.learner)

    def accepts(self, result: ProbeResult, budget: Budget) -> bool:
        if self.budget is not None:
            return result.ok
        if self.unexplained is not None:
            return result.compared and self.unexplained <= self.pair.nats
        if self.expected is not None:
            return result.within(max(budget.nats, EXPLAINED * self.expected))
        return result.within(budget.end)

    def metrics(self) -> Metrics:
        metrics = {"expected": self.expected, "unexplained": self.unexplained}
        metrics |= {"noise": self.noise if self.budget is None else None}
        return {f"sync/probe_{name}": value for name, value in metrics.items() if value is not None}


def compare(
    sampler_logprobs_N: Tensor,
    learner_logprobs_N: Tensor,
    mask_N: Tensor,
    budget: float,
) -> ProbeResult:
    sampler = sampler_logprobs_N[mask_N].double().cpu()
    learner = learner_logprobs_N[mask_N].double().cpu()
    both = sampler.isfinite() & learner.isfinite()
    difference = learner[both] - sampler[both]
    return ProbeResult(
        mean_abs=float(difference.abs().mean()),
        max_abs=float(difference.abs().max()) if len(difference) else math.nan,
        mean=float(difference.mean()),
        tokens=int(mask_N.sum()),
        missing=int((~sampler.isfinite()).sum()),
        learner_missing=int((~learner.isfinite()).sum()),
        budget=budget,
    )


def noise(logprobs_N: Tensor, rounded_again_N: Tensor, mask_N: Tensor) -> float:
    """Return the mean |difference| of the learner's own logprobs with and without one more rounding
    of its weights.
    """
    return compare(rounded_again_N, logprobs_N, mask_N, math.inf).mean_abs


def check(
    sampler_logprobs_N: Tensor,
    learner_logprobs_N: Tensor,
    mask_N: Tensor,
    format: Format,
    probe: Probe,
) -> ProbeResult:
    """Compare logprobs; raise SyncMismatch with a diagnosis if they differ by more than the format
    explains.

    The format's effect is computed by a learner that rounds the same way: `unexplained` is its
    difference from the sampler, `expected` its difference from the plain learner, which bounds the
    sampler's. Otherwise the format has its budget; integer formats may exceed it by as much as
    outliers of activations explain. Both logprobs must be of the version just synced.
    """
    budget = probe.budget_of(format)
    result = compare(sampler_logprobs_N, learner_logprobs_N, mask_N, budget.nats)
    if probe.accepts(result, budget):
        return result
    cause = diagnose(sampler_logprobs_N[mask_N].cpu(), result, probe)
    raise SyncMismatch(
        f"after the sync of policy version {probe.version} ({format.value}) sampler and learner "
        f"disagree: mean |difference| {result.mean_abs:.4g} nats over {result.tokens} tokens, "
        f"budget {result.budget:.3g} ({budget.origin}); largest {result.max_abs:.3g}, mean signed "
        f"{result.mean:+.3g}, {result.missing} sampler and {result.learner_missing} learner "
        f"logprobs missing or NaN. {_rounding_note(probe)}{cause}"
    )


def _rounding_note(probe: Probe) -> str:
    if probe.budget is not None or probe.expected is None:
        return ""
    text = f"Rounding as this format does, the learner differs by {probe.expected:.3g} from itself"
    if probe.unexplained is not None:
        text += f", by {probe.unexplained:.3g} from the sampler "
        text += f"(at most {probe.pair.nats:.3g}: a rounding)"
    return text + ". "


def check_formats(
    batch: Batch, learner_logprobs_N: Tensor, formats: Sequence[Format], probe: Probe
) -> Metrics:
    """Run `check` for every weight format of the sampler that has rows, under its own budget, on
    rows sampled with the version just synced: older ones differ legitimately.
    """
    results: dict[Format, ProbeResult] = {}
    for format in map(Format, formats):  # names, if they came from another rank
        rows_B = torch.ones(len(batch), dtype=torch.bool)
        if len(formats) > 1 and batch.formats_B is not None:
            rows_B = batch.formats_B == format_number(format)
        if not bool(rows_B.any()):
            continue
        fresh_B = rows_B & (batch.versions_B == probe.version)
        if not bool(fresh_B.any()):
            there = f"the batch holds versions {sorted(set(batch.versions_B[rows_B].tolist()))}"
            raise ValueError(f"the probe needs rollouts of policy version {probe.version}, {there}")
        mask_N = batch.mask_N & batch.responses.at_tokens(fresh_B)
        results[format] = check(batch.sampler_logprobs_N, learner_logprobs_N, mask_N, format, probe)
    if not results:
        raise ValueError(
            f"the probe needs rollouts of {', '.join(formats)} engines, the batch holds none"
        )
    worst = max(results.values(), key=lambda result: result.mean_abs / result.budget)
    metrics = worst.metrics() | probe.metrics()
    if len(formats) == 1:
        return metrics
    return metrics | {
        f"sync/probe_abs_diff/{one}": result.mean_abs for one, result in results.items()
    }


def diagnose(sampler: Tensor, result: ProbeResult, probe: Probe) -> str:
    """Return the likely cause of a difference. `sampler`: its logprobs of the masked tokens."""
    if result.tokens == 0:
        return "No tokens to compare: the sampler returned empty responses."
    if result.learner_missing:
        return (
            "The learner's own logprobs are not finite: the policy has diverged, or its forward "
            "pass is broken."
        )
    if result.missing > MAX_MISSING * result.tokens:
        return (
            "The sampler returns NaN: its quantized kernels were not rebuilt from the new "
            "weights, or a scale is wrong."
        )
    finite = sampler[sampler.isfinite()].double()
    if len(finite) > 1 and float(finite.std()) < CONSTANT_STD:
        return (
            "Its logprobs are constant for all tokens: the kernel state of a quantized layer "
            "was not rebuilt."
        )
    if len(finite) > 1 and abs(float(finite.mean()) + math.log(probe.vocab)) < UNIFORM_MARGIN:
        return (
            "Its logprobs are those of a uniform guess: the output layer holds dummy or stale "
            "weights, or a tied lm_head was not refreshed from the embedding."
        )
    if result.mean_abs > 10 * result.budget:
        return (
            "Logits of another model: a parameter was loaded under another's name or not at all, "
            f"or a tied lm_head was not refreshed from the embedding. {WHERE}"
        )
    return (
        "A moderate excess: an older version still served, a temperature or top-p applied on one "
        f"side only, or a model that this format does not suit. {WAYS_OUT}"
    )
