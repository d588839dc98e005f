"""Which figures a report shows, in which order, under which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from megatron_rl.workshop.reports import eval_figure, figures
from megatron_rl.workshop.reports import plan_section as report_plan
from megatron_rl.workshop.reports.figures import curves
from megatron_rl.workshop.reports.run_data import RunData

UNIT = (-0.02, 1.02)  # the axis of a fraction
# title, cut of `correction.breakdown`, what it sorts by, axis
MISMATCH_CUTS = (
    ("Mismatch by probability", "probability", "by how likely they were", "sampler's probability of the token"),
    ("Mismatch by position", "position", "by place in the response", "position, percent of the response"),
    ("Mismatch by length", "length", "by how long their response is", "tokens of the response"),
    ("Mismatch by staleness", "staleness", "by how old the weights were that wrote them", "updates behind the policy"),
    ("Mismatch by finish reason", "finish", "by how their response ended", "finish reason"),
    ("Mismatch by weight format", "format", "by the weights that wrote them", "format"),
)


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    figure: go.Figure | None  # None: no run has the data
    wide: bool = False
    sampled: bool = False  # says something only where the sampler wrote the answers


def sections(runs: Sequence[RunData]) -> dict[str, list[Panel]]:
    """Heading -> panels that have something to show."""
    warm_start = all(map(supervised, runs))
    found = {
        "Learning": [_reward(runs), *([_loss(runs)] if warm_start else []), _accuracy(runs)],
        "Sampler and learner": _agreement(runs),
        "Time": _time(runs),
        "Plan": _plan(runs[0]) if len(runs) == 1 else [],
        "Learner": [*_learner(runs), *([] if warm_start else [_loss(runs)]), _groups(runs)],
    }
    return {
        heading: [panel for panel in panels if panel.figure is not None and not (warm_start and panel.sampled)]
        for heading, panels in found.items()
    }


def supervised(run: RunData) -> bool:
    return bool(run.setting("rollout.source") == "dataset")


def _reward(runs: Sequence[RunData]) -> Panel:
    name = next((name for run in runs if (name := run.first_of("reward/sampler_mean", "reward/mean"))), "reward/mean")
    about = "All generated answers" if name.endswith("sampler_mean") else "The answers that were trained on"
    shown = {name: "reward"}
    if any(run.series("reward/learner_estimate") for run in runs):
        shown["reward/learner_estimate"] = "learner estimate"
    return Panel(
        "Reward", _words(runs, f"{about}; bold: running mean", shown), curves(runs, shown, smooth=True), sampled=True
    )


def _accuracy(runs: Sequence[RunData]) -> Panel:
    return Panel(
        "Held-out accuracy", "On each evaluated set; the band is its standard error.", eval_figure.accuracy(runs)
    )


def _loss(runs: Sequence[RunData]) -> Panel:
    return Panel("Loss", "The one whose gradient was taken.", curves(runs, {"loss/total": "loss"}, smooth=True))


def _groups(runs: Sequence[RunData]) -> Panel:
    about = "Of all generated: all answers right, all wrong, or some of both, which can be learned from."
    return Panel("Groups by difficulty", about, figures.difficulty(runs), sampled=True)


def _agreement(runs: Sequence[RunData]) -> list[Panel]:
    mismatch = {"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"}
    probe = {"sync/probe_abs_diff": "probe", "sync/probe_budget": "budget"}
    all_tokens, stale = "rollout_corr/logp_abs_diff_mean", "rollout_corr/stale/logp_abs_diff_mean"
    apart = {all_tokens: "all tokens", stale: "old tokens", "sync/probe_abs_diff": "same version"}
    old = any(run.series(stale) for run in runs)
    tokens = sum(len(run.tokens.weights) for run in runs if run.tokens is not None)
    return [
        Panel(
            "Mismatch KL",
            _words(runs, "KL(sampler, learner) per token, in nats", mismatch),
            curves(runs, mismatch, y_title="nats", from_zero=True),
            sampled=True,
        ),
        Panel(
            "Effective sample size",
            "Of the applied weights, as a fraction of the tokens.",
            figures.effective_sample_size(runs),
            sampled=True,
        ),
        Panel(
            "Importance ratio",
            f"Learner over sampler probability of {tokens:,} recorded tokens.",
            figures.ratio_histogram(runs),
            sampled=True,
        ),
        Panel(
            "Logprob probe after sync",
            _words(runs, "Mean |difference| on fresh tokens", probe),
            curves(runs, probe, y_title="nats", markers=True, from_zero=True),
        ),
        Panel(
            "Numerics and staleness",
            "Mean |difference| of all trained tokens, of the old ones, and right after a sync: numerics alone.",
            curves(runs, apart, y_title="nats", markers=True, from_zero=True) if old else None,
            sampled=True,
        ),
        *(
            Panel(title, f"Recorded tokens, {about}.", figures.mismatch_by(runs, cut, x_title), sampled=True)
            for title, cut, about, x_title in MISMATCH_CUTS
        ),
    ]


def _time(runs: Sequence[RunData]) -> list[Panel]:
    throughput = {"perf/rollout_tokens_per_s": "tokens/s"}
    return [
        Panel(
            "Where a step's time goes",
            "Mean step of each run." if len(runs) > 1 else "Wall clock on the driver rank; phases do not overlap.",
            figures.time_split(runs),
            wide=True,
        ),
        Panel("Who works when", "Some steps from the middle of the run.", figures.lanes(runs), wide=True),
        Panel("Weight sync", "Its own phases.", figures.sync_split(runs)),
        Panel(
            "Weight sync size",
            "Sent each time.",
            curves(runs, {"sync/bytes": "MiB"}, y_title="MiB", scale=2**-20, from_zero=True),
        ),
        Panel(
            "Rollout throughput",
            "Response tokens per second of generation.",
            curves(runs, throughput, smooth=True, first_step=1, from_zero=True),
            sampled=True,
        ),
        Panel(
            "Quantization error",
            "Relative, the worst layer.",
            curves(runs, {"sync/quant_error_max": "worst layer"}, from_zero=True),
        ),
    ]


def _plan(run: RunData) -> list[Panel]:
    memory, time = report_plan.figures(run)
    return [
        Panel("Planned memory", "Of one process, by phase; dotted: its limit.", memory, wide=True),
        Panel("Planned and measured time", "Of a step, by phase; measured: the median.", time),
    ]


def _learner(runs: Sequence[RunData]) -> list[Panel]:
    clipping = {
        "loss/clip_fraction_high": "clipped above",
        "loss/clip_fraction_low": "clipped below",
        "rollout_corr/rollout_rs_masked_fraction": "rejected",
    }
    return [
        Panel(
            "Response length",
            "Mean, in tokens.",
            curves(runs, {"rollout/response_tokens_mean": "tokens"}, from_zero=True),
        ),
        Panel(
            "Entropy",
            "Mean over trained tokens, in nats.",
            curves(runs, {"loss/entropy": "entropy"}, from_zero=True),
        ),
        Panel(
            "Gradient norm",
            "Before clipping.",
            curves(runs, {"optim/grad_norm": "norm"}, smooth=True, from_zero=True),
        ),
        Panel(
            "Clipping and rejection",
            _words(runs, "Fraction of tokens", clipping),
            curves(runs, clipping, from_zero=True),
            sampled=True,
        ),
    ]


def _words(runs: Sequence[RunData], about: str, names: Mapping[str, str]) -> str:
    """Words on dash patterns: with several runs these tell quantities apart, and nothing else says which is which."""
    present = [label for name, label in names.items() if any(run.series(name) for run in runs)]
    if len(runs) == 1 or len(present) < 2:
        return f"{about}."
    styles = [f"{dash}: {label}" for dash, label in zip(("solid", "dashed", "dotted"), names.values(), strict=False)]
    return f"{about} ({', '.join(styles)})."
