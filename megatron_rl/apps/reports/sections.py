"""Sections of a report's page: the figures in their order, with titles and words, as far as runs
have the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from megatron_rl.apps.reports import figures
from megatron_rl.apps.reports.charts import UNIT, curves
from megatron_rl.apps.reports.run_data import RunData
from megatron_rl.tracking.metrics import accuracies

# cut of `correction.breakdown`: title, what it sorts recorded tokens by, axis
MISMATCH_CUTS = {
    "probability": ("probability", "how likely they were", "sampler's probability of the token"),
    "position": ("position", "place in the response", "position, percent of the response"),
    "length": ("length", "the length of their response", "tokens of the response"),
    "staleness": ("staleness", "the age of the sampler's weights", "steps behind the policy"),
    "finish": ("finish reason", "the end of their response", "finish reason"),
    "format": ("weight format", "the sampler's weights", "format"),
    "turn": ("turn", "turn of their conversation", "turn, counted from 0"),
    "place": ("place in the turn", "place in a turn", "token of the turn"),
}
NATS: dict[str, Any] = {"y_title": "nats", "from_zero": True}


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    figure: go.Figure | None  # None: no run has the data
    wide: bool = False
    sampled: bool = True  # has a meaning only where the sampler generated the responses


def sections(runs: Sequence[RunData]) -> dict[str, list[Panel]]:
    """Heading -> panels that have something to show; no heading without one."""
    warm_start = all(map(supervised, runs))
    found = {
        "Learning": _learning(runs),
        "Sampler and learner": _agreement(runs),
        "Time": _time(runs),
        "Learner": _learner(runs),
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
    """A chart of metrics. With several runs the words say which dash pattern is which quantity."""
    present = [label for name, label in names.items() if any(run.series(name) for run in runs)]
    if len(runs) > 1 and len(present) > 1:
        patterns = zip(("solid", "dashed", "dotted"), names.values(), strict=False)
        about += f" ({', '.join(f'{dash}: {label}' for dash, label in patterns)})"
    return Panel(title, f"{about}.", curves(runs, names, **look), sampled=sampled)


def _learning(runs: Sequence[RunData]) -> list[Panel]:
    sampled = any(run.series("reward/sampler_mean") for run in runs)
    about = "All generated responses" if sampled else "The responses that were trained on"
    reward = {
        "reward/sampler_mean" if sampled else "reward/mean": "reward",
        "reward/learner_estimate": "learner estimate",
    }
    sets = accuracies({name for run in runs for line in run.lines for name in line})
    accuracy = {name: "accuracy" if label == "eval" else label for name, label in sets.items()}
    held_out = "On each evaluated set; the band is its standard error"
    loss = {"loss/total": "loss"}
    return [
        _curves(
            runs,
            "Reward",
            f"{about}; bold: running mean; band: standard error",
            reward,
            sampled=True,
            smooth=True,
        ),
        _curves(runs, "Loss", "The one whose gradient was taken", loss, smooth=True),
        _curves(runs, "Held-out accuracy", held_out, accuracy, markers=True, y_range=UNIT),
    ]


def _agreement(runs: Sequence[RunData]) -> list[Panel]:
    kl = {
        "rollout_corr/kl": "k1",
        "rollout_corr/k3_kl": "k3",
        "rollout_corr/top_kl": "over top tokens",
    }
    size = {"rollout_corr/rollout_is_eff_sample_size": "ESS"}
    probe = {"sync/probe_abs_diff": "probe", "sync/probe_budget": "budget"}
    stale = "rollout_corr/stale/logp_abs_diff_mean"
    apart = {}
    if any(run.series(stale) for run in runs):
        apart["rollout_corr/logp_abs_diff_mean"] = "all tokens"
        apart[stale] = "old tokens"
        apart["sync/probe_abs_diff"] = "same version"
    tokens = sum(len(run.tokens.weights) for run in runs if run.tokens)
    ratio = (
        f"Learner over sampler probability of {tokens:,} recorded tokens; dashed: bounds of token "
        "weights (those of rows and turns act on products)."
    )
    acted = {
        "rollout_corr/rollout_is_ratio_fraction_high": "above the bound",
        "rollout_corr/rollout_is_ratio_fraction_low": "below",
        "rollout_corr/rollout_rs_masked_fraction": "rejected",
    }
    share = "Share of ratios outside the weight's bounds, and of tokens that rules reject"
    ages = "Mean |difference| of trained tokens, of old ones, and right after a sync"
    return [
        _curves(runs, "Mismatch KL", "KL(sampler, learner) per token", kl, sampled=True, **NATS),
        _curves(
            runs, "Effective sample size", "Of the applied weights, a share", size, sampled=True
        ),
        Panel("Importance ratio", ratio, figures.ratio_histogram(runs)),
        _curves(runs, "Effect of the correction", share, acted, sampled=True, from_zero=True),
        _curves(runs, "Logprob probe after sync", "Mean |difference|", probe, markers=True, **NATS),
        _curves(runs, "Numerics and staleness", ages, apart, sampled=True, markers=True, **NATS),
        *(
            Panel(
                f"Mismatch by {title}",
                f"Recorded tokens by {about}.",
                figures.mismatch_by(runs, cut, axis),
            )
            for cut, (title, about, axis) in MISMATCH_CUTS.items()
        ),
    ]


def _time(runs: Sequence[RunData]) -> list[Panel]:
    split = "Wall clock on the driver rank; phases do not overlap."
    sizes = {"sync/bytes": "sent", "sync/read_bytes": "read by a rank of an engine"}
    pause = {"sync/pause_s": "paused"}
    speed = {"perf/rollout_tokens_per_s": "tokens/s"}
    error = {"sync/quant_error_max": "worst layer"}
    return [
        Panel(
            "Where a step's time goes",
            split if len(runs) == 1 else "Mean step of each run.",
            figures.split(runs, "time", figures.TIME_PHASES),
            wide=True,
            sampled=False,
        ),
        Panel(
            "Who works when",
            "Some steps from the middle of the run.",
            figures.lanes(runs),
            wide=True,
            sampled=False,
        ),
        Panel(
            "Weight sync",
            "Its own phases.",
            figures.split(runs, "sync", figures.SYNC_PHASES),
            sampled=False,
        ),
        _curves(
            runs,
            "Weight sync size",
            "Each time",
            sizes,
            y_title="MiB",
            scale=2**-20,
            from_zero=True,
        ),
        _curves(runs, "Engines stand still", "In each sync", pause, y_title="s", from_zero=True),
        _curves(
            runs,
            "Rollout throughput",
            "Response tokens per second of generation",
            speed,
            sampled=True,
            smooth=True,
            first_step=1,
            from_zero=True,
        ),
        _curves(runs, "Quantization error", "Relative, the worst layer", error, from_zero=True),
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
    share = "Fraction of tokens"
    groups = "Of all generated groups: all responses right, all wrong, or some of both."
    return [
        _curves(runs, "Response length", "Mean, in tokens", length, from_zero=True),
        _curves(runs, "Entropy", "Mean over trained tokens, in nats", entropy, from_zero=True),
        _curves(runs, "Gradient norm", "Before clipping", norm, smooth=True, from_zero=True),
        _curves(runs, "Clipping and rejection", share, clipping, sampled=True, from_zero=True),
        Panel("Groups by difficulty", groups, figures.difficulty(runs)),
    ]
