"""sbatch line of a plan (`megatron-rl plan --sbatch`), and sbatch options of a checked recipe, for
slurm/submit.

python -m megatron_rl.apps.planner.slurm SCRIPT RECIPE [key=value ...]     its options by line,
or all that is wrong
"""

import os
import shlex
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.memory.engine import GIB
from megatron_rl.apps.planner.plan import Plan, plan
from megatron_rl.config import ConfigError, cluster, read
from megatron_rl.config.evaluation import held_out
from megatron_rl.config.schema import Format
from megatron_rl.preflight import checks
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named

LONGEST_JOB_S = 24 * 3600
SHORTEST_JOB_MINUTES = 60
WARNING_S = 300  # before its end a job gets USR1: `--signal` in slurm/*.sbatch
SPARE = 1.25  # of the planned time, and of the planned memory
CORES = 8  # of a task


def sbatch(recipe: Path, overrides: Sequence[str], made: Plan) -> str:
    """Return the sbatch command with notes. One task is one rank of the learner."""
    config = made.case.config
    roles = made.case.roles
    servers = config.sampler.dedicated_nodes
    seconds = _seconds(made)
    if servers:
        script = "slurm/dapo_split.sbatch"
    elif config.quantization.format == Format.int8:
        script = "slurm/dapo_int8.sbatch"
    else:
        script = "slurm/dapo_fp8.sbatch"
    given = f"RECIPE={shlex.quote(str(recipe))} "
    if overrides:
        if all(len(one.split()) == 1 for one in overrides):
            words = " ".join(overrides)
        else:
            words = "\n".join([*overrides, ""])
        given += f"OVERRIDES={shlex.quote(words)} "
    lines = [f"{given}sbatch {shlex.join(options(made))} {script}"]
    if seconds > LONGEST_JOB_S:
        lines.append(
            f"# about {seconds / LONGEST_JOB_S:.1f} jobs of 24 hours, one after another: the "
            "script queues itself again"
        )
    if roles.distant and not servers:
        lines.append(
            f"# before it: {roles.distant} server(s) of {roles.engine_tp} GPUs on other nodes, "
            f"each `megatron-rl serve {recipe} --host 0.0.0.0`, at sampler.addresses"
        )
    return "\n".join(lines)


def options(made: Plan) -> list[str]:
    """Servers of the job's own have nodes of it; those that are given by address are elsewhere."""
    config = made.case.config
    roles = made.case.roles
    gpus = os.environ.get("SITE_GPUS") or "gres=gpu"
    return [
        f"--job-name={config.run.name}",
        f"--nodes={roles.nodes if config.sampler.dedicated_nodes else roles.learner_nodes}",
        f"--ntasks-per-node={roles.tasks_per_node}",
        f"--cpus-per-task={CORES}",
        f"--{gpus}{':' if '=' in gpus else '='}{roles.per_node}",
        f"--mem={_memory(made)}",
        f"--time={_clock(_seconds(made))}",
    ]


def for_submission(script: str, recipe: Path, overrides: Sequence[str]) -> list[str]:
    """The options that a checked recipe needs; raises one error that lists all that is wrong with
    it.
    """
    config, found = read(recipe, overrides)
    name, where = cluster(recipe, overrides)
    machine = named(where) if where else None
    problems = [*found, *checks.problems(config, on=machine, complete=True)]
    made = None
    if machine is None:
        problems.append(
            f"cluster: {name} names no machine to ask Slurm for; use another, such as cluster=1n8g"
        )
    elif not problems:
        made = plan(Case(config, read_card(config.model.folder), machine))
        problems += made.problems
    if ("split" in Path(script).name) != config.sampler.dedicated_nodes:
        if config.sampler.dedicated_nodes:
            other = "slurm/dapo_split.sbatch"
        else:
            other = "slurm/dapo_int8.sbatch or dapo_fp8.sbatch"
        problems.append(
            f"{script}: sampler.dedicated_nodes is {config.sampler.dedicated_nodes}; submit {other}"
        )
    if made is None or problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return options(made)


def _memory(made: Plan) -> str:
    """Memory to ask for on each node: 0 is all that it has."""
    given = os.environ.get("SITE_MEM") or "0"
    if given == "plan":
        return f"{ceil(SPARE * sum(made.host.values()) / GIB)}G"
    return given


def _seconds(made: Plan) -> float:
    """Return the duration of a run; an evaluation is taken to be as long as a rollout."""
    if not made.time:
        return LONGEST_JOB_S
    config = made.case.config
    working = made.time.step * config.run.steps
    if config.eval.every and held_out(config):
        working += (config.run.steps / config.eval.every + 2) * made.time.rollout
    return working * SPARE + config.sampler.start_timeout_s + WARNING_S


def _clock(seconds: float) -> str:
    """Time limit as Slurm reads it: quarters of an hour, at most that of the longest job."""
    minutes = min(max(ceil(seconds / 900) * 15, SHORTEST_JOB_MINUTES), LONGEST_JOB_S // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


if __name__ == "__main__":
    try:
        print("\n".join(for_submission(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])))
    except ConfigError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
