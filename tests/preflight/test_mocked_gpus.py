"""Every recipe on nodes of one, two, four and eight GPUs, as a stand-in for nvidia-smi lists
them.
"""

from __future__ import annotations

import ctypes
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
from nvidia_smi import nvidia_smi

from megatron_rl import cli
from megatron_rl.config import ConfigError, cluster, load
from megatron_rl.config.schema import Device
from megatron_rl.models.layout import Layout
from megatron_rl.preflight import checks
from megatron_rl.preflight.machine import _gpu, detect, named
from megatron_rl.preflight.roles import ranks
from megatron_rl.processes import gpu_driver

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if cluster(path)[0])


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes this machine a node of so many GPUs, with the gpu set installed."""
    versions = {"torch": "2.13.0", "vllm": "0.32.0"}
    true = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or true(name))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def of(gpus: int, driver: str = "580.95.05") -> None:
        nvidia_smi(tmp_path, gpus, driver)

    return of


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_refused_where_its_gpus_are_not(recipe: Path, gpus: int, node) -> None:
    node(gpus)
    config = load(recipe)
    machine = named(str(cluster(recipe)[1]))
    places = ("learner: ", "sampler.devices", "sampler.engines")
    about = [line for line in checks.problems(config) if line.startswith(places)]
    learns = Layout.from_config(config.learner).world
    serves = 0
    if config.sampler.dedicated_nodes:
        serves = config.sampler.engines * config.sampler.tensor_parallel
    fits = gpus >= max(learns + serves, machine.gpus)
    assert (about == []) == fits, about
    assert all(str(gpus) in line for line in about)


def test_a_server_has_the_gpus_of_one_node() -> None:
    wide = load(
        "recipes/dapo-qwen3_8b-2n16g-int8.yaml",
        ["sampler.tensor_parallel=16", "sampler.engines=1"],
    )
    (said,) = ranks(named("3x8xH100-80"), wide.learner, wide.sampler)
    assert said.startswith("sampler.tensor_parallel: 16")


def test_what_nvidia_smi_says_is_the_machine(node, monkeypatch: pytest.MonkeyPatch) -> None:
    node(2)
    machine = detect(Device.auto)
    for visible, gpus in (("1", 1), ("0,-1,1", 1), ("GPU-4f2a,GPU-77b1", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = _gpu()
        assert found is not None
        assert found.gpus == gpus
    for visible in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert _gpu() is None
    assert (machine.kind, machine.gpus, machine.capability) == (Device.cuda, 2, 9.0)
    assert "2 x NVIDIA H100" in str(machine)


@pytest.mark.parametrize(("wanted", "gpus"), [(Device.auto, 0), (Device.cpu, 8)])
def test_the_gpu_set_has_no_cpu_engine(wanted: Device, gpus: int, node) -> None:
    """`auto` without GPUs, and `cpu` on a GPU node, are errors with a hint."""
    node(gpus)
    with pytest.raises(ConfigError, match=r"--on 1x8xH100-80.*EXTRA=cpu"):
        detect(wanted)


def test_a_build_for_hosts_leaves_gpus_alone(node, monkeypatch: pytest.MonkeyPatch) -> None:
    node(8)
    monkeypatch.setattr(
        metadata, "version", lambda name: "2.13.0+cpu" if name == "torch" else _absent(name)
    )
    assert detect(Device.auto).kind == Device.cpu
    with pytest.raises(ConfigError, match="CPU build"):
        detect(Device.cuda)


OLD = "550.127.08"


@pytest.mark.parametrize("wanted", [Device.auto, Device.cuda])
def test_a_driver_that_torch_cannot_use_is_named_with_the_one_that_it_needs(
    wanted: Device, node, capsys: pytest.CaptureFixture[str]
) -> None:
    node(8, OLD)
    with pytest.raises(ConfigError, match=rf"{OLD}.* 580"):
        detect(wanted)
    recipe = str(ROOT / "recipes" / "dapo_fp8.yaml")
    for words in (
        ["plan"],
        ["plan", "--suggest"],
        ["train", "--dry-run"],
        ["serve"],
    ):
        status = cli.main([*words, recipe, f"run.device={wanted}"])
        assert status == 2
        assert OLD in capsys.readouterr().err


@pytest.mark.parametrize(("supports", "uses"), [(13000, True), (12040, False)])
def test_libraries_beside_an_old_driver_may_bring_what_torch_needs(
    supports: int, uses: bool, node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's cuda-compat: a newer libcuda over an older driver."""

    class Libcuda:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, found) -> int:
            found._obj.value = supports
            return 0

    node(8, OLD)
    monkeypatch.setattr(ctypes, "CDLL", Libcuda)
    assert (gpu_driver.too_old(OLD) is None) == uses
    assert gpu_driver.too_old("580.65.06") is gpu_driver.too_old("595.1") is None


def test_the_bound_is_that_of_the_pinned_torch() -> None:
    """NVIDIA's table of CUDA's major versions and the branches of the driver that run them."""
    pins = (ROOT / "constraints" / "gpu.txt").read_text()
    major = int(re.findall(r"^cuda-toolkit==(\d+)\.", pins, re.M)[0])
    assert (major, {12: 525, 13: 580}[major]) == (gpu_driver.CUDA, gpu_driver.BRANCH)


def _absent(name: str) -> str:
    raise metadata.PackageNotFoundError(name)
