"""Sections of a report's page: the figures in their order, with titles and words, as far as runs
have the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from megatron_rl.workshop.reports import figures
from megatron_rl.workshop.reports.charts import curves
from megatron_rl.workshop.reports.run_data import RunData

# title, cut of `correction.breakdown`, what it sorts by, axis
MISMATCH_CUTS = (
    (
        "Mismatch by probability",
        "probability",
        "by how likely they were",
        "sampler's probability of the token",
    ),
    (
        "Mismatch by position",
        "position",
        "by place in the response",
        "position, percent of the response",
    ),
    ("Mismatch by length", "length", "by how long their response is", "tokens of the response"),
    (
        "Mismatch by staleness",
        "staleness",
        "by how old the weights were that wrote them",
        "updates behind the policy",
    ),
    ("Mismatch by finish reason", "finish", "by how their response ended", "finish reason"),
    ("Mismatch by weight format", "format", "by the weights that wrote them", "format"),
    ("Mismatch by turn", "turn", "of sessions, by turn", "turn, counted from 0"),
    (
        "Mismatch by place in the turn",
        "place",
        "of sessions, by place in their turn",
        "token of the turn",
    ),
    ("Mismatch by kind of token", "kind", "of sessions, by what they are part of", "kind"),
)


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    figure: go.Figure | None  # None: no run has the data
    wide: bool = False
    sampled: bool = False  # says something only where the sampler wrote the answers


def sections(runs: Sequence[RunData]) -> dict[str, list[Panel]]:
    """Heading -> panels that have something to show; no heading without one."""
    warm_start = all(map(supervised, runs))
    loss = _curves(
        runs, "Loss", "The one whose gradient was taken", {"loss/total": "loss"}, smooth=True
    )
    accuracy = figures.accuracy(runs)
    held_out = Panel(
        "Held-out accuracy", "On each evaluated set; the band is its standard error.", accuracy
    )
    groups = "Of all generated: all answers right, all wrong, or some of both, which can be learned from."
    found = {
        "Learning": [_reward(runs), *([loss] if warm_start else []), held_out],
        "Sampler and learner": _agreement(runs),
        "Time": _time(runs),
        "Plan": _plan(runs[0]) if len(runs) == 1 else [],
        "Learner": [
            *_learner(runs),
            *([] if warm_start else [loss]),
            Panel("Groups by difficulty", groups, figures.difficulty(runs), sampled=True),
        ],
    }
    shown = {
        heading: [
            panel
            for panel in panels
            if panel.figure is not None and not (warm_start and panel.sampled)
        ]
        for heading, panels in found.items()
    }
    return {heading: panels for heading, panels in shown.items() if panels}


def supervised(run: RunData) -> bool:
    return bool(run.setting("rollout.source") == "dataset")


def _curves(
    runs: Sequence[RunData],
    title: str,
    about: str,
    names: Mapping[str, str],
    *,
    sampled: bool = False,
    **look: Any,
) -> Panel:
    return Panel(title, _words(runs, about, names), curves(runs, names, **look), sampled=sampled)


def _words(runs: Sequence[RunData], about: str, names: Mapping[str, str]) -> str:
    """Words on dash patterns: with several runs these tell quantities apart, and nothing else says
    which is which.
    """
    present = [label for name, label in names.items() if any(run.series(name) for run in runs)]
    if len(runs) == 1 or len(present) < 2:
        return f"{about}."
    styles = [
        f"{dash}: {label}"
        for dash, label in zip(("solid", "dashed", "dotted"), names.values(), strict=False)
    ]
    return f"{about} ({', '.join(styles)})."


def _reward(runs: Sequence[RunData]) -> Panel:
    name = next(
        (name for run in runs if (name := run.first_of("reward/sampler_mean", "reward/mean"))),
        "reward/mean",
    )
    if name.endswith("sampler_mean"):
        about = "All generated answers"
    else:
        about = "The answers that were trained on"
    shown = {name: "reward"}
    if any(run.series("reward/learner_estimate") for run in runs):
        shown["reward/learner_estimate"] = "learner estimate"
    return _curves(runs, "Reward", f"{about}; bold: running mean", shown, sampled=True, smooth=True)


def _agreement(runs: Sequence[RunData]) -> list[Panel]:
    mismatch = {"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"}
    probe = {"sync/probe_abs_diff": "probe", "sync/probe_budget": "budget"}
    all_tokens = "rollout_corr/logp_abs_diff_mean"
    stale = "rollout_corr/stale/logp_abs_diff_mean"
    apart = {all_tokens: "all tokens", stale: "old tokens", "sync/probe_abs_diff": "same version"}
    ages = "Mean |difference| of all trained tokens, of the old ones, and right after a sync: numerics alone."
    old = any(run.series(stale) for run in runs)
    nats: dict[str, Any] = {"y_title": "nats", "from_zero": True}
    about_kl = "KL(sampler, learner) per token, in nats"
    size = "Of the applied weights, as a fraction of the tokens."
    tokens = sum(len(run.tokens.weights) for run in runs if run.tokens is not None)
    ratio = f"Learner over sampler probability of {tokens:,} recorded tokens."
    return [
        _curves(runs, "Mismatch KL", about_kl, mismatch, sampled=True, **nats),
        Panel("Effective sample size", size, figures.effective_sample_size(runs), sampled=True),
        Panel("Importance ratio", ratio, figures.ratio_histogram(runs), sampled=True),
        _curves(
            runs,
            "Logprob probe after sync",
            "Mean |difference| on fresh tokens",
            probe,
            markers=True,
            **nats,
        ),
        Panel(
            "Numerics and staleness",
            ages,
            curves(runs, apart, markers=True, **nats) if old else None,
            sampled=True,
        ),
        *(
            Panel(
                title,
                f"Recorded tokens, {about}.",
                figures.mismatch_by(runs, cut, x_title),
                sampled=True,
            )
            for title, cut, about, x_title in MISMATCH_CUTS
        ),
    ]


def _time(runs: Sequence[RunData]) -> list[Panel]:
    if len(runs) > 1:
        split = "Mean step of each run."
    else:
        split = "Wall clock on the driver rank; phases do not overlap."
    sent: dict[str, Any] = {"y_title": "MiB", "scale": 2**-20, "from_zero": True}
    speed: dict[str, Any] = {"smooth": True, "first_step": 1, "from_zero": True, "sampled": True}
    sizes = {"sync/bytes": "sent", "sync/read_bytes": "read by a rank of an engine"}
    throughput = {"perf/rollout_tokens_per_s": "tokens/s"}
    error = {"sync/quant_error_max": "worst layer"}
    return [
        Panel(
            "Where a step's time goes",
            split,
            figures.split(runs, "time", figures.TIME_PHASES),
            wide=True,
        ),
        Panel(
            "Who works when",
            "Some steps from the middle of the run.",
            figures.lanes(runs),
            wide=True,
        ),
        Panel("Weight sync", "Its own phases.", figures.split(runs, "sync", figures.SYNC_PHASES)),
        _curves(runs, "Weight sync size", "Each time", sizes, **sent),
        _curves(
            runs,
            "Engines stand still",
            "In each sync",
            {"sync/pause_s": "paused"},
            y_title="s",
            from_zero=True,
        ),
        _curves(
            runs,
            "Rollout throughput",
            "Response tokens per second of generation",
            throughput,
            **speed,
        ),
        _curves(runs, "Quantization error", "Relative, the worst layer", error, from_zero=True),
    ]


def _plan(run: RunData) -> list[Panel]:
    memory, time = figures.planned(run)
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
    length = {"rollout/response_tokens_mean": "tokens"}
    norm = {"optim/grad_norm": "norm"}
    entropy = {"loss/entropy": "entropy"}
    return [
        _curves(runs, "Response length", "Mean, in tokens", length, from_zero=True),
        _curves(runs, "Entropy", "Mean over trained tokens, in nats", entropy, from_zero=True),
        _curves(runs, "Gradient norm", "Before clipping", norm, smooth=True, from_zero=True),
        _curves(
            runs,
            "Clipping and rejection",
            "Fraction of tokens",
            clipping,
            sampled=True,
            from_zero=True,
        ),
    ]
