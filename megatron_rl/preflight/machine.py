"""What this machine can run, found out without importing torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Device


@dataclass(frozen=True)
class Machine:
    kind: Device  # cpu | cuda
    name: str
    capability: float | None = None  # CUDA compute capability
    gpus: int = 0  # that this job sees; 0: not known


def detect(wanted: Device = Device.auto) -> Machine:
    """The machine a run uses; `run.device=cuda` without a usable GPU is refused."""
    gpu = None if wanted == Device.cpu else _gpu()
    if gpu is None and wanted == Device.cuda:
        raise ConfigError("run.device: cuda, but no CUDA device is usable here; set run.device=cpu or auto")
    if gpu is not None and "+cpu" in metadata.version("torch"):
        if wanted == Device.cuda:
            raise ConfigError("run.device: cuda, but torch is a CPU build; reinstall with `make EXTRA=gpu install`")
        gpu = None
    return gpu or Machine(Device.cpu, f"{platform.machine()} CPU")


def _gpu() -> Machine | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    first = answer.splitlines()[0] if answer.strip() else ""
    name, _, capability = first.rpartition(",")
    try:
        seen = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        return Machine(Device.cuda, name.strip(), float(capability), len(seen or answer.splitlines()))
    except ValueError:
        return None
