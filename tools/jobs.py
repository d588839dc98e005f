"""The runs of a grid as jobs of a cluster, and one more for the report."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

import starts
from grid import Experiment, tags

# site lines that are empty mean: as the cluster does by itself
SBATCH = """source slurm/site.env; mkdir -p runs/slurm
for name in "${!SBATCH_@}"; do [[ -n ${!name} ]] || unset "$name"; done; exec sbatch "$@" """


def queue(
    left: Sequence[Experiment],
    runs: Mapping[Experiment, list[str]],
    seeds: Sequence[int | None],
    options: argparse.Namespace,
    argv: Sequence[str],
) -> int:
    """A job for each run, and one for the report after all of them. Nothing is queued where one is
    refused.
    """
    script = str(options.slurm)
    given = shlex.split(options.sbatch)
    if starts.missing(options.grid, options.root, seeds):
        words = shlex.join(
            [
                "sbatch",
                "slurm/report.sh",
                *sys.argv[:1],
                *argv,
                "--starts",
            ]
        )
        print(
            f"error: the warm starts are still to be made, in a job of their own: {words}",
            file=sys.stderr,
        )
        return 2
    check_one = [sys.executable, "-m", "megatron_rl.apps.planner.slurm", script]
    if [
        run
        for run in left
        if subprocess.run([*check_one, *runs[run]], stdout=subprocess.DEVNULL).returncode
    ]:
        return 2
    jobs: list[str] = []
    for experiment in left:
        recipe, *overrides = runs[experiment]
        words = ["slurm/submit", script, f"recipe={recipe}", *overrides, *given]
        named = os.environ | tags(experiment, options.grid.axes)
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=named)
        queued = re.search(r"^job (\d+) is queued", done.stdout, re.M)
        if done.returncode or queued is None:
            print(
                f"error: {experiment.name} was not queued; queued are the jobs "
                f"{' '.join(jobs) or 'none'}",
                file=sys.stderr,
            )
            return 1
        jobs.append(queued[1])
        print(f"job {queued[1]}  {experiment.name}", flush=True)
    words = [f"--dependency=afterany:{':'.join(jobs)}"] if jobs else []
    words += [f"--job-name={options.grid.group}_report", "--parsable", "slurm/report.sh"]
    words += [*sys.argv[:1], *argv, "--summary"]
    done = subprocess.run(
        ["bash", "-c", SBATCH, "sbatch", *words], stdout=subprocess.PIPE, text=True
    )
    print(f"job {done.stdout.strip().partition(';')[0]}  {options.output}")
    return int(done.returncode != 0)
