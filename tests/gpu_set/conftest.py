"""The GPU set without a GPU: a driver that answers "no device", so that what links against one loads.

Each file here runs in a process of its own (.ci/gpu-set): a pretended device changes torch for all of a process.
"""

import ctypes
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

DRIVER = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, of any function


def pytest_configure(config: pytest.Config) -> None:
    try:
        metadata.version("transformer-engine-torch")
    except metadata.PackageNotFoundError:
        raise pytest.UsageError("tests/gpu_set is for the gpu set: make check-gpu-set") from None
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        ctypes.CDLL(str(_stub(Path(config.rootpath) / "build" / "gpu_set")), mode=ctypes.RTLD_GLOBAL)


def _stub(folder: Path) -> Path:
    """A driver compiled from C: whatever is loaded later and names libcuda.so.1 gets this one, by its soname."""
    folder.mkdir(parents=True, exist_ok=True)
    source, library = folder / "libcuda.c", folder / DRIVER
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(_asked_for())))
    flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{DRIVER}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    return library


def _asked_for() -> set[str]:
    """Functions of the driver that the set's libraries name without bringing them."""
    import nccl
    import transformer_engine

    folders = [Path(module.__path__[0]) for module in (nccl, transformer_engine)]
    libraries = [str(path) for folder in folders for path in folder.rglob("*.so*")]
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True).stdout
    names = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip()}
    return {"cuInit"} | {name for name in names if name.startswith("cu") and name[2:3].isupper()}
