"""Descriptions of machines (GPUs, memory, links): this one, detected without torch, or one named as
1x8xH100-80.
"""

import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megatron_rl.config import ConfigError, cluster
from megatron_rl.config.schema import Device
from megatron_rl.processes import gpu_driver, instructions


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU as its maker describes it: dense matrix products, one direction of a link."""

    capability: float
    gib: int
    tflops: float  # BF16
    fp8_tflops: float  # 0: none
    memory_tbs: float  # TB/s
    link_gbs: float  # GB/s to GPUs of its node
    network_gbs: float  # GB/s to other nodes, as such machines are usually sold


GPUS = {
    "A100": Gpu(8.0, 80, 312, 0, 2.0, 300, 25),
    "L4": Gpu(8.9, 24, 121, 242, 0.3, 32, 6),
    "L40S": Gpu(8.9, 48, 362, 733, 0.86, 32, 12),
    "H20": Gpu(9.0, 96, 148, 296, 4.0, 450, 50),
    "H100": Gpu(9.0, 80, 989, 1979, 3.35, 450, 50),
    "H200": Gpu(9.0, 141, 989, 1979, 4.8, 450, 50),
    "B200": Gpu(10.0, 180, 2250, 4500, 8.0, 900, 50),
    "B300": Gpu(10.3, 288, 2250, 4500, 8.0, 900, 100),
}
NAMED = re.compile(r"([1-9]\d*)x([1-9]\d*)x([A-Za-z]\w*?)(?:-([1-9]\d*))?(?:-([1-9]\d*))?")


class NoGpu(ConfigError):
    """A GPU is requested on a machine without one."""


@dataclass(frozen=True)
class Machine:
    kind: Device  # cpu | cuda
    name: str
    capability: float | None = None  # CUDA compute capability
    gpus: int = 0  # of a node, that this job sees; 0: not known
    nodes: int = 1
    gib: float = 0.0  # memory of a GPU; 0: not known
    driver: str = ""  # NVIDIA's version of it
    host_gib: float = 0.0  # a node's own memory; 0: not known
    # faster settings for a small model, if the CPU lacks BF16 instructions
    fastest: tuple[tuple[str, str], ...] = ()

    @property
    def gpu(self) -> Gpu | None:
        """Kind of the GPU: the longest known name that its name contains; None if there is none."""
        found = [name for name in GPUS if name in re.split(r"[^A-Z0-9]+", self.name.upper())]
        if found:
            return GPUS[max(found, key=len)]
        return None

    def __str__(self) -> str:
        if not self.gpus:
            return self.name
        return f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.gpus} x {self.name}"


def own(recipe: Path, overrides: Sequence[str]) -> str:
    """Return the machine of the recipe's cluster, for `--on own`."""
    name, machine = cluster(recipe, overrides)
    if machine is None:
        raise ConfigError(
            f"--on own: the recipe's cluster {name} has no GPUs; name a machine, such as 1x8xH100-80"
        )
    return machine


def named(text: str) -> Machine:
    """Parse NODESxGPUSxNAME-GIB-HOST; GIB (GPU memory) and HOST (node memory) are optional."""
    match = NAMED.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--on {text}: expected NODESxGPUSxNAME, NODESxGPUSxNAME-GIB or "
            "NODESxGPUSxNAME-GIB-HOST, such as 1x8xH100-80, or 1x8xH100-80-2048 for nodes of "
            "2,048 GiB"
        )
    nodes, gpus, name, gib, host = match.groups()
    if name.upper() not in GPUS:
        raise ConfigError(f"--on {text}: {name} is not known; use one of {', '.join(GPUS)}")
    gpu = GPUS[name.upper()]
    memory = int(gib or gpu.gib)
    label = f"{name.upper()} ({memory} GiB)"
    return Machine(
        Device.cuda, label, gpu.capability, int(gpus), int(nodes), memory, host_gib=float(host or 0)
    )


def detect(wanted: Device = Device.auto) -> Machine:
    """The machine a run uses; `run.device=cuda` without a usable GPU is refused."""
    gpu = None if wanted == Device.cpu else _gpu()
    if gpu is None and wanted == Device.cuda:
        raise NoGpu(
            "run.device: cuda, but nvidia-smi lists no GPU here; run this where there is one, "
            "check it for such a machine with --on 1x8xH100-80 (or --on own, the recipe's "
            "cluster), or set run.device=cpu or auto"
        )
    if gpu is not None and "+cpu" in metadata.version("torch"):
        if wanted == Device.cuda:
            raise ConfigError(
                "run.device: cuda, but torch is a CPU build; reinstall with `make EXTRA=gpu install`"
            )
        gpu = None
    if gpu is not None and (why := gpu_driver.too_old(gpu.driver)):
        raise ConfigError(
            f"run.device: {wanted}, but {why}; update it, or run this on a node that has a newer one"
        )
    if gpu is None and _installed("vllm"):  # its CPU build has another name
        raise ConfigError(
            f"run.device: {wanted}, but what is installed is the gpu set and no GPU is used here; "
            "run this where there is one, check a recipe for such a machine with --dry-run --on "
            "1x8xH100-80, or install the CPU set (make clean, make EXTRA=cpu install)"
        )
    return gpu or Machine(
        Device.cpu, f"{platform.machine()} CPU", fastest=tuple(instructions.fastest().items())
    )


def installed_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)


def _installed(distribution: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(distribution))
    return False


def _gpu() -> Machine | None:
    found = gpu_driver.ask("name", "compute_cap", "memory.total", "driver_version")
    visible = gpu_driver.visible()
    count = len(found if visible is None else visible)
    if not found or not count:
        return None
    name, capability, memory, driver = found[0]
    try:
        # in MiB
        gib = float(memory) / 1024
        host = installed_gib()
        return Machine(
            Device.cuda, name, float(capability), count, gib=gib, driver=driver, host_gib=host
        )
    except ValueError:
        return None
