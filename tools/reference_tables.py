"""Prints tables of the docs: keys, metrics, alarms, other projects. `python
tools/reference_tables.py metrics`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from megatron_rl.apps.translation.table import Row, Table, projects, shared, table
from megatron_rl.config.bounds import as_written
from megatron_rl.config.reference import entries
from megatron_rl.config.schema import Config, Format
from megatron_rl.config.shape import keys_of
from megatron_rl.tracking.alarms import RULES, Rule
from megatron_rl.tracking.metrics import METRICS

GROUPS: dict[str, str] = {
    "progress": "How far the run is.",
    "reward": "What the answers scored. The policy that is scored is the *sampler's*: see `reward/learner_estimate`.",
    "eval": "What the sampler answers on data.eval; a named set has `eval/NAME/accuracy` and so on.",
    "rollout": "What was generated.",
    "session": "With an environment: how the conversations went ([environments.md](environments.md)).",
    "rollout_corr": (
        "How far the sampler and the learner disagree, and what the correction did about it. "
        "Names that verl also has mean the same thing here. p and mu are the learner's and the "
        "sampler's logprob of a sampled token, d = p - mu, rho = exp(d); A the advantage. Every "
        "exponent is clamped to [-20, 20]. With correction.anchor: sampler only means over tokens "
        "are logged, with the policy's own logprob for p."
    ),
    "loss": "The policy loss of the learner. With several minibatches per step: their mean.",
    "optim": "The optimizer.",
    "router": "Mixtures of experts, with `learner.router=replay`: tokens go where the sampler has sent them.",
    "sync": "Handing the new weights to the sampler.",
    "time": (
        "Wall-clock seconds of a step on the driver rank. `time/step` is the whole; the phases do "
        "not overlap and add up to it together with `time/other`."
    ),
    "perf": "Throughput.",
}


def config() -> str:
    """docs/config.md"""
    lines = [
        "# Configuration keys",
        "",
        "*For authors and readers of recipes.*",
        "",
        "Every key of a recipe: what it takes, what it is unless it is set, a value that it may "
        "have, what it does.",
        "`null` in YAML is no value. `megatron-rl train RECIPE --explain optim.decay` says the "
        "same of one key (or of",
        "a section), what it is in a recipe, and which file or override has set it; "
        "`--print-config` prints all keys",
        "of a recipe, `--dry-run` what it changes of its base. Which recipes there are, and how "
        "one is made:",
        "[recipes.md](recipes.md). Correction, advantage and loss at length: "
        "[corrections.md](corrections.md).",
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
            cells = (
                f"`{one.name}`",
                one.takes,
                f"`{one.default}`",
                f"`{one.example}`",
                one.description,
            )
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """docs/metrics.md"""
    lines = [
        "# Metrics",
        "",
        "*For readers of a run's curves.*",
        "",
        "Every name that a run may log, to `metrics.jsonl`, W&B and the report. This page is "
        "generated from the table",
        "in `megatron_rl/tracking/metrics.yaml`: `python tools/reference_tables.py metrics > "
        "docs/metrics.md`.",
        "",
        "*parts* says how the values of a step's parts (minibatches, generation calls) become one.",
    ]
    for group, about in GROUPS.items():
        lines += [
            "",
            f"## {group}/",
            "",
            about,
            "",
            "| name | unit | parts | meaning |",
            "|---|---|---|---|",
        ]
        rows = (one for one in METRICS.values() if one.name.startswith(f"{group}/"))
        lines += [f"| `{one.name}` | {one.unit} | {one.reducer} | {one.meaning} |" for one in rows]
    return "\n".join(lines) + "\n"


def alarms() -> str:
    """The table of docs/alarms.md, and what to do about each."""
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


COMING_FROM = """# Coming from another project

*For users with a recipe of verl, slime, OpenRLHF, NeMo-RL, SkyRL, AReaL, TRL or prime-rl.*

```sh
megatron-rl translate verl run_qwen3_8b_megatron.sh -o recipes/mine.yaml
megatron-rl translate slime run-qwen3-4B.sh -o recipes/mine.yaml NUM_GPUS=8   # a variable that the script lacks
megatron-rl plan recipes/mine.yaml --on own
megatron-rl toy data/tiny --like Qwen3-8B
megatron-rl train recipes/mine.yaml cluster=cpu                                # two steps of it, made small
```

The file may be a script with its command line (assignments, arrays, sums, plain tests and cases are followed), YAML
with the files that its `defaults` names, TOML, or a Python script that makes a `GRPOConfig`. Every key of it is
accounted for: it is translated, has no counterpart (listed with the reason), is not needed here, or is unknown and
listed as that. A key that is one of these tables' but for a letter is an error, and so is a variable that nothing
sets: give it as `NAME=value`. Their keys can be given in the same way, over those of the file, before `-o` or behind
it; what is neither a variable that the script reads nor a key is an error. Their defaults count too. Where several of
theirs make one of ours, the comments say what was done. Numbers of nodes, GPUs, answers and tokens that are none are
errors. Sizes of learner and sampler are theirs; where they do not fit the cluster, `megatron-rl plan --suggest` names
those that do.

Nothing in the file is run, and the environment is not read, but for `HOME`, `USER` and `PWD` in a script. In YAML
`${section.key}`, `${oc.select:key,default}` and plain arithmetic (`${mul:2,3}`) are followed; any other `${...}`, such
as `${oc.env:NAME}`, is a value that the file does not hold, as is the output of a command in a script: an error where
it is needed. A file, with all that it takes over and expands, has the limits of a recipe: 1 MiB, 64 files, 10,000
values, 32 levels. Text of it is escaped in the recipe, which is read back before it is kept.

The correction is translated exactly or refused ([corrections.md](corrections.md#from-another-project)). Without `-o`
it alone is printed, as a recipe's section, also for fireworks (the cookbook).

This page is generated from the tables that the command reads, `megatron_rl/apps/translation/tables/`:
`python tools/reference_tables.py coming_from > docs/coming_from.md`.
"""


def coming_from() -> str:
    """docs/coming_from.md"""
    return "".join([COMING_FROM, *(_project(table(name)) for name in projects())])


def _project(rules: Table) -> str:
    lines = [
        "",
        f"## {rules.project}",
        "",
        f"{rules.about[0].upper()}{rules.about[1:]} ({rules.version}).",
        "",
    ]
    lines += ["| theirs | there by default | here |", "|---|---|---|"]
    lines += [
        f"| {_names(row)} | {_said(row.default)} | {_here(row)} |" for row in rules.rows if row.to
    ]
    lines += ["", "No counterpart, where it is on:", ""]
    by_reason: dict[str, list[str]] = {}
    for row in rules.rows:
        if not row.to:
            by_reason.setdefault(row.why, []).append(_names(row))
    lines += [f"- {', '.join(names)}: {why}" for why, names in by_reason.items()]
    lines += ["", "Not needed here:", ""]
    lines += [
        f"- {why}: {', '.join(f'`{key}`' for key in keys)}"
        for why, keys in rules.not_needed.items()
    ]
    return "\n".join([*lines, ""])


def _names(row: Row) -> str:
    return f"`{row.theirs}`" + (
        f" (was {', '.join(f'`{one}`' for one in row.former)})" if row.former else ""
    )


def _said(value: object) -> str:
    if value is None:
        return ""
    return f"`{as_written(value)}`"


def _here(row: Row) -> str:
    ours = ", ".join(
        f"`{key}`" if not key.startswith("=") else shared()["facts"][key[1:]] for key in row.to
    )
    words = [
        f"{as_written(key)} → {_word(value)}"
        for key, value in {**(row.words or {}), **row.instead}.items()
    ]
    only = [f"with `{name}`" for name in (row.when, row.when_loss) if name] + (
        [f"without `{row.unless}`"] if row.unless else []
    )
    return "; ".join(
        [
            ours,
            *([", ".join(words)] if words else []),
            *only,
        ]
    )


def _word(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{key.removeprefix('=')}: {as_written(one)}" for key, one in value.items())
            or "as it is"
        )
    return as_written(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tables = {"config": config, "metrics": metrics, "alarms": alarms, "coming_from": coming_from}
    parser.add_argument("table", choices=tables)
    sys.stdout.write(tables[parser.parse_args().table]())
