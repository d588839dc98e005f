"""Prints the tables of keys, metrics and alarms for the documentation: `python tools/reference_tables.py metrics`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from megatron_rl.config.reference import entries
from megatron_rl.config.schema import Config, Format
from megatron_rl.config.shape import keys_of
from megatron_rl.runs.alarms import RULES, Rule
from megatron_rl.runs.metrics import METRICS

GROUPS: dict[str, str] = {
    "progress": "How far the run is.",
    "reward": "What the answers scored. The policy that is scored is the *sampler's*: see `reward/learner_estimate`.",
    "eval": "What the sampler answers on data.eval; a named set has `eval/NAME/accuracy` and so on.",
    "rollout": "What was generated.",
    "session": "With an environment: how the conversations went ([environments.md](environments.md)).",
    "rollout_corr": (
        "How far the sampler and the learner disagree, and what the correction did about it. Names that verl also "
        "has mean the same thing here. p and mu are the learner's and the sampler's logprob of a sampled token, "
        "d = p - mu, rho = exp(d); A the advantage. Every exponent is clamped to [-20, 20]. With correction.anchor: "
        "sampler only means over tokens are logged, with the policy's own logprob for p."
    ),
    "loss": "The policy loss of the learner. With several minibatches per step: their mean.",
    "optim": "The optimizer.",
    "sync": "Handing the new weights to the sampler.",
    "time": (
        "Wall-clock seconds of a step on the driver rank. `time/step` is the whole; the phases do not overlap and "
        "add up to it together with `time/other`."
    ),
    "perf": "Throughput.",
}


def config() -> str:
    """docs/config.md"""
    lines = [
        "# Configuration keys",
        "",
        "*For whoever writes a recipe, or asks what a line of one does.*",
        "",
        "Every key of a recipe: what it takes, what it is unless it is set, a value that it may have, what it does.",
        "`null` in YAML is no value. `megatron-rl train RECIPE --explain optim.decay` says the same of one key (or of",
        "a section), what it is in a recipe, and which file or override has set it; `--print-config` prints all keys",
        "of a recipe, `--dry-run` what it changes of its base. Which recipes there are, and how one is made:",
        "[recipes.md](recipes.md). Correction, advantage and loss at length: [corrections.md](corrections.md).",
        "Rules about several keys at once are said when they are broken.",
        "",
        "This page is generated from the comments, types and bounds in `megatron_rl/config/`:",
        "`python tools/reference_tables.py config > docs/config.md`.",
    ]
    for section in keys_of(Config):
        lines += [
            "",
            f"## {section}",
            "",
            "| key | takes | default | example | what it does |",
            "|---|---|---|---|---|",
        ]
        for one in (one for one in entries() if one.name.startswith(f"{section}.")):
            cells = (f"`{one.name}`", one.takes, f"`{one.default}`", f"`{one.example}`", one.told)
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """docs/metrics.md"""
    lines = [
        "# Metrics",
        "",
        "*For whoever reads a curve and asks what it is.*",
        "",
        "Every name that a run may log, to `metrics.jsonl`, W&B and the report. This page is generated from the table",
        "in `megatron_rl/runs/metrics.py`: `python tools/reference_tables.py metrics > docs/metrics.md`.",
        "",
        "*parts* says how the values of a step's parts (minibatches, generation calls) become one.",
    ]
    for group, about in GROUPS.items():
        lines += ["", f"## {group}/", "", about, "", "| name | unit | parts | meaning |", "|---|---|---|---|"]
        rows = (one for one in METRICS.values() if one.group == group)
        lines += [f"| `{one.name}` | {one.unit} | {one.reducer} | {one.meaning} |" for one in rows]
    return "\n".join(lines) + "\n"


def alarms() -> str:
    """The table of docs/alarms.md, and what to do about each."""
    lines = ["| alarm | looks at | raised | steps |", "|---|---|---|---|"]
    for alarm, rule in RULES.items():
        raised = f"{'below' if rule.below else 'above'} {_bounds(rule)}"
        lines.append(f"| `{alarm}` | {rule.looks_at} | {raised} | {rule.steps} |")
    return "\n".join([*lines, "", *(f"- `{alarm}`: {rule.action}" for alarm, rule in RULES.items())]) + "\n"


def _bounds(rule: Rule) -> str:
    if not isinstance(rule.bound, Mapping):
        return f"{rule.bound:g}"
    by_bound: dict[float, list[str]] = {}
    for one, bound in rule.bound.items():
        by_bound.setdefault(bound, []).append("BF16" if one == Format.none else str(one))
    return "; ".join(f"{bound:g} ({', '.join(names)})" for bound, names in by_bound.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"config": config, "metrics": metrics, "alarms": alarms}
    parser.add_argument("table", choices=tables)
    sys.stdout.write(tables[parser.parse_args().table]())
