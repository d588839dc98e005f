"""plan.json in a run's directory: what was planned of it, for the report to draw beside what was measured."""

from __future__ import annotations

import json
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Config
from megatron_rl.files import write_whole
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import Machine
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.planner.phases import PHASES
from megatron_rl.workshop.planner.plan import Plan, plan


def keep(config: Config, machine: Machine, run: RunDir) -> None:
    """What cannot be planned, or written, is left out: a run needs none of it."""
    try:
        made = plan(config, read_card(str(config.model.folder)), machine)
        write_whole(run.plan, json.dumps(picture(made)))
    except (ConfigError, ValueError, LookupError, OSError):
        return


def picture(made: Plan) -> dict[str, Any]:
    """Bytes of a GPU (or of a host's process) by phase and part, and seconds of a step where they are known."""
    return {
        "memory": [
            {"of": f"{one.what}: {one.kind} ({one.gpus})", "limit": one.limit, "phases": one.phases}
            for one in made.memory
        ],
        "seconds": {phase: getattr(made.time, phase) for phase in PHASES} if made.time else None,
    }
