"""The sbatch line that a plan needs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.schema import Config, Format
from megatron_rl.preflight.plan.plan import Plan

LONGEST_JOB_S = 24 * 3600
SPARE = 1.25  # of the planned time
CORES = 8  # of a task


def sbatch(recipe: Path, overrides: Sequence[str], config: Config, plan: Plan) -> str:
    """One task is one rank of the learner; servers on other nodes are jobs of their own."""
    roles = plan.roles
    script = "slurm/dapo_int8.sbatch" if config.quantization.format == Format.int8 else "slurm/dapo_fp8.sbatch"
    wanted = plan.time.step * config.run.steps * SPARE if plan.time else LONGEST_JOB_S
    options = [
        f"--job-name={config.run.name}",
        f"--nodes={roles.learner_nodes}",
        f"--ntasks={roles.learner}",
        f"--ntasks-per-node={roles.tasks_per_node}",
        f"--cpus-per-task={CORES}",
        f"--gres=gpu:{roles.per_node}",
        f"--time={_clock(min(wanted, LONGEST_JOB_S))}",
    ]
    given = f"RECIPE={shlex.quote(str(recipe))} "
    if overrides:
        given += f"OVERRIDES={shlex.quote(' '.join(overrides))} "
    lines = [f"{given}sbatch {' '.join(options)} {script}"]
    if wanted > LONGEST_JOB_S:
        lines.append(f"# about {wanted / LONGEST_JOB_S:.1f} jobs of 24 hours, one after another: run.if_exists=resume")
    if roles.distant:
        lines.append(
            f"# before it: {roles.distant} server(s) of {roles.engine_tp} GPUs on other nodes, each `megatron-rl serve "
            f"{recipe} --host 0.0.0.0`, at sampler.fleet.addresses"
        )
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    minutes = max(int(seconds // 60) + 1, 10) if seconds < LONGEST_JOB_S else LONGEST_JOB_S // 60
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
