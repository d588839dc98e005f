"""The quickstart fits the machine: on GPUs the toy's engine leaves room for the ranks beside it."""

from pathlib import Path

import pytest

from megatron_rl.config import load
from megatron_rl.config.schema import Device
from megatron_rl.preflight import checks
from megatron_rl.preflight.machine import Machine, named
from megatron_rl.quickstart import RECIPE, WARM_START, fitting

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (8, 2)])
@pytest.mark.parametrize("recipe", [WARM_START, RECIPE], ids=lambda path: path.stem)
def test_it_fits_one_gpu_and_more(recipe: Path, gpus: int, ranks: int, place: Path) -> None:
    machine = named(f"1x{gpus}xH100-80")
    config = load(ROOT / recipe, [*fitting(machine), "model.path=data/toy/model", "model.init=random"])
    assert config.learner.tensor_parallel == ranks
    assert checks.check(config, on=machine).machine == machine


def test_a_host_takes_the_recipes_as_they_are() -> None:
    assert fitting(Machine(Device.cpu, "a host")) == []
