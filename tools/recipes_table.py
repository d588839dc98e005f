"""recipes/README.md: the table of all recipes, from what each of them is.

python tools/recipes_table.py            # writes it
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from grid import is_grid

from megatron_rl.config import cluster, load
from megatron_rl.config.fleet import uses_servers
from megatron_rl.config.schema import Config, Sleep
from megatron_rl.models.layout import Layout

RECIPES = Path(__file__).parents[1] / "recipes"
ABOVE = """# Recipes

A recipe is a small YAML file over [conf/](../conf): `base` is an algorithm at its published settings, `cluster` a
machine, `model`, `data`, `quantization` and `correction` are presets, and what stands below them is the recipe's own.
Every value with its source: [conf/](../conf). Each file opens with what it reproduces, what to expect, and its gate.

```sh
megatron-rl train recipes/dapo_fp8.yaml --print-config        # all that it says, resolved
megatron-rl train recipes/dapo_fp8.yaml --dry-run --on own    # would it run on its cluster?
slurm/submit slurm/dapo_fp8.sbatch optim.lr=5e-7              # checked, then queued
```

Without a GPU every recipe takes two small steps, with a model of the same family and the toy's data:

```sh
megatron-rl toy data/tiny --like Qwen3-8B
megatron-rl train recipes/dapo_fp8.yaml cluster=cpu
```

`make test-recipes` does that for all of them. **None of those for GPUs has been run on one yet**; docs/status.md says
how each part was proven.
"""
GRIDS = (
    "\n[first_comparison.yaml](first_comparison.yaml) is a grid of minutes, for a first "
    "comparison of corrections;\n[evidence.yaml](evidence.yaml) is a grid of runs of counting.yaml: "
    "[docs/evidence.md](../docs/evidence.md);\n[one_arithmetic.yaml](one_arithmetic.yaml) one of "
    "the quickstart: [docs/one_arithmetic.md](../docs/one_arithmetic.md).\n"
)
BELOW = "\nThis page is written by `python tools/recipes_table.py`, and compared by a test.\n"
COLUMNS = ("recipe", "model", "nodes x GPUs", "learner", "sampler", "weights", "correction", "run")


def table() -> str:
    real = []
    toys = []
    for path in sorted(path for path in RECIPES.glob("*.yaml") if not is_grid(path)):
        name, machine = cluster(path)
        (toys if name is None else real).append(_row(path, load(path), machine))
    lines = [
        ABOVE,
        "## For GPUs\n",
        *_lines(real),
        "\n## Toys, on two cores without a GPU\n",
        *_lines(toys),
    ]
    return "\n".join([*lines, GRIDS, BELOW])


def _lines(rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows)]


def _row(path: Path, config: Config, machine: str | None) -> tuple[str, ...]:
    sampler = config.sampler
    layout = Layout.from_config(config.learner)
    axes = (
        ("TP", layout.tp),
        ("PP", layout.pp),
        ("CP", layout.cp),
        ("EP", layout.ep),
        ("DP", layout.dp),
    )
    servers = f"{sampler.engines} servers of " if uses_servers(sampler) else ""
    if sampler.sleep != Sleep.none:
        shared = ", colocated"
    else:
        shared = ""
    shared += (
        f", staleness up to {config.rollout.max_staleness}" if config.rollout.max_staleness else ""
    )
    fp8 = ", learner FP8" if config.learner.megatron.get("fp8") else ""
    said = re.search(r"^# Run: (.*)", path.read_text(encoding="utf-8"), re.M)
    return (
        f"[{path.stem}]({path.name})",
        Path(config.model.path).name if machine else Path(config.data.train).parent.name,
        " x ".join(machine.split("x")[:2]) if machine else "",
        " ".join(f"{name}{count}" for name, count in axes if count > 1) or "one rank",
        f"{servers}TP{sampler.tensor_parallel}{shared}",
        f"{'BF16' if config.quantization.format == 'none' else config.quantization.format.upper()}{fp8}",
        _correction(config),
        said[1].rstrip(".") if said else ("not yet" if machine else "in the tests"),
    )


def _correction(config: Config) -> str:
    from megatron_rl.config.load import preset_name

    weight = config.correction.weight
    return (
        preset_name("correction", config.correction)
        or f"{weight.level} weight up to {weight.high:g}"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    (RECIPES / "README.md").write_text(table(), encoding="utf-8")
