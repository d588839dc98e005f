"""report.html: one page about one run, or about several side by side. Self-contained: it opens without a network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import yaml
from plotly.offline import get_plotlyjs

from megatron_rl import report_figures as figures
from megatron_rl.console import duration
from megatron_rl.report_figures import PALETTE, curves
from megatron_rl.run_data import RunData, config_differences, load_runs

STYLE = Path(__file__).with_name("report.css")


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    figure: go.Figure | None
    wide: bool = False


def write_report(run_dirs: Sequence[Path], output: Path) -> None:
    runs = load_runs(run_dirs)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    partial.write_text(page(runs), encoding="utf-8")
    partial.replace(output)


def page(runs: Sequence[RunData]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    parts = [_headline(runs, title), _summary(runs), _differences(runs)]
    for heading, panels in _sections(runs):
        drawn = [panel for panel in panels if panel.figure is not None]
        if drawn:
            parts.append(f"<h2>{heading}</h2>\n<div class=grid>{''.join(map(_draw, drawn))}</div>")
    parts.append(_appendix(runs))
    body = "\n".join(filter(None, parts))
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{escape(title)}: report</title>\n"
        f"<meta name=viewport content='width=device-width'><style>{STYLE.read_text(encoding='utf-8')}</style>\n"
        f"<script>{get_plotlyjs()}</script></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def _sections(runs: Sequence[RunData]) -> list[tuple[str, list[Panel]]]:
    reward = next((name for run in runs if (name := run.first_of("reward/sampler_mean", "reward/mean"))), "reward/mean")
    about_reward = "All generated answers." if reward.endswith("sampler_mean") else "The answers that were trained on."
    unit = (-0.02, 1.02)
    estimate = {"reward/learner_estimate": "learner estimate"}
    rewards = {reward: "reward", **(estimate if any(run.series("reward/learner_estimate") for run in runs) else {})}
    mismatch = {"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"}
    probe = {"sync/probe_abs_diff": "probe", "sync/probe_budget": "budget"}
    clipping = {
        "loss/clip_fraction_high": "clipped above",
        "loss/clip_fraction_low": "clipped below",
        "rollout_corr/rollout_rs_masked_fraction": "rejected",
    }
    return [
        (
            "Learning",
            [
                Panel("Reward", f"{about_reward} Bold: running mean.", curves(runs, rewards, smooth=True)),
                Panel(
                    "Held-out accuracy",
                    "Greedy answers on the evaluation split.",
                    curves(runs, {"eval/accuracy": "accuracy"}, markers=True, y_range=unit),
                ),
            ],
        ),
        (
            "Sampler and learner",
            [
                Panel(
                    "Mismatch KL",
                    _dashes(runs, "KL(sampler, learner) per token, in nats", mismatch),
                    curves(runs, mismatch, y_title="nats", from_zero=True),
                ),
                Panel(
                    "Effective sample size",
                    "Of the applied weights, as a fraction of the tokens.",
                    figures.effective_sample_size(runs),
                ),
                Panel("Importance ratio", _about_ratio(runs), figures.ratio_histogram(runs)),
                Panel(
                    "Logprob probe after sync",
                    _dashes(runs, "Mean |difference| on fresh tokens", probe),
                    curves(runs, probe, y_title="nats", markers=True, from_zero=True),
                ),
                Panel(
                    "Mismatch by probability", "Recorded tokens, by how likely they were.", figures.by_probability(runs)
                ),
                Panel("Mismatch by position", "Recorded tokens, by place in the response.", figures.by_position(runs)),
            ],
        ),
        (
            "Time",
            [
                Panel(
                    "Where a step's time goes",
                    "Mean step of each run."
                    if len(runs) > 1
                    else "Wall clock on the driver rank; phases do not overlap.",
                    figures.time_split(runs),
                    wide=True,
                ),
                Panel("Weight sync", "Its own phases.", figures.sync_split(runs)),
                Panel(
                    "Weight sync size",
                    "Sent per step.",
                    curves(runs, {"sync/bytes": "MiB"}, y_title="MiB", scale=2**-20, from_zero=True),
                ),
                Panel(
                    "Rollout throughput",
                    "Response tokens per second of generation.",
                    curves(runs, {"perf/rollout_tokens_per_s": "tokens/s"}, smooth=True, first_step=1, from_zero=True),
                ),
                Panel(
                    "Quantization error",
                    "Relative, the worst layer.",
                    curves(runs, {"sync/quant_error_max": "worst layer"}, from_zero=True),
                ),
            ],
        ),
        (
            "Learner",
            [
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
                    _dashes(runs, "Fraction of tokens", clipping),
                    curves(runs, clipping, from_zero=True),
                ),
                Panel("Loss", "The one whose gradient was taken.", curves(runs, {"loss/total": "loss"}, smooth=True)),
                Panel(
                    "Groups kept",
                    "Groups with spread in their rewards, of all generated.",
                    curves(runs, {"rollout/groups_kept_fraction": "kept"}, y_range=unit),
                ),
            ],
        ),
    ]


def headline_numbers(run: RunData) -> dict[str, str]:
    accuracy = run.series("eval/accuracy").finite
    step_time, sync_time = run.total("time/step", 1), run.total("time/sync", 1)
    throughput, kl = run.median("perf/rollout_tokens_per_s"), run.median("rollout_corr/k3_kl")
    ess = run.median("rollout_corr/rollout_is_eff_sample_size")
    steps = int(run.lines[-1]["progress/step"]) if run.lines else 0
    planned = run.status.get("steps") or run.setting("run.steps", "?")
    numbers = {
        "Held-out accuracy": f"{accuracy[0]:.3f} → {accuracy[-1]:.3f}" if len(accuracy) > 1 else "",
        "Steps": f"{steps} of {planned}",
        "Wall time": duration(run.total("time/step")),
        "Rollout tokens/s": f"{throughput:,.0f}" if throughput is not None else "",
        "Mismatch KL (k3)": f"{kl:.2e}" if kl is not None else "",
        "Effective sample size": f"{ess:.1%}" if ess is not None else "",
        "Weight sync": f"{sync_time / step_time:.1%} of a step" if step_time and sync_time else "",
    }
    return {label: value for label, value in numbers.items() if value}


def describe_setup(run: RunData) -> str:
    """Formats, layout, correction and loss in one line."""
    sizes = {"TP": "tensor_parallel", "PP": "pipeline_parallel", "DP": "data_parallel", "EP": "expert_parallel"}
    layout = [f"{label}{run.setting(f'learner.{key}', 1)}" for label, key in sizes.items()]
    layout = [part for part in layout if not part.endswith("P1")] or ["on 1 rank"]
    quantization = str(run.setting("quantization.format", "none"))
    weight = run.setting("correction.weight", {})
    correction = "no correction"
    if weight.get("level", "none") != "none":
        low, high = weight.get("low"), weight.get("high")
        bounds = " to ".join(f"{bound:g}" for bound in (low, high) if bound is not None) or "unbounded"
        correction = f"{weight['level']} weights, {weight.get('outside', 'truncate')} {bounds}"
    model = Path(str(run.setting("model.path", ""))).name
    parts = [
        model,
        f"sampler {'BF16' if quantization == 'none' else quantization.upper()}",
        f"learner {str(run.setting('learner.precision', '')).upper()} {' '.join(layout)}",
        f"{run.setting('loss.name', '')} loss",
        correction,
    ]
    return " · ".join(part for part in parts if part.strip())


def _headline(runs: Sequence[RunData], title: str) -> str:
    if len(runs) == 1:
        run = runs[0]
        state = str(run.status.get("state", "unknown"))
        reason = str(run.status.get("reason") or "")
        about = escape(describe_setup(run))
        pill = f"<span class='pill {escape(state)}'>{escape(state)}</span>"
        why = f"<p>{escape(reason)}</p>" if reason else ""
        return f"<header><h1>{escape(title)} {pill}</h1><p>{about}</p>{why}</header>"
    chips = "".join(
        f"<span class=chip><i style='background:{_colour(number)}'></i>{escape(run.name)}</span>"
        for number, run in enumerate(runs)
    )
    return f"<header><h1>{escape(title)}</h1></header><nav>{chips}</nav>"


def _summary(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        cards = [
            f"<div class=card><span>{escape(label)}</span><b>{escape(value)}</b></div>"
            for label, value in headline_numbers(runs[0]).items()
        ]
        return f"<section class=cards>{''.join(cards)}</section>"
    numbers = [headline_numbers(run) for run in runs]
    labels = list(dict.fromkeys(label for one in numbers for label in one))
    rows = [
        [
            _named(number, run),
            escape(str(run.status.get("state", ""))),
            *(escape(one.get(label, "")) for label in labels),
        ]
        for number, (run, one) in enumerate(zip(runs, numbers, strict=True))
    ]
    return "<h2>Summary</h2>" + _table(["run", "state", *labels], rows)


def _differences(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return ""
    rows = [
        [f"<code>{escape(key)}</code>", *(f"<code>{escape(_show(value))}</code>" for value in values)]
        for key, values in config_differences(runs).items()
    ]
    if not rows:
        return "<h2>Configuration differences</h2><p>None: the runs have the same configuration.</p>"
    names = [_named(number, run) for number, run in enumerate(runs)]
    return "<h2>Configuration differences</h2>" + _table(["key", *names], rows)


def _appendix(runs: Sequence[RunData]) -> str:
    parts = ["<h2>Setup</h2>"]
    for run in runs:
        config = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
        parts.append(
            f"<details><summary>{escape(run.name)}: configuration</summary><pre>{escape(config)}</pre></details>"
            f"<details><summary>{escape(run.name)}: environment</summary>"
            f"<pre>{escape(json.dumps(run.env, indent=2))}</pre></details>"
        )
    return "".join(parts)


def _draw(panel: Panel) -> str:
    assert panel.figure is not None
    options: Mapping[str, Any] = {"displayModeBar": False, "responsive": True}
    plot = panel.figure.to_html(full_html=False, include_plotlyjs=False, config=options)
    return (
        f"<figure{' class=wide' if panel.wide else ''}><figcaption><b>{escape(panel.title)}</b>"
        f"<span>{escape(panel.about)}</span></figcaption>{plot}</figure>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    header = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=table><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"


def _named(number: int, run: RunData) -> str:
    return f"<span class=chip><i style='background:{_colour(number)}'></i>{escape(run.name)}</span>"


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def _show(value: Any) -> str:
    return "null" if value is None else json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


def _dashes(runs: Sequence[RunData], about: str, names: Mapping[str, str]) -> str:
    """With several runs the dash pattern tells quantities apart, and only these words say which is which."""
    present = [label for name, label in names.items() if any(run.series(name) for run in runs)]
    if len(runs) == 1 or len(present) < 2:
        return f"{about}."
    styles = [f"{dash}: {label}" for dash, label in zip(("solid", "dashed", "dotted"), names.values(), strict=False)]
    return f"{about} ({', '.join(styles)})."


def _about_ratio(runs: Sequence[RunData]) -> str:
    counts = [len(run.tokens.position) for run in runs if run.tokens is not None]
    return f"Learner over sampler probability of {sum(counts):,} recorded tokens."
