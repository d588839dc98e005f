"""report.html: one page about one run, or about several side by side. Self-contained: it opens without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from megatron_rl.config.plain_yaml import write_yaml
from megatron_rl.files import last_lines, write_whole
from megatron_rl.runs.causes import Cause
from megatron_rl.runs.console import duration
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.reports import alarm_section as report_alarms
from megatron_rl.workshop.reports import sample_section as report_samples
from megatron_rl.workshop.reports.figures import PALETTE
from megatron_rl.workshop.reports.run_data import RunData, config_differences, load_runs, readable
from megatron_rl.workshop.reports.sections import Panel, sections, supervised

LOG_LINES = 25


def write_report(run_dirs: Sequence[Path], output: Path) -> list[str]:
    """Returns what of the directories cannot be read: the page is about the rest, and says so too."""
    runs = load_runs(run_dirs)
    write_whole(output, page(runs))
    return _problems(runs)


def page(runs: Sequence[RunData]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return document(title, body(runs, title))


def body(runs: Sequence[RunData], title: str) -> str:
    drawn, head = sections(runs), _headline(runs, title)  # they find what cannot be read
    alarms = _alarms(runs)
    parts = [head, *map(_cause, runs), _unreadable(runs), _summary(runs), alarms, _differences(runs)]
    parts += [section(heading, panels) for heading, panels in drawn.items() if panels]
    parts += [report_samples.section(runs), _appendix(runs)]
    return "\n".join(filter(None, parts))


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
    meaningless = {"Rollout tokens/s", "Mismatch KL (k3)", "Effective sample size"} if supervised(run) else set()
    return {label: value for label, value in numbers.items() if value and label not in meaningless}


def describe_setup(run: RunData) -> str:
    """Formats, layout, correction and loss in one line."""
    sizes = {"TP": "tensor_parallel", "PP": "pipeline_parallel", "DP": "data_parallel", "EP": "expert_parallel"}
    layout = [f"{label}{run.setting(f'learner.{key}', 1)}" for label, key in sizes.items()]
    layout = [part for part in layout if not part.endswith("P1")] or ["on 1 rank"]
    formats = run.setting("sampler.fleet.formats", []) or [run.setting("quantization.format", "none")]
    sampler = " + ".join(dict.fromkeys("BF16" if one == "none" else str(one).upper() for one in formats))
    weight = run.setting("correction.weight", {})
    correction = "no correction"
    if weight.get("level", "none") != "none":
        low, high = weight.get("low"), weight.get("high")
        bounds = " to ".join(f"{bound:g}" for bound in (low, high) if bound is not None) or "unbounded"
        correction = f"{weight['level']} weights, {weight.get('outside', 'truncate')} {bounds}"
    model = "/".join(Path(str(run.setting("model.path", ""))).parts[-2:])
    parts = [
        model,
        f"sampler {sampler}",
        f"learner {str(run.setting('learner.precision', '')).upper()} {' '.join(layout)}",
        f"{run.setting('loss.name', '')} loss",
        correction,
    ]
    return " · ".join(part for part in parts if part.strip())


def setup(run: RunData) -> str:
    """`describe_setup`, as far as a torn configuration holds it."""
    return readable(RunDir(run.path).config, lambda _: describe_setup(run), "", run.unreadable)


def _headline(runs: Sequence[RunData], title: str) -> str:
    if len(runs) == 1:
        run = runs[0]
        state = str(run.status.get("state", "unknown"))
        reason = str(run.status.get("reason") or "")
        about = escape(setup(run))
        pill = f"<span class='pill {escape(state)}'>{escape(state)}</span>"
        why = f"<p>{escape(reason)}</p>" if reason else ""
        return f"<header><h1>{escape(title)} {pill}</h1><p>{about}</p>{why}</header>"
    chips = "".join(_named(number, run) for number, run in enumerate(runs))
    return f"<header><h1>{escape(title)}</h1></header><nav>{chips}</nav>"


def _cause(run: RunData) -> str:
    """Why a run ended that nobody wanted to end, and the end of the log that says so."""
    cause = Cause.read(run.status.get("cause"))
    state = run.status.get("state")
    if cause is None or not (state == "failed" or (state == "stopped" and cause.name != "signal")):
        return ""
    log = next((log for log in run.logs() if cause.log.endswith(f"{log.parent.name}/{log.name}")), None)
    lines = "\n".join(last_lines(log, LOG_LINES)) if log and state == "failed" else ""
    shown = f"<details><summary>The end of {escape(cause.log)}</summary><pre>{escape(lines)}</pre></details>"
    return (
        f"<section class=cause><h2>{escape(run.name)}: {escape(cause.what)}</h2><p>{escape(cause.paragraph())}</p>"
        f"{shown if lines else ''}</section>"
    )


def _alarms(runs: Sequence[RunData]) -> str:
    several = len(runs) > 1
    rows = []
    for number, run in enumerate(runs):
        nothing: list[Sequence[str]] = []
        found = readable(RunDir(run.path).config, partial(_alarm_rows, run), nothing, run.unreadable)
        rows += [[*([_named(number, run)] if several else []), *map(escape, row)] for row in found]
    head = [*(["run"] if several else []), *report_alarms.HEAD]
    return "<h2>Alarms</h2>" + table(head, rows, "table wraps") if rows else ""


def _alarm_rows(run: RunData, _: Path) -> list[Sequence[str]]:
    return list(report_alarms.rows(run))


def _unreadable(runs: Sequence[RunData]) -> str:
    """What of torn folders is not on this page."""
    items = "".join(f"<li>{escape(one)}</li>" for one in _problems(runs))
    return f"<section class=unreadable><h2>Not readable</h2><ul>{items}</ul></section>" if items else ""


def _problems(runs: Sequence[RunData]) -> list[str]:
    return [f"{run.name}: {problem}" if len(runs) > 1 else problem for run in runs for problem in run.unreadable]


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
    return "<h2>Summary</h2>" + table(["run", "state", *labels], rows)


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
    return "<h2>Configuration differences</h2>" + table(["key", *names], rows)


def _appendix(runs: Sequence[RunData]) -> str:
    parts = ["<h2>Setup</h2>"]
    for run in runs:
        config = write_yaml(dict(run.config))
        parts.append(
            f"<details><summary>{escape(run.name)}: configuration</summary><pre>{escape(config)}</pre></details>"
            f"<details><summary>{escape(run.name)}: environment</summary>"
            f"<pre>{escape(json.dumps(run.env, indent=2))}</pre></details>"
        )
    return "".join(parts)


def _named(number: int, run: RunData) -> str:
    return chip(run.name, colour(number))


def _show(value: Any) -> str:
    return "null" if value is None else json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)


STYLE = Path(__file__).with_name("report.css")


def document(title: str, body: str) -> str:
    """Self-contained: it opens without a network."""
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{escape(title)}: report</title>\n"
        f"<meta name=viewport content='width=device-width'><style>{STYLE.read_text(encoding='utf-8')}</style>\n"
        f"<script>{get_plotlyjs()}</script></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def section(heading: str, panels: Sequence[Panel]) -> str:
    return f"<h2>{heading}</h2>\n<div class=grid>{''.join(map(_draw, panels))}</div>"


def _draw(panel: Panel) -> str:
    assert panel.figure is not None
    options: Mapping[str, Any] = {"displayModeBar": False, "responsive": True}
    plot = panel.figure.to_html(full_html=False, include_plotlyjs=False, config=options)
    return (
        f"<figure{' class=wide' if panel.wide else ''}><figcaption><b>{escape(panel.title)}</b>"
        f"<span>{escape(panel.about)}</span></figcaption>{plot}</figure>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], style: str = "table") -> str:
    header = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='{style}'><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"


def chip(name: str, colour: str) -> str:
    return f"<span class=chip><i style='background:{colour}'></i>{escape(name)}</span>"


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]
