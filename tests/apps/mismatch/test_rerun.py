"""Non-finite updates: skipped up to a limit, dumped, and repeated by one command."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import learner_cases as cases
import pytest
from preloaded import run

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("nonfinite")

    def job(name: str, on_nonfinite: str = "skip_and_dump", **more: Any) -> dict[str, Any]:
        place = {
            "name": name,
            "kind": "nonfinite",
            "hf": cases.QWEN3,
            "dump": str(work / name / "dumps"),
        }
        return place | {"on_nonfinite": on_nonfinite} | more

    one = [
        job("twice", times=2, layout={"megatron": {"hidden_dropout": 0.2}}),
        job("a layer", spoilt="a layer"),
        job("all advantages", "raise", spoilt="all advantages"),
        job("for ever", "skip", times=12),
    ]
    two = [job("two ranks", spoilt="a layer", layout={"tensor_parallel": 2})]
    return {
        **cases.run_ranks(1, one, work),
        **cases.run_ranks(2, two, work),
        "work": work,
    }


def rerun(dump: Path) -> dict[str, str]:
    done = run(
        "megatron", [sys.executable, "-m", "megatron_rl.cli", "rerun-step", str(dump)], timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(
        re.fullmatch(r"(\S+( it:)?) +(.*)", line).groups()[::2] for line in done.stdout.splitlines()
    )


@pytest.mark.fault(
    "one advantage is infinite, twice in a row",
    "both updates are left out, written down, and repeat",
)
def test_an_infinite_advantage(results: dict[str, Any]) -> None:
    assert results["twice"]["next"]["optim/updates"] == 1
    (folder,) = (results["work"] / "twice" / "dumps").iterdir()
    assert folder.name == "nonfinite_0"
    said = rerun(folder / "minibatch_2.safetensors")
    assert said["first:"].startswith("advantages_B ")
    assert said["first:"].endswith(" inf in row 1")
    assert said["then"] == said["now"]


@pytest.mark.fault(
    "weights of a layer are huge, on one rank or two", "a rerun names the layer and the token"
)
@pytest.mark.parametrize("name", ["a layer", "two ranks"])
def test_weights_that_are_too_large(results: dict[str, Any], name: str) -> None:
    (folder,) = (results["work"] / name / "dumps").iterdir()
    said = rerun(folder)
    assert "decoder.layers.2.mlp." in said["first:"]
    assert re.search(r"row \d+, token \d+", said["first:"])
    assert ("on other ranks" in said["then"]) == (name == "two ranks")


def test_a_gradient_whose_square_is_too_large_ends_the_run_with_a_dump(
    results: dict[str, Any],
) -> None:
    error = results["all advantages"]["error"]
    command = re.search(r"`megatron-rl rerun-step (\S.*)` repeats it", error)
    said = rerun(Path(command[1]))
    assert "no weight's gradient" in said["first:"]


@pytest.mark.fault(
    "update after update is not finite", "after ten steps the run ends, by a sentence and a dump"
)
def test_they_are_left_out_so_many_times(results: dict[str, Any]) -> None:
    found = results["for ever"]
    assert found["unchanged"]
    assert "learner.on_nonfinite=skip leaves out 10" in found["error"]
    assert "optim.lr" in found["error"]
    assert (
        results["work"] / "for ever" / "dumps" / "nonfinite_0" / "minibatch_11.safetensors"
    ).is_file()
