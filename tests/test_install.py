"""What installs and starts the GPU set: facts about its files that no machine without a GPU would notice."""

import re
from pathlib import Path

import pytest

from megatron_rl.config import load

ROOT = Path(__file__).parents[1]
GPU_PINS = dict(line.split("==") for line in (ROOT / "constraints" / "gpu.txt").read_text().split())


def test_cuda_s_bindings_are_of_one_release() -> None:
    """An older cuda-python is one wheel that overwrites files of cuda-bindings: then nothing imports."""
    python, bindings = (GPU_PINS[name].split(".")[:2] for name in ("cuda-python", "cuda-bindings"))
    assert python == bindings
    assert int(python[0]) >= 13


def test_transformer_engine_s_binding_compiles_against_the_wheels_headers() -> None:
    script = (ROOT / "tools" / "install.sh").read_text()
    before, _, _ = script.partition("--no-build-isolation-package transformer-engine-torch")
    assert "NVTE_BUILD_USE_NVIDIA_WHEELS=1" in before
    assert "export MAX_JOBS" in before


def test_srun_is_told_how_many_cores_a_task_has() -> None:
    """Since 22.05 it does not take that over from sbatch."""
    text = (ROOT / "slurm" / "prologue.sh").read_text().replace("\\\n", " ")
    starts = re.findall(r"^ *srun .*", text, re.M)
    assert starts
    assert all("--cpus-per-task=" in line for line in starts)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("dapo_*.yaml")), ids=lambda path: path.stem)
def test_a_real_run_leaves_weights(recipe: Path) -> None:
    assert load(recipe).log.export
