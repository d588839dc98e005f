"""Ranks whose engine sleeps can return what torch's allocator holds; nobody else's settings are touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_rl.config.schema import Sleep, Transport
from megatron_rl.learner.device_memory import GIVEN, keep_returnable

RECIPE = Path(__file__).parents[2] / "recipes" / "dapo-qwen3_8b-1n8g-int8-colocated.yaml"
# what torch's allocator goes by when a rank comes to its model
RANK = """
import sys
from pathlib import Path
from torch._C import _accelerator_getAllocatorSettings
from megatron_rl import train
from megatron_rl.config import load

def read(*_):
    sys.exit(_accelerator_getAllocatorSettings())

train.Model.read = read
train.train(load(Path(sys.argv[1])), "", Path("unused"), rank=1)
"""


@pytest.fixture(autouse=True)
def as_torch_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)
    yield
    torch._C._accelerator_setAllocatorSettings("")


def settings(sleep: Sleep, transport: Transport) -> str:
    keep_returnable(sleep, transport)
    return torch._C._accelerator_getAllocatorSettings()


def test_a_rank_of_a_recipe_whose_engine_sleeps_has_segments_that_can_be_returned() -> None:
    done = subprocess.run([sys.executable, "-c", RANK, RECIPE], capture_output=True, text=True, env=os.environ)
    assert done.stderr.splitlines()[-1] == "expandable_segments:True"


def test_other_ranks_keep_torch_s_own() -> None:
    for sleep in Sleep:
        assert settings(sleep, Transport.ipc) == ""
    assert settings(Sleep.none, Transport.file) == ""


@pytest.mark.parametrize("variable", GIVEN)
def test_what_the_environment_says_of_the_allocator_stays(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:512")
    assert settings(Sleep.discard, Transport.file) == ""
    monkeypatch.delenv(variable)
    assert settings(Sleep.discard, Transport.file) == "expandable_segments:True"
