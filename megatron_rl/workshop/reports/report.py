"""report.html, a page about one run or several side by side: numbers, figures, alarms, answers,
cause of the end.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.plain_yaml import write_yaml
from megatron_rl.files import last_lines, write_whole
from megatron_rl.runs.alarms import RULES, Alarms, News
from megatron_rl.runs.causes import Cause
from megatron_rl.runs.console import duration
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.reports import pages
from megatron_rl.workshop.reports.charts import colour
from megatron_rl.workshop.reports.pages import Named
from megatron_rl.workshop.reports.run_data import RunData, config_differences, load_runs, readable
from megatron_rl.workshop.reports.sample_section import answers
from megatron_rl.workshop.reports.sections import sections, supervised

LOG_LINES = 25


def write_report(run_dirs: Sequence[Path], output: Path) -> list[str]:
    """Returns what of the directories cannot be read: the page is about the rest, and says so
    too.
    """
    runs = load_runs(run_dirs)
    write_whole(output, page(runs, output))
    return _problems(runs)


def page(runs: Sequence[RunData], output: Path | None = None) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return pages.page("report.html.j2", output, title=title, about=about(runs))


def about(runs: Sequence[RunData]) -> dict[str, Any]:
    """What the template of runs is filled with. Figures come first: they find what cannot be
    read.
    """
    drawn = sections(runs)
    first = runs[0]
    names = [Named(run.name, colour(n)) for n, run in enumerate(runs)]
    found = {
        "several": len(runs) > 1,
        "names": names,
        "state": str(first.status.get("state", "unknown")),
        "reason": str(first.status.get("reason") or ""),
        "setup": setup(first) if len(runs) == 1 else "",
        "causes": [cause for run in runs if (cause := _cause(run))],
        "numbers": headline_numbers(first),
        "summary": _summary(runs, names),
        "alarms": _alarms(runs, names),
        "differences": [
            [key, *map(_show, values)] for key, values in config_differences(runs).items()
        ],
        "sections": drawn,
        "answers": answers(first) if len(runs) == 1 else [],
        "appendix": [
            (run.name, write_yaml(dict(run.config)), json.dumps(run.env, indent=2)) for run in runs
        ],
    }
    return found | {"unreadable": _problems(runs)}


def headline_numbers(run: RunData) -> dict[str, str]:
    accuracy = run.series("eval/accuracy").finite
    step_time = run.total("time/step", 1)
    sync_time = run.total("time/sync", 1)
    throughput = run.median("perf/rollout_tokens_per_s")
    kl = run.median("rollout_corr/k3_kl")
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
    if supervised(run):
        meaningless = {"Rollout tokens/s", "Mismatch KL (k3)", "Effective sample size"}
    else:
        meaningless = set()
    return {label: value for label, value in numbers.items() if value and label not in meaningless}


def setup(run: RunData) -> str:
    """`describe_setup`, as far as a torn configuration holds it."""
    return readable(RunDir(run.path).config, lambda _: describe_setup(run), "", run.unreadable)


def describe_setup(run: RunData) -> str:
    """Formats, layout, correction and loss in one line."""
    sizes = {
        "TP": "tensor_parallel",
        "PP": "pipeline_parallel",
        "DP": "data_parallel",
        "EP": "expert_parallel",
    }
    sizes["CP"] = "context_parallel"
    layout = [f"{label}{run.setting(f'learner.{key}', 1)}" for label, key in sizes.items()]
    layout = [part for part in layout if not part.endswith("P1")] or ["on 1 rank"]
    sampler = " + ".join(
        dict.fromkeys("BF16" if one == "none" else str(one).upper() for one in _formats(run))
    )
    weight = run.setting("correction.weight", {})
    correction = "no correction"
    if weight.get("level", "none") != "none":
        low = weight.get("low")
        high = weight.get("high")
        bounds = (
            " to ".join(f"{bound:g}" for bound in (low, high) if bound is not None) or "unbounded"
        )
        correction = f"{weight['level']} weights, {weight.get('outside', 'truncate')} {bounds}"
    parts = [
        "/".join(Path(str(run.setting("model.path", ""))).parts[-2:]),
        f"sampler {sampler}",
        f"learner {str(run.setting('learner.precision', '')).upper()} {' '.join(layout)}",
        f"{run.setting('loss.name', '')} loss",
        correction,
    ]
    return " · ".join(part for part in parts if part.strip())


def _formats(run: RunData) -> list[Any]:
    return run.setting("sampler.fleet.formats", []) or [run.setting("quantization.format", "none")]


def _cause(run: RunData) -> dict[str, str] | None:
    """Why a run ended that nobody wanted to end, and the end of the log that says so."""
    cause = Cause.read(run.status.get("cause"))
    state = run.status.get("state")
    if cause is None or not (state == "failed" or (state == "stopped" and cause.name != "signal")):
        return None
    log = next(
        (log for log in run.logs() if cause.log.endswith(f"{log.parent.name}/{log.name}")), None
    )
    if log and state == "failed":
        lines = "\n".join(last_lines(log, LOG_LINES))
    else:
        lines = ""
    return {
        "title": f"{run.name}: {cause.what}",
        "paragraph": cause.paragraph(),
        "log": cause.log,
        "lines": lines,
    }


def _problems(runs: Sequence[RunData]) -> list[str]:
    return [
        f"{run.name}: {problem}" if len(runs) > 1 else problem
        for run in runs
        for problem in run.unreadable
    ]


def _summary(
    runs: Sequence[RunData], names: Sequence[Named]
) -> tuple[list[str], list[list[str | Named]]]:
    numbers = [headline_numbers(run) for run in runs]
    labels = list(dict.fromkeys(label for one in numbers for label in one))
    rows: list[list[str | Named]] = [
        [name, str(run.status.get("state", "")), *(one.get(label, "") for label in labels)]
        for name, run, one in zip(names, runs, numbers, strict=True)
    ]
    return ["run", "state", *labels], rows


class Episode(NamedTuple):
    raised: News
    cleared: int | None  # the step; None: it stood at the end

    @property
    def steps(self) -> str:
        if self.cleared is not None:
            return f"{self.raised.step} to {self.cleared}"
        return f"from {self.raised.step}"

    @property
    def row(self) -> list[str]:
        news = self.raised
        rule = RULES[self.raised.alarm]
        bound = f"{'below' if rule.below else 'above'} {news.bound:g}"
        return [news.alarm, self.steps, f"{news.value:.3g}", bound, rule.action]


def episodes(run: RunData) -> list[Episode]:
    """Alarms in the order in which they were raised, found anew in the metrics by the rules of
    today's code.
    """
    alarms = Alarms(run.setting("log.alarms", {}), _formats(run), sampled=not supervised(run))
    raised: dict[str, News] = {}
    found = []
    for line in run.lines:
        for news in alarms.after(line):
            if news.raised:
                raised[news.alarm] = news
            else:
                found.append(Episode(raised.pop(news.alarm), news.step))
    found += [Episode(news, None) for news in raised.values()]
    return sorted(found, key=lambda one: one.raised.step)


def _alarm_rows(run: RunData, _: Path) -> list[list[str]]:
    return [one.row for one in episodes(run)]


def _alarms(
    runs: Sequence[RunData], names: Sequence[Named]
) -> tuple[list[str], list[list[str | Named]]]:
    rows: list[list[str | Named]] = []
    for name, run in zip(names, runs, strict=True):
        found = readable(
            RunDir(run.path).config, partial(_alarm_rows, run), list[list[str]](), run.unreadable
        )
        rows += [[*([name] if len(runs) > 1 else []), *row] for row in found]
    return [
        *(["run"] if len(runs) > 1 else []),
        "alarm",
        "steps",
        "value",
        "bound",
        "what to do",
    ], rows


def _show(value: Any) -> str:
    return (
        "null"
        if value is None
        else json.dumps(value)
        if isinstance(value, (dict, list, bool))
        else str(value)
    )
