"""What replaying the sampler's experts costs: steps of recipes/experts.yaml with and without it, in turn.

    python tools/bench/router_replay.py [--rounds 3] [--steps 12]

Each round is a run of both, the other one first every second time; the time of a step is the median of a run without
its first two. Prints the ratio of the medians, and that of the CPU time that all processes of the runs took, where a
machine with other work tells less by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from megatron_rl.runs.metrics_file import read_metrics
from megatron_rl.workshop.quickstart import TASKS

OWN = ("learner.router=own", "sampler.routed_experts=false")
CHOICES: dict[str, tuple[str, ...]] = {"own": OWN, "replay": ()}
LEFT_OUT = 2


def run(folder: Path, name: str, overrides: tuple[str, ...], steps: int) -> tuple[float, float]:
    """Seconds of a step, and of all processors."""
    recipe = TASKS["experts"].recipe
    words = [f"run.name={name}", f"run.root={folder}", "run.if_exists=archive", f"run.steps={steps}", *overrides]
    data = [f"data.{key}={folder / 'data' / file}.jsonl" for key, file in (("train", "train"), ("eval", "test"))]
    start = [f"model.path={folder / 'data' / 'model'}", "model.init=random", "eval.every=0", "checkpoint.every=0"]
    before = sum(os.times()[2:4])
    command = [sys.executable, "-m", "megatron_rl.cli", "train", str(recipe), *words, *data, *start]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = read_metrics(folder / name / "metrics.jsonl")
    return median(line["time/step"] for line in lines[1 + LEFT_OUT :]), sum(os.times()[2:4]) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        TASKS["experts"].write(folder / "data")
        found: dict[str, list[tuple[float, float]]] = {choice: [] for choice in CHOICES}
        for number in range(options.rounds):
            for choice in list(CHOICES)[:: -1 if number % 2 else 1]:
                found[choice].append(run(folder, choice, CHOICES[choice], options.steps))
    seconds, cpu = ({choice: [one[part] for one in each] for choice, each in found.items()} for part in (0, 1))
    ratios = {
        "step": median(seconds["replay"]) / median(seconds["own"]),
        "cpu": median(cpu["replay"]) / median(cpu["own"]),
    }
    print(json.dumps({"seconds of a step": seconds, "CPU seconds of a run": cpu, "replay over own": ratios}, indent=2))


if __name__ == "__main__":
    main()
