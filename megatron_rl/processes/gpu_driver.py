"""NVIDIA's driver on this machine: what nvidia-smi says of its GPUs, and whether torch can use
them. Torch-free.
"""

import ctypes
import os
import subprocess
from importlib import metadata
from itertools import takewhile

# of torch as pyproject.toml pins it: the CUDA that it is built for, and the oldest branch of the
# driver that runs that
CUDA = 13
BRANCH = 580
VISIBLE = "CUDA_VISIBLE_DEVICES"  # of the environment
NEEDS = f"torch, built for CUDA {CUDA}, needs {BRANCH} or newer"


def ask(*fields: str) -> list[list[str]]:
    """What nvidia-smi says of each GPU; empty where there is none, or it does not answer."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [
        [word.strip() for word in line.rsplit(",", len(fields) - 1)] for line in said.splitlines()
    ]
    return [row for row in rows if len(row) == len(fields) and all(row)]


def visible() -> list[str] | None:
    """The devices that CUDA sees by this process's environment, named before the first that is
    none; None: all.
    """
    named = os.environ.get(VISIBLE)
    if named is None:
        return None
    return [*takewhile(lambda one: one and one[0] != "-", named.split(","))]


def too_old(version: str) -> str | None:
    """Why torch will see no GPU under this version of the driver."""
    branch = version.partition(".")[0]
    if not branch.isdecimal() or int(branch) >= BRANCH or _compatible():
        return None
    return f"the NVIDIA driver is {version}, and {NEEDS}"


def unseen() -> str:
    """Said where torch sees no CUDA device, and has to."""
    (driver,) = next(iter(ask("driver_version")), [None])
    if driver:
        found = f"the NVIDIA driver is {driver}"
    else:
        found = "nvidia-smi lists no GPU"
    return f"torch {metadata.version('torch')} sees no CUDA device; {found}, and {NEEDS}"


def _compatible() -> bool:
    """Whether libraries beside an older driver (cuda-compat) bring what this CUDA needs: libcuda
    itself tells.
    """
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return False
    return version.value >= 1000 * CUDA
