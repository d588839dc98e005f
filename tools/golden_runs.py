"""Short runs of two commits on this machine, compared: metrics and ledgers line for line, exported
weights byte for byte.

    python tools/golden_runs.py BEFORE [AFTER] [--cases quickstart fleet ...]

A refactoring leaves all of them equal. Each commit is checked out into a worktree of its own; warm
starts are made once, by BEFORE. Wall-clock metrics are left out. A fleet's metrics depend on which
server answers: of that one the ledger is compared, and metrics that differ are counted.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
WARM_STARTS = ("toy", "tools", "experts")
WALL_CLOCK = re.compile(r"^(time|perf)/|_s$|seconds|memory")


@dataclass(frozen=True)
class Case:
    """A recipe with overrides. `then` are overrides of a second start, which resumes the run."""

    recipe: str
    overrides: tuple[str, ...] = ()
    then: tuple[str, ...] = ()
    reproducible: bool = True


CASES = {
    "quickstart": Case("quickstart"),
    "pp2": Case("quickstart_pp2"),
    "fleet": Case("quickstart_fleet", ("rollout.dynamic_sampling=false",), reproducible=False),
    "lora": Case("quickstart_lora"),
    "tools": Case("tools"),
    "experts": Case("experts", ("learner.router=own",)),
    "replay": Case("experts"),
    "ahead": Case("quickstart", ("rollout.max_staleness=1", "rollout.dynamic_sampling=false")),
    "resume": Case("quickstart", ("run.steps=3",), then=("run.steps=6", "run.if_exists=resume")),
    "sft": Case("toy_sft", ("eval.every=5",)),
    "fp8": Case("quickstart_fp8"),
    "cp2": Case("quickstart", ("learner.tensor_parallel=1", "learner.context_parallel=2")),
}


class RunFailed(Exception):
    """A run that ended with an error."""


def main() -> int:
    """Exit status 1 if anything differs."""
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="golden-") as temporary:
        folder = arguments.folder or Path(temporary)
        before = _checked_out(arguments.before, folder / "before")
        after = _checked_out(arguments.after, folder / "after")
        try:
            equal = _compared(arguments.cases, before, after)
        finally:
            _remove(after)
            if arguments.folder is None:
                _remove(before)
    print(f"{equal} of {len(arguments.cases)} equal")
    return int(equal < len(arguments.cases))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", help="commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="commit (default: HEAD)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--folder", type=Path, help="keeps the runs of BEFORE there, for the next comparison"
    )
    return parser


def _checked_out(commit: str, folder: Path) -> Path:
    if not folder.exists():
        command = ["git", "worktree", "add", "-q", "--detach", folder, commit]
        subprocess.run(command, cwd=REPOSITORY, check=True)
    return folder


def _remove(tree: Path) -> None:
    subprocess.run(
        ["git", "worktree", "remove", "--force", tree],
        cwd=REPOSITORY,
        check=True,
    )


def _compared(cases: Sequence[str], before: Path, after: Path) -> int:
    """Number of cases without a difference."""
    for task in WARM_STARTS:
        if not (before / "runs" / f"{task}_sft" / "model").exists():
            print(f"warm start: {task}", flush=True)
            _run(before, "quickstart", "--task", task, "run.steps=1")
    shutil.copytree(before / "data", after / "data")
    for task in WARM_STARTS:
        model = Path("runs") / f"{task}_sft" / "model"
        shutil.copytree(before / model, after / model)
    equal = 0
    for name in cases:
        found = list(_differences(name, CASES[name], before, after))
        equal += not found
        print(f"{name}: {'DIFFERS' if found else 'equal'}", flush=True)
        for line in found:
            print(f"  {line}")
    return equal


def _differences(name: str, case: Case, before: Path, after: Path) -> Iterator[str]:
    run = f"golden_{name}"
    left = before / "runs" / run
    right = after / "runs" / run
    try:
        if not left.exists():
            _train(before, run, case)
        _train(after, run, case)
    except RunFailed as error:
        yield str(error)
        return
    differing = list(_differing_metrics(left / "metrics.jsonl", right / "metrics.jsonl"))
    if case.reproducible:
        yield from differing
    else:
        print(f"  {name}: {len(differing)} metrics differ")
    if (left / "ledger.jsonl").read_bytes() != (right / "ledger.jsonl").read_bytes():
        yield "ledger.jsonl"
    if case.reproducible and _weights(left) != _weights(right):
        yield "exported weights"


def _train(tree: Path, run: str, case: Case) -> None:
    common = (f"run.name={run}", "run.steps=6", "eval.every=3", "checkpoint.export_hf=true")
    recipe = f"recipes/{case.recipe}.yaml"
    _run(tree, "train", recipe, *common, *case.overrides)
    if case.then:
        _run(tree, "train", recipe, *common, *case.then)


def _run(tree: Path, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megatron_rl.cli", *arguments]
    done = subprocess.run(
        command,
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        text = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        raise RunFailed(f"{tree.name}: {' '.join(arguments)}\n{text}")


def _differing_metrics(before: Path, after: Path) -> Iterator[str]:
    """Metrics with other values, each named once, with the first step at which they differ. Those
    that only one of the commits has are printed, and are no difference.
    """
    left = [json.loads(line) for line in before.read_text().splitlines()]
    right = [json.loads(line) for line in after.read_text().splitlines()]
    if len(left) != len(right):
        yield f"{len(left)} lines of metrics, {len(right)} after"
    names = [set().union(*lines) for lines in (left, right)]
    print(f"  removed: {sorted(names[0] - names[1])}, added: {sorted(names[1] - names[0])}")
    left_out = names[0] ^ names[1]
    for old, new in zip(left, right, strict=False):
        for name in sorted((old.keys() | new.keys()) - left_out):
            if not WALL_CLOCK.search(name) and old.get(name) != new.get(name):
                left_out.add(name)
                values = f"{old.get(name)}, {new.get(name)} after"
                yield f"{name} at step {old.get('progress/step')}: {values}"


def _weights(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "model").glob("*.safetensors")}


if __name__ == "__main__":
    sys.exit(main())
