"""What a machine can run: this one, found out without importing torch, or one that is only named."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Device

# name -> compute capability, GiB of memory
GPUS = {
    "A100": (8.0, 80),
    "L4": (8.9, 24),
    "L40S": (8.9, 48),
    "H20": (9.0, 96),
    "H100": (9.0, 80),
    "H200": (9.0, 141),
    "B200": (10.0, 180),
    "B300": (10.3, 288),
}
NAMED = re.compile(r"([1-9]\d*)x([1-9]\d*)x([A-Za-z]\w*?)(?:-([1-9]\d*))?")


@dataclass(frozen=True)
class Machine:
    kind: Device  # cpu | cuda
    name: str
    capability: float | None = None  # CUDA compute capability
    gpus: int = 0  # of a node, that this job sees; 0: not known
    nodes: int = 1

    def __str__(self) -> str:
        if not self.gpus:
            return self.name
        return f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.gpus} x {self.name}"


def named(text: str) -> Machine:
    """The machine that NODESxGPUSxNAME-GIB stands for; the memory may be left out."""
    match = NAMED.fullmatch(text)
    if match is None:
        raise ConfigError(f"--on {text}: expected NODESxGPUSxNAME or NODESxGPUSxNAME-GIB, such as 1x8xH100-80")
    nodes, gpus, name, gib = match.groups()
    if name.upper() not in GPUS:
        raise ConfigError(f"--on {text}: {name} is not known; use one of {', '.join(GPUS)}")
    capability, usual = GPUS[name.upper()]
    return Machine(Device.cuda, f"{name.upper()} ({gib or usual} GiB)", capability, int(gpus), int(nodes))


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
