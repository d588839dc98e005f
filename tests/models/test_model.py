"""A model's config.json is read in one place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from simulated import hf_config

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import LearnerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config


def test_a_folder_or_its_config_json_gives_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen3")))
    model = Model.read(tmp_path, LearnerSection(tensor_parallel=2, data_parallel=3))
    assert model == Model.read(
        tmp_path / "config.json", LearnerSection(tensor_parallel=2, data_parallel=3)
    )
    assert model == Model.of(hf_config("qwen3"), Layout(tp=2, dp=3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "model.path: no config.json"),
        ("{", "not valid JSON"),
        ("[1]", "holds a list"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_hf_config(folder)


def test_a_model_needs_no_torch() -> None:
    code = "import sys, megatron_rl.models.model, megatron_rl.models.tensors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
