"""The toy and its warm start are made once; every fault gets a folder of its own with links to
them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from box import Box

from megatron_rl.data.toy import write_toy

WARM_START_S = 900


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/toy, and runs/toy_sft with a model that has learnt a little."""
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder / "data" / "toy")
    settings = [
        "run.name=toy_sft",
        "run.steps=10",
        "rollout.prompts_per_step=64",
        "rollout.samples_per_prompt=1",
    ]
    with Box(folder) as box:
        assert box.train(*settings, recipe="toy_sft.yaml").wait(WARM_START_S) == 0, box.screen
    return folder


@pytest.fixture
def box(toy: Path, tmp_path: Path) -> Iterator[Box]:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "toy").symlink_to(toy / "data" / "toy")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "toy_sft").symlink_to(toy / "runs" / "toy_sft")
    with Box(tmp_path) as box:
        yield box
