"""The converter is interrupted while megatron's writer is at work; what it has made starts a run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from box import ROOT, Box, wait_for

from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import INDEX, write_folder
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.torch_dist import hf_shapes


def convert(*words: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / "convert.py"), *map(str, words)]


def model(folder: Path) -> Path:
    """The toy's, with weights that know nothing."""
    write_toy(folder)
    hf_config = read_hf_config(folder / "model")
    sizes = hf_shapes(ModelShape.from_hf(hf_config))
    write_folder(folder / "model", {name: 0.1 * torch.randn(size) for name, size in sizes.items()}, hf_config)
    return folder / "model"


@pytest.mark.fault("SIGINT, SIGTERM or SIGHUP while the converter writes", "one line, and nothing is left")
@pytest.mark.parametrize("children", [1, 3], ids=["importing", "writing"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_an_interrupted_import(tmp_path: Path, number: signal.Signals, children: int) -> None:
    source, target = model(tmp_path / "toy"), tmp_path / "out"
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    running = subprocess.Popen(convert("import", source, target), stderr=subprocess.PIPE, text=True, env=environment)
    try:
        below = psutil.Process(running.pid).children
        wait_for(lambda: len(below(recursive=True)) >= children, 240, "children")
        group = below(recursive=True)
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert said.splitlines()[-1] == f"error: interrupted by {number.name}: {target} was not written"
    assert "Traceback" not in said
    assert running.returncode == 128 + number
    assert not [process for process in group if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmp", "toy"]
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.fault("model.path is what the converter has imported", "the run starts from it, exports, and ends well")
def test_a_run_from_an_import(tmp_path: Path) -> None:
    origin, imported = model(tmp_path / "data" / "toy"), tmp_path / "imported"
    subprocess.run(convert("import", origin, imported), check=True, timeout=300)
    box = Box(tmp_path)
    try:
        done = box.train("run.steps=1", f"model.path={imported}", "log.export=true").wait(600)
        assert done == 0, box.screen
    finally:
        box.close()
    exported = {path.name for path in (box.run / "model").iterdir()}
    assert exported == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        INDEX,
        "model-00001-of-00001.safetensors",
    }
