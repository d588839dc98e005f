"""Slurm job of this process (time left, whether it continues, a rank's variables); count of its
processes that were killed for their memory, by the counters of control groups.
"""

import os
import re
import subprocess
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from megatron_rl.config import ConfigError

JOB = "SLURM_JOB_ID"
ASK_S = 5.0
GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
ANOTHER_ENDED = "another rank has ended; srun's own lines say which one, and how"


def seconds_left() -> float | None:
    """Return the seconds until the job's time limit; None if there is none, or it is unknown."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():
        return int(end) - time.time()
    with suppress(ValueError):
        return datetime.fromisoformat(_about_job().get("EndTime", "")).timestamp() - time.time()
    return None


def is_running() -> bool:
    """True if the job continues: Slurm sends SIGTERM when a job is to end, and also when another of
    its tasks has failed.
    """
    return _about_job().get("JobState") == "RUNNING"


def rank_environment() -> dict[str, str]:
    """Return torch's variables of a rank, from those that srun sets for a task."""
    if "MEGATRON_RL_RENDEZVOUS" not in os.environ:  # several nodes
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"--ranks slurm: {', '.join(missing)} not set; slurm/prologue.sh exports them"
            )
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_NTASKS"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
    }


def _about_job() -> dict[str, str]:
    if JOB not in os.environ:
        return {}
    ask = ["scontrol", "-o", "show", "job", os.environ[JOB]]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(ask, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
        return dict(re.findall(r"(\w+)=(\S*)", said))
    return {}


def memory_kills(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the number of processes of this control group that the kernel has killed for their
    memory; 0 if it is not counted.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # cgroup v1
            root = groups / "memory"
            name = "memory.oom_control"
        elif not controllers:
            root = groups
            name = "memory.events"
        else:
            continue
        # as visible from outside the group, or from inside
        for counter in (root / path.lstrip("/") / name, root / name):
            with suppress(OSError):
                if found := re.search(r"^oom_kill (\d+)$", counter.read_text(), re.M):
                    return int(found[1])
    return 0
