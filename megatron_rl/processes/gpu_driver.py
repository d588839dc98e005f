"""NVIDIA driver of this machine: its GPUs by nvidia-smi, and whether torch can use them.
Torch-free.
"""

import ctypes
import os
import subprocess
from importlib import metadata
from itertools import takewhile

# of torch as pinned in pyproject.toml: its CUDA version, and the oldest driver branch that runs it
CUDA = 13
BRANCH = 580
VISIBLE = "CUDA_VISIBLE_DEVICES"  # of the environment
NEEDS = f"torch, built for CUDA {CUDA}, needs {BRANCH} or newer"


def ask(*fields: str) -> list[list[str]]:
    """Return nvidia-smi's fields of each GPU; empty if there is none, or it does not respond."""
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
    """Return the devices that CUDA sees by this process's environment, up to the first invalid one;
    None: all.
    """
    named = os.environ.get(VISIBLE)
    if named is None:
        return None
    return [*takewhile(lambda one: one and one[0] != "-", named.split(","))]


def too_old(version: str) -> str | None:
    """Return the reason why torch will see no GPU under this version of the driver."""
    branch = version.partition(".")[0]
    if not branch.isdecimal() or int(branch) >= BRANCH or _compatible():
        return None
    return f"the NVIDIA driver is {version}, and {NEEDS}"


def unseen() -> str:
    """Return the error text if torch sees no CUDA device although one is required."""
    (driver,) = next(iter(ask("driver_version")), [None])
    if driver:
        found = f"the NVIDIA driver is {driver}"
    else:
        found = "nvidia-smi lists no GPU"
    return f"torch {metadata.version('torch')} sees no CUDA device; {found}, and {NEEDS}"


def _compatible() -> bool:
    """True if libraries beside an older driver (cuda-compat) support this CUDA, according to
    libcuda.
    """
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return False
    return version.value >= 1000 * CUDA
