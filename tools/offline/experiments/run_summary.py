"""Seconds and memory of a run by phase, and its recompilations, from what recipe.sh has left.

    run_summary.py OUT NAME

Memory is nvidia-smi's, the most seen in each phase of the last step but one; `plan` has what it
should have been. A recompilation is counted by the function that torch compiled again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

SHOWN = (
    "eval/accuracy",
    "perf/rollout_tokens_per_s",
    "perf/update_mfu",
    "perf/device_memory_gib",
)
RECOMPILED = re.compile(r"Recompiling function (\S+)")


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # the last one of a run that was killed
            continue
    return found


def step_lines(steps: list[dict[str, Any]]) -> list[str]:
    phases = sorted({key for step in steps for key in step if key.startswith("time/")})
    lines = []
    for step in steps:
        times = [f"{key[5:]} {step[key]:.2f}" for key in phases if step.get(key, 0.0) >= 0.005]
        shown = [f"{key[5:]} {step[key]:.4g}" for key in SHOWN if key in step]
        lines.append(f"step {step['progress/step']:.0f}: {', '.join(times)} s; {', '.join(shown)}")
    return lines


def memory_lines(out: Path, name: str) -> list[str]:
    samples = []
    path = out / f"{name}.memory.csv"
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            moment, used = line.split(", ")
            when = datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            samples.append((when, float(used) / 1024))
        except ValueError:
            continue
    lanes = read_lines(out / f"{name}.timeline.jsonl")
    if not samples or not lanes:
        return []
    most: dict[str, float] = {}
    for phase, begin, end in lanes[-2:][0]["spans"]:
        inside = [gib for when, gib in samples if begin <= when <= end]
        if inside:
            most[phase] = max(most.get(phase, 0.0), *inside)
    if lanes[0]["spans"]:
        first = lanes[0]["spans"][0][1]
    else:
        first = samples[-1][0]
    before = [gib for when, gib in samples if when < first]
    if before:
        most["start"] = max(before)
    return ["GiB by nvidia-smi: " + ", ".join(f"{phase} {gib:.1f}" for phase, gib in most.items())]


def recompiled_lines(out: Path, name: str) -> list[str]:
    path = out / f"{name}.recompiled"
    text = path.read_text(errors="replace") if path.is_file() else ""
    counts = Counter(RECOMPILED.findall(text))
    each = ", ".join(f"{function} {count}" for function, count in counts.most_common())
    return [f"recompilations: {counts.total()} {each}".rstrip()]


def summarize(out: Path, name: str) -> str:
    steps = [line for line in read_lines(out / f"{name}.metrics.jsonl") if "time/step" in line]
    lines = step_lines(steps) or ["no step was finished"]
    return "\n".join(
        [
            *lines,
            *memory_lines(out, name),
            *recompiled_lines(out, name),
        ]
    )


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("name")
    options = parser.parse_args()
    print(summarize(options.out, options.name))


if __name__ == "__main__":
    main()
