"""Files that install and start the GPU packages: facts that a CPU-only machine would not notice."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GPU_PINS = dict(line.split("==") for line in (ROOT / "constraints" / "gpu.txt").read_text().split())


def test_cuda_s_bindings_are_of_one_release() -> None:
    """An older cuda-python is one wheel that overwrites files of cuda-bindings: then nothing
    imports.
    """
    python, bindings = (GPU_PINS[name].split(".")[:2] for name in ("cuda-python", "cuda-bindings"))
    assert python == bindings
    assert int(python[0]) >= 13


@pytest.mark.parametrize("extra", ["gpu", "gpu,dev", "cpu"])
@pytest.mark.parametrize("release", [(3, 10), (3, 11), (3, 13)])
def test_an_interpreter_without_the_packages_is_an_error(
    extra: str, release: tuple[int, int], tmp_path: Path
) -> None:
    if extra == "cpu" and release == (3, 11):
        pytest.skip("has it")
    python = tmp_path / "python"
    code = f"import sys; sys.version_info = (*{release}, 1); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$2"\n')
    python.chmod(0o755)
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), "PYTHON": str(python)}
    done = subprocess.run(
        ["bash", "tools/install.sh", extra],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert "make PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_srun_gets_the_number_of_cores_of_a_task() -> None:
    """Since 22.05 it does not take that over from sbatch."""
    text = (ROOT / "slurm" / "prologue.sh").read_text().replace("\\\n", " ")
    starts = re.findall(r"^ *srun .*", text, re.M)
    assert starts
    assert all("--cpus-per-task=" in line for line in starts)
