"""Writes the generated pages and tables of the docs: configuration, command line, metrics, alarms,
other frameworks. `python tools/reference_tables.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.apps.translation.table import projects, table
from megatron_rl.cli import _parser
from megatron_rl.config.reference import entries
from megatron_rl.config.schema import Config, Format
from megatron_rl.config.shape import keys_of
from megatron_rl.tracking.alarms import RULES, Rule
from megatron_rl.tracking.metrics import METRICS

GROUPS: dict[str, str] = {
    "progress": "Progress of the run.",
    "reward": "Rewards of responses sampled from the *sampler's* policy; see `reward/learner_estimate`.",
    "eval": "Responses on data.eval, greedy by default (eval.temperature); a named set has `eval/NAME/...`.",
    "rollout": "Generated responses.",
    "session": "Conversations with an environment ([environments](../guides/environments.md)).",
    "rollout_corr": (
        "Mismatch of sampler and learner, and the effect of the correction. verl's names, "
        "except that exponents are clamped to [-20, 20] and `rollout_is_*` are of the applied "
        "weights. p and mu: logprob of a sampled token by the learner and by the sampler; "
        "d = p - mu, rho = exp(d); A: the advantage. "
        "With `correction.anchor: sampler` only means over tokens are logged, and p is of the "
        "updated policy."
    ),
    "loss": "Policy loss; with several minibatches per step, their mean.",
    "center": "Score centering (correction.center): means over tokens with a centering term.",
    "optim": "Optimizer.",
    "router": "Mixture of experts with `learner.router: replay`.",
    "sync": "Weight sync.",
    "time": (
        "Wall-clock seconds of a step on rank 0. The phases and `time/other` add up to `time/step`."
    ),
    "perf": "Throughput.",
}
SHORT = {
    "a whole number or null": "integer or null",
    "a whole number": "integer",
    "a finite number or null": "number or null",
    "a finite number": "number",
    "one of ": "",
    "a section or null": "mapping or null",
    "a section": "mapping",
    "a list": "list",
    "true or false": "bool",
    "or more": "and above",
}


def config() -> str:
    """docs/reference/config.md"""
    lines = [
        "# Configuration reference",
        "",
        "Look up a key of a recipe: its type, default and meaning. On the command line,",
        "`megatron-rl train RECIPE --explain optim.decay` prints the same for one key or section, "
        "with its value in",
        "a recipe and the file that set it; `--print-config` prints all keys of a recipe, "
        "`--dry-run` its changes to",
        "its base. Recipes: [guide](../guides/recipes.md). Corrections: "
        "[concept](../concepts/rollout-correction.md).",
        "",
        "Generated from `megatron_rl/config/`: `python tools/reference_tables.py`.",
    ]
    for section in keys_of(Config):
        lines += [
            "",
            f"## {section}",
            "",
            "| key | type | default | description |",
            "|---|---|---|---|",
        ]
        for one in (one for one in entries() if one.name.startswith(f"{section}.")):
            takes = one.takes
            for long, short in SHORT.items():
                takes = takes.replace(long, short)
            cells = (f"`{one.name}`", takes, f"`{one.default}`", one.description)
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """docs/reference/metrics.md"""
    lines = [
        "# Metrics",
        "",
        "Look up a name in `metrics.jsonl`, W&B or the report. Where to look first: "
        "[monitoring](../guides/monitoring.md).",
        "",
        "Generated from `megatron_rl/tracking/metrics.yaml`: `python tools/reference_tables.py`.",
    ]
    for group, about in GROUPS.items():
        lines += ["", f"## {group}/", "", about, "", "| name | unit | meaning |", "|---|---|---|"]
        rows = (one for one in METRICS.values() if one.name.startswith(f"{group}/"))
        lines += [f"| `{one.name}` | {one.unit} | {one.meaning} |" for one in rows]
    return "\n".join(lines) + "\n"


def cli() -> str:
    """docs/reference/cli.md"""
    lines = [
        "# Command line",
        "",
        "Look up a command of `megatron-rl` and its options. Every command takes `--help` and "
        "`--log-level debug|info|warning|error`.",
        "",
        "Generated from the commands: `python tools/reference_tables.py`.",
    ]
    commands = subcommands()
    about = {one.dest: one.help for one in commands._choices_actions}
    for name, parser in commands.choices.items():
        usage = " ".join(
            one.metavar or one.dest for one in parser._actions if not one.option_strings
        )
        lines += [
            "",
            f"## megatron-rl {name}",
            "",
            f"`megatron-rl {name} {usage}`: {about[name]}",
            "",
        ]
        for one in parser._actions:
            words = ", ".join(one.option_strings) or str(one.metavar or one.dest)
            if words in ("-h, --help", "--log-level"):
                continue
            if one.option_strings and one.choices:
                words += f" {'|'.join(map(str, one.choices))}"
            elif one.option_strings and one.nargs != 0:
                words += f" {one.metavar or one.dest.upper()}"
            lines.append(f"- `{words}`: {parser._get_formatter()._expand_help(one)}")
    return "\n".join(lines) + "\n"


def subcommands() -> Any:
    """Return argparse's action that holds the commands of `megatron-rl`."""
    actions = _parser()._actions
    return next(one for one in actions if isinstance(one, argparse._SubParsersAction))


def alarms() -> str:
    """Table of the alarms, and the action for each."""
    lines = ["| alarm | looks at | raised | steps |", "|---|---|---|---|"]
    for alarm, rule in RULES.items():
        raised = f"{'below' if rule.below else 'above'} {_bounds(rule)}"
        lines.append(f"| `{alarm}` | {rule.looks_at} | {raised} | {rule.steps} |")
    return (
        "\n".join(
            [
                *lines,
                "",
                *(f"- `{alarm}`: {rule.action}" for alarm, rule in RULES.items()),
            ]
        )
        + "\n"
    )


def _bounds(rule: Rule) -> str:
    if not isinstance(rule.bound, Mapping):
        return f"{rule.bound:g}"
    by_bound: dict[float, list[str]] = {}
    for one, bound in rule.bound.items():
        by_bound.setdefault(bound, []).append("BF16" if one == Format.none else str(one))
    return "; ".join(f"{bound:g} ({', '.join(names)})" for bound, names in by_bound.items())


SETTINGS = {
    "model": "=model",
    "prompts per step": "rollout.prompts_per_step",
    "responses per prompt": "rollout.samples_per_prompt",
    "prompt tokens": "rollout.max_prompt_tokens",
    "response tokens": "rollout.max_response_tokens",
    "temperature": "rollout.temperature",
    "learning rate": "optim.lr",
    "upper clip": "loss.clip_high",
    "KL coefficient": "loss.kl_coef",
    "steps": "run.steps",
}


def coming_from() -> str:
    """The table of docs/guides/coming-from-another-framework.md"""
    lines = ["| framework | version | main keys |", "|---|---|---|"]
    for name in projects():
        rules = table(name)
        link = f"[{name}](../../megatron_rl/apps/translation/tables/{name}.yaml)"
        found = {
            label: next((row.theirs for row in rules.rows if key in row.to), "")
            for label, key in SETTINGS.items()
        }
        keys = "; ".join(f"{label}: `{theirs}`" for label, theirs in found.items() if theirs)
        lines.append(f"| {link} | {rules.version} | {keys} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Return the generated pages, and those with a generated table, by path."""
    docs = Path(__file__).parents[1] / "docs"
    found = {
        docs / "reference" / f"{name}.md": page()
        for name, page in {"config": config, "metrics": metrics, "cli": cli}.items()
    }
    for path, name, content in (
        ("guides/monitoring.md", "alarms", alarms()),
        ("guides/coming-from-another-framework.md", "frameworks", coming_from()),
    ):
        text = (docs / path).read_text(encoding="utf-8")
        found[docs / path] = with_table(text, name, content)
    return found


def with_table(text: str, name: str, content: str) -> str:
    """Replace the table between `<!-- NAME -->` and `<!-- /NAME -->`."""
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    assert begin and end, f"no table {name}"
    return f"{before}{begin}{content}{end}{after}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
