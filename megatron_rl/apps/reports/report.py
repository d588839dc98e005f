"""report.html, a page about one run or several side by side: numbers, figures, alarms, responses,
cause of the end.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.apps.reports import pages
from megatron_rl.apps.reports.charts import colour
from megatron_rl.apps.reports.pages import Named, Table
from megatron_rl.apps.reports.run_data import RunData, config_differences, load_runs, reading
from megatron_rl.apps.reports.sample_section import answers
from megatron_rl.apps.reports.sections import sections, supervised
from megatron_rl.config.plain_yaml import write_yaml
from megatron_rl.files import last_lines, write_atomic
from megatron_rl.tracking.alarms import RULES, AlarmEvent, Alarms
from megatron_rl.tracking.causes import Cause
from megatron_rl.tracking.console import duration
from megatron_rl.tracking.metrics_file import MISMATCH, SAMPLE_SIZE
from megatron_rl.tracking.run_dir import RunDir

LOG_LINES = 25
LAYOUT = {
    "TP": "tensor_parallel",
    "PP": "pipeline_parallel",
    "DP": "data_parallel",
    "EP": "expert_parallel",
    "CP": "context_parallel",
}
# medians over steps in the headline of a run whose responses were sampled: label, metric, format
OF_SAMPLER = (
    ("Median rollout tokens/s", "perf/rollout_tokens_per_s", ",.0f"),
    ("Median mismatch KL (k3)", MISMATCH, ".2e"),
    ("Median effective sample size", SAMPLE_SIZE, ".1%"),
)


def write_report(run_dirs: Sequence[Path], output: Path) -> list[str]:
    """Write the page; return what of the directories cannot be read, which the page lists too."""
    runs = load_runs(run_dirs)
    write_atomic(output, page(runs))
    return _problems(runs)


def page(runs: Sequence[RunData]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return pages.page("report.html.j2", title=title, about=about(runs))


def about(runs: Sequence[RunData]) -> dict[str, Any]:
    """Values of the template of runs. `unreadable` comes last: figures find what cannot be read."""
    first = runs[0]
    names = [Named(run.name, colour(n)) for n, run in enumerate(runs)]
    return {
        "several": len(runs) > 1,
        "names": names,
        "state": str(first.status.get("state", "unknown")),
        "reason": str(first.status.get("reason") or ""),
        "setup": setup(first),
        "causes": [cause for run in runs if (cause := _cause(run))],
        "numbers": headline_numbers(first),
        "summary": _summary(runs, names),
        "alarms": _alarms(runs, names),
        "differences": [
            [key, *(value if isinstance(value, str) else json.dumps(value) for value in values)]
            for key, values in config_differences(runs).items()
        ],
        "sections": sections(runs),
        "answers": answers(first) if len(runs) == 1 else [],
        "appendix": [
            (
                run.name,
                write_yaml(dict(run.config)),
                json.dumps(run.env, indent=2),
            )
            for run in runs
        ],
        "unreadable": _problems(runs),
    }


def headline_numbers(run: RunData) -> dict[str, str]:
    accuracy = run.series("eval/accuracy").finite
    step_time = run.total("time/step", 1)
    sync_time = run.total("time/sync", 1)
    planned = run.status.get("steps") or run.setting("run.steps", "?")
    numbers = {}
    if len(accuracy) > 1:
        numbers["Held-out accuracy"] = f"{accuracy[0]:.3f} → {accuracy[-1]:.3f}"
    numbers["Steps"] = f"{run.steps} of {planned}"
    numbers["Wall time"] = duration(run.total("time/step"))
    for label, metric, form in OF_SAMPLER:
        value = run.median(metric)
        if value is not None and not supervised(run):
            numbers[label] = f"{value:{form}}"
    if step_time and sync_time:
        numbers["Weight sync"] = f"{sync_time / step_time:.1%} of a step"
    return numbers


def setup(run: RunData) -> str:
    """Formats, layout, correction and loss in one line, as far as the configuration is readable."""
    with reading(RunDir(run.path).config, run.unreadable):
        return _setup(run)
    return ""


def _setup(run: RunData) -> str:
    sizes = {label: run.setting(f"learner.{key}", 1) for label, key in LAYOUT.items()}
    layout = [f"{label}{size}" for label, size in sizes.items() if size != 1] or ["on 1 rank"]
    formats = dict.fromkeys("BF16" if one == "none" else one.upper() for one in _formats(run))
    weight = run.setting("correction.weight", {})
    correction = "no correction"
    if weight.get("level", "none") != "none":
        bounds = [weight[side] for side in ("low", "high") if weight.get(side) is not None]
        reach = " to ".join(f"{bound:g}" for bound in bounds) or "unbounded"
        correction = f"{weight['level']} weights, {weight.get('outside', 'truncate')} {reach}"
    parts = [
        "/".join(Path(str(run.setting("model.path", ""))).parts[-2:]),
        f"sampler {' + '.join(formats)}",
        f"learner {str(run.setting('learner.precision', '')).upper()} {' '.join(layout)}",
        f"{run.setting('loss.name', '')} loss",
        correction,
    ]
    return " · ".join(part for part in parts if part.strip())


def _formats(run: RunData) -> list[Any]:
    return run.setting("sampler.formats", []) or [run.setting("quantization.format", "none")]


def _cause(run: RunData) -> dict[str, str] | None:
    """Cause of a failure, with the end of its log."""
    cause = Cause.read(run.status.get("cause"))
    if cause is None:
        return None
    lines: list[str] = []
    if run.status.get("state") == "failed":
        log = Path(cause.log)  # where the run was; its folder may have been moved since
        lines = last_lines(run.path / "logs" / log.parent.name / log.name, LOG_LINES)
    return {
        "title": f"{run.name}: {cause.name}",
        "paragraph": cause.paragraph(),
        "log": cause.log,
        "lines": "\n".join(lines),
    }


def _problems(runs: Sequence[RunData]) -> list[str]:
    return [
        f"{run.name}: {problem}" if len(runs) > 1 else problem
        for run in runs
        for problem in run.unreadable
    ]


def _summary(runs: Sequence[RunData], names: Sequence[Named]) -> Table:
    numbers = [headline_numbers(run) for run in runs]
    labels = list(dict.fromkeys(label for one in numbers for label in one))
    rows: list[list[str | Named]] = [
        [
            name,
            str(run.status.get("state", "")),
            *(one.get(label, "") for label in labels),
        ]
        for name, run, one in zip(names, runs, numbers, strict=True)
    ]
    return ["run", "state", *labels], rows


def _alarms(runs: Sequence[RunData], names: Sequence[Named]) -> Table:
    rows: list[list[str | Named]] = []
    for name, run in zip(names, runs, strict=True):
        raised: list[tuple[AlarmEvent, str]] = []
        with reading(RunDir(run.path).config, run.unreadable):
            raised = raised_alarms(run)
        for news, steps in raised:
            rule = RULES[news.alarm]
            bound = f"{'below' if rule.below else 'above'} {news.bound:g}"
            rows.append([name, news.alarm, steps, f"{news.value:.3g}", bound, rule.action])
    return ["run", "alarm", "steps", "value", "bound", "action"], rows


def raised_alarms(run: RunData) -> list[tuple[AlarmEvent, str]]:
    """Alarms as they were raised, with their steps, by the present rules over the metrics."""
    alarms = Alarms(run.setting("log.alarms", {}), _formats(run), sampled=not supervised(run))
    found: list[tuple[AlarmEvent, str]] = []
    active: dict[str, int] = {}  # alarm -> its place
    for line in run.lines:
        for news in alarms.after(line):
            if news.raised:
                active[news.alarm] = len(found)
                found.append((news, f"from {news.step}"))
            else:
                place = active.pop(news.alarm)
                first = found[place][0]
                found[place] = (first, f"{first.step} to {news.step}")
    return found
