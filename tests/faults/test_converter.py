"""The converter is interrupted while it writes; what it has made starts a run, whose model is
served quantized.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from box import ROOT, Box
from helpers import hf_shapes, wait_for

from megatron_rl.apps.conversion.work import partial_of
from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import INDEX, HfFolder, write_folder
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape


def convert(*words: object) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / "convert.py"), *map(str, words)]


def model(folder: Path, like: str | None = None) -> Path:
    """The toy's, or a small one of a card's family, with weights that know nothing."""
    card = (
        None if like is None else json.loads((ROOT / "conf" / "model" / f"{like}.json").read_text())
    )
    write_toy(folder, like=card)
    hf_config = read_hf_config(folder / "model")
    sizes = hf_shapes(ModelShape.from_hf(hf_config))
    write_folder(
        folder / "model", {name: 0.1 * torch.randn(size) for name, size in sizes.items()}, hf_config
    )
    return folder / "model"


@pytest.mark.fault("SIGTERM of the converter", "one line, and the same command begins anew")
def test_an_interrupted_import(tmp_path: Path) -> None:
    number = signal.SIGTERM
    source = model(tmp_path / "toy")
    target = tmp_path / "out"
    running = subprocess.Popen(
        convert("import", source, target),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: partial_of(target).exists() or running.poll() is not None, "the beginning")
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    if running.returncode:  # else it was done before it heard
        assert running.returncode == 128 + number
        assert f"error: interrupted by {number.name}" in said
        assert "Traceback" not in said
        assert not target.exists()
        subprocess.run(convert("import", source, target), check=True, timeout=300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "toy"]


@pytest.mark.fault(
    "model.path is what the converter has imported",
    "the run starts from it, exports, and ends well",
)
def test_a_run_from_an_import(tmp_path: Path) -> None:
    origin = model(tmp_path / "data" / "toy")
    imported = tmp_path / "imported"
    subprocess.run(convert("import", origin, imported), check=True, timeout=300)
    with Box(tmp_path) as box:
        done = box.train("run.steps=1", f"model.path={imported}", "checkpoint.export_hf=true").wait(
            600
        )
        assert done == 0, box.screen
    int8 = tmp_path / "int8"
    subprocess.run(
        convert("quantize", box.run, int8, "--format", "int8"),
        check=True,
        timeout=300,
        cwd=tmp_path,
    )
    words = ("verify", box.run, int8, "--report", tmp_path / "parity.json")
    subprocess.run(convert(*words), check=True, timeout=900, cwd=tmp_path)
    exported = {path.name for path in (box.run / "model").iterdir()}
    of_a_tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert exported == {"config.json", *of_a_tokenizer, INDEX, "model-00001-of-00001.safetensors"}


LAYOUTS = {
    "PP2": ("Qwen3-8B", ["learner.pipeline_parallel=2"]),
    "EP2": (
        "Qwen3-30B-A3B",
        ["learner.data_parallel=2", "learner.expert_parallel=2", "quantization=none"],
    ),
}


@pytest.mark.fault(
    "an import is trained under another layout",
    "its checkpoint exports to what the run itself exports",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_import_under_another_layout(tmp_path: Path, layout: str) -> None:
    like, words = LAYOUTS[layout]
    origin = model(tmp_path / "data" / "toy", like)
    imported = tmp_path / "imported"
    subprocess.run(convert("import", origin, imported), check=True, timeout=300)
    with Box(tmp_path) as box:
        ended = (
            "run.steps=1",
            "checkpoint.every=1",
            "rollout.samples_per_prompt=1",
            "model.init=pretrained",
        )
        words = ["learner.tensor_parallel=1", *words]
        trained = box.train(*ended, f"model.path={imported}", *words, recipe="toy_sft.yaml")
        assert trained.wait(900) == 0, box.screen
    subprocess.run(convert("export", f"{box.run}@1", tmp_path / "out"), check=True, timeout=300)
    ours, its, before = (
        HfFolder(folder) for folder in (tmp_path / "out", box.run / "model", origin)
    )
    assert sorted(ours.names) == sorted(its.names) == sorted(before.names)
    assert all(torch.equal(ours.read(name), its.read(name)) for name in ours.names)
    assert any(
        not torch.equal(ours.read(name), before.read(name).to(ours.read(name)))
        for name in ours.names
    )
