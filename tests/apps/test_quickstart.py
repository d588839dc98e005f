"""The quickstart fits the machine: on GPUs the toy's engine leaves memory for the ranks."""

from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.apps.quickstart import TASKS, fitting, quickstart
from megatron_rl.commands import train
from megatron_rl.config import load
from megatron_rl.config.schema import Config, Device, Precision
from megatron_rl.preflight import checks
from megatron_rl.preflight.machine import Machine, named
from megatron_rl.tracking.run_dir import mark_status

GIVEN = ["model.path=data/toy/model", "model.init=random"]
SLOW_HOST = Machine(
    Device.cpu, "a host", fastest=(("learner.precision", "fp32"), ("sampler.engines", "2"))
)
of_each_recipe = pytest.mark.parametrize(
    "recipe", [TASKS["toy"].warm_start, TASKS["toy"].recipe], ids=lambda path: path.stem
)


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (2, 2), (8, 2)])
@of_each_recipe
def test_it_fits_one_gpu_and_more(recipe: Path, gpus: int, ranks: int, place: Path) -> None:
    machine = named(f"1x{gpus}xH100-80")
    config = load(recipe, [*fitting(machine), *GIVEN])
    assert config.learner.tensor_parallel == ranks
    assert checks.check(config, on=machine).machine == machine


def test_a_host_takes_the_recipes_as_they_are() -> None:
    assert fitting(Machine(Device.cpu, "a host")) == []


@of_each_recipe
def test_a_host_without_bf16_products_learns_in_fp32_beside_two_engines(
    recipe: Path, place: Path
) -> None:
    config = load(recipe, [*fitting(SLOW_HOST), *GIVEN])
    assert (config.learner.precision, config.sampler.engines) == (Precision.fp32, 2)
    assert checks.check(config, on=SLOW_HOST).notes == ()
    (note,) = checks.check(load(recipe, GIVEN), on=SLOW_HOST).notes
    assert note.endswith("learner.precision=fp32 sampler.engines=2")


def test_a_sampler_that_is_asked_for_stays_as_it_is() -> None:
    assert fitting(SLOW_HOST, ["sampler.engines=3"]) == ["learner.precision=fp32"]


@pytest.mark.fault(
    "an override of the quickstart is wrong",
    "it is refused before the warm start; nothing is moved",
)
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("foo.bar=1", "foo"),
        ("optim.lr=-1", "optim.lr"),
        ("reward.name=nope:f", "No module named 'nope'"),
        ("learner.tensor_parallel=3", "learner.tensor_parallel=3"),
        ("model.path=nowhere", "nowhere"),
    ],
)
def test_an_override_is_checked_before_the_warm_start(
    override: str,
    said: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "runs" / "toy_sft").mkdir(parents=True)
    (place / "runs" / "toy_sft" / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(train, "run", lambda config: pytest.fail("the warm start was begun"))
    assert cli.main(["quickstart", override]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in (place / "runs").iterdir()] == ["toy_sft"]


def test_what_an_override_says_of_the_machine_reaches_the_warm_start(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Config] = []
    monkeypatch.setattr(train, "run", lambda config: begun.append(config) or 7)
    share = "sampler.vllm.gpu_memory_utilization=0.2"
    words = ["learner.tensor_parallel=1", share, "correction=icepop", "optim.lr=2e-4"]
    assert cli.main(["quickstart", *words]) == 7
    (config,) = begun
    assert config.run.name == "toy_sft"
    assert config.learner.tensor_parallel == 1
    assert config.sampler.vllm["gpu_memory_utilization"] == 0.2
    assert config.optim.lr == 1e-3


@pytest.mark.fault(
    "USR1 during the quickstart's warm start", "the warm start ends well, and no second run starts"
)
def test_a_warm_start_that_was_asked_to_stop_is_the_last_run(place: Path) -> None:
    begun = []

    def run(config: Config) -> int:
        begun.append(config.run.name)
        folder = place / config.run.root / str(config.run.name)
        folder.mkdir(parents=True)
        mark_status(folder, "stopped", "asked to by SIGUSR1")
        return 0

    assert quickstart([], run) == 0
    assert begun == ["toy_sft"]
