"""Is `megatron-rl plan --precision --fit` right? Steps of nine combinations of size and lengths,
planned and measured.

    python tools/bench/precision.py FOLDER [--steps 14] [--processor] [NAME ...]

NAME: a combination, such as small-long; all of them where none is named. Two more sizes, narrow and
wide, whose lengths are no combination's, give the costs. For each model a run in BF16, in INT8 and
in FP8 stand side by side and take their steps in turn. What FOLDER holds already is not made again,
so that a command that was cut off goes on, and several (`taskset -c 0 ...`) may make a part each. A
combination's seconds are the lower quartiles of its steps, as `--fit` reads them: the plan knows
its lengths, and none of its times.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from step import PROCESSOR, Layout, Workload, ours, write_model

from megatron_rl.preflight.machine import detect
from megatron_rl.runs.console import table
from megatron_rl.workshop.planner.fit import Costs, Measured, fitted, measured

FORMATS = ("none", "int8", "fp8")
WITHIN = 0.15
VOCABULARY = 64
SIZES = {"small": (128, 4), "middle": (256, 4), "large": (384, 6)}  # width, layers
MIXES = {  # tokens of a prompt, of an answer at most, and whether a token ends it: then they differ
    "short": (16, 32, False),
    "long": (16, 128, True),
    "prompts": (96, 16, False),
}
COSTS_FROM = {"narrow": (192, 4, 32, 48, False), "wide": (320, 6, 32, 48, False)}
Three = Mapping[str, Measured]


def workload(width: int, layers: int, prompt: int, answer: int, ends: bool) -> Workload:
    head = 32 if width < 256 else 64
    heads = max(width // head, 2) // 2 * 2
    shape = (width, layers, heads, heads // 2, head, 3 * width, VOCABULARY)
    return Workload(
        *shape, prompts=4, samples=8, prompt_tokens=prompt, response_tokens=answer, ends=ends
    )


def combinations() -> Iterator[tuple[str, Workload]]:
    for name, shape in COSTS_FROM.items():
        yield name, workload(*shape)
    for size, mix in itertools.product(SIZES, MIXES):
        yield f"{size}-{mix}", workload(*SIZES[size], *MIXES[mix])


def in_turn(work: Workload, folder: Path, steps: int) -> None:
    """A step of each run, round after round."""
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was cut off
    folder.mkdir(parents=True)
    model = write_model(folder / "model", work)
    with ExitStack() as stack:
        sides = []
        for format in FORMATS:
            (folder / format).mkdir()
            side, _ = stack.enter_context(
                ours(work, folder / format, model, Layout(1, 1, 1), format)
            )
            sides.append(side)
        for _ in range(steps):
            for side in sides:
                side.step()
    (folder / "done").touch()


def step_s(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def row(name: str, runs: Three, costs: Costs) -> tuple[list[str], list[float]]:
    """Cells of a combination: ratios to BF16 of a step and of its rollout; the errors of the steps'
    ratios.
    """
    planned = {format: costs.phases(runs[format].case) for format in FORMATS}
    cells = [name, f"{step_s(runs['none'].seconds):.3f}", f"{step_s(planned['none']):.3f}"]
    errors = []
    for format in FORMATS[1:]:
        was, said = (
            step_s(of[format]) / step_s(of["none"])
            for of in ({key: run.seconds for key, run in runs.items()}, planned)
        )
        errors.append(said / was - 1)
        rolled = runs[format].seconds["rollout"] / runs["none"].seconds["rollout"]
        cells += [f"{was:.3f}", f"{said:.3f}", f"{errors[-1]:+.1%}"]
        cells += [f"{rolled:.3f}", f"{planned[format]['rollout'] / planned['none']['rollout']:.3f}"]
    return cells, errors


def misplaced(runs: Three, costs: Costs) -> int:
    """Pairs of formats that differ by more than 15 %, and that the plan has the other way round."""
    was = {format: step_s(run.seconds) for format, run in runs.items()}
    said = {format: step_s(costs.phases(run.case)) for format, run in runs.items()}
    pairs = [(one, two) for one in FORMATS for two in FORMATS if was[one] > was[two] * (1 + WITHIN)]
    return sum(said[one] <= said[two] for one, two in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--steps", type=int, default=14, help="of each run; the first two are left out"
    )
    parser.add_argument(
        "--processor", action="store_true", help="seconds of processors, where others are at work"
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_intermixed_args()
    if options.processor:
        os.environ[PROCESSOR] = "1"
    machine = detect()
    found = {}
    for name, work in combinations():
        folder = options.folder.resolve() / name
        if name in (options.names or [name]) and not (folder / "done").exists():
            in_turn(work, folder, options.steps)
        if (folder / "done").exists():
            found[name] = {
                format: measured(folder / format / "ours", machine) for format in FORMATS
            }
    if not {*COSTS_FROM} < {*found}:
        print(
            f"made {', '.join(found)}; {', '.join(COSTS_FROM)} and a combination are needed for a "
            "plan"
        )
        return
    costs = fitted([run for name in COSTS_FROM for run in found[name].values()])
    rows = {name: row(name, runs, costs) for name, runs in found.items() if name not in COSTS_FROM}
    of = [
        f"{format}{what}"
        for format in ("INT8", "FP8")
        for what in (", step", " planned", "", ", rollout", " planned")
    ]
    print("\n".join(table(("", "BF16, s", "planned", *of), [cells for cells, _ in rows.values()])))
    errors = [abs(error) for _, each in rows.values() for error in each]
    wrong = sum(misplaced(found[name], costs) for name in rows)
    within = sum(error <= WITHIN for error in errors)
    print(
        f"{within} of {len(errors)} ratios within {WITHIN:.0%}, the worst off by "
        f"{max(errors):.1%}; {wrong} misplaced"
    )


if __name__ == "__main__":
    main()
