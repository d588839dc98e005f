"""A run's checkpoints, also as its sampler had them, and the commands of docs/guides/evaluation-and-export.md."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ROOT, config_of, convert, done, fails, made, tensors_of, verdicts
from safetensors.torch import save_file
from simulated import assert_same_bits

from megatron_rl.apps.evaluation import stored_model
from megatron_rl.apps.evaluation.stored_model import StoredWeights
from megatron_rl.checkpoint import checkpoints
from megatron_rl.config import from_mapping, to_yaml
from megatron_rl.config.schema import Format, KvCache
from megatron_rl.distributed import TorchGroup
from megatron_rl.models.layout import Layout
from megatron_rl.models.shape import ModelShape
from megatron_rl.quantization.cache_scales import CacheScales
from megatron_rl.quantization.formats import quantization_config
from megatron_rl.quantization.smoothing import Smoothing
from megatron_rl.weight_sync.source import ShardSource

WORKFLOWS = re.findall(
    r"```bash workflow\n(.*?)```",
    (ROOT / "docs/guides/evaluation-and-export.md").read_text(),
    re.DOTALL,
)
Run = tuple[Path, dict[str, torch.Tensor]]


def leave_run(run: Path, model: Path, **quantization: Any) -> None:
    run.mkdir(parents=True)
    about = {"model": {"path": str(model)}, "quantization": {"format": "int8", **quantization}}
    (run / "config.yaml").write_text(to_yaml(from_mapping(about)))


def leave_step(run: Path, imported: Path, step: int, state: dict[str, torch.Tensor]) -> None:
    """Write a run's checkpoint whose policy is the imported one."""
    partial = checkpoints.partial_of(run / "checkpoints", step)
    (partial / "ranks").mkdir(parents=True)
    shutil.copytree(
        imported, partial / "policy", ignore=shutil.ignore_patterns("hf", "parity.json")
    )
    save_file({"rng.cpu": torch.get_rng_state()}, partial / "ranks" / "rank_0.safetensors")
    save_file(state, partial / "sync.safetensors")
    files = {
        str(p.relative_to(partial)): list(checkpoints.digest(p))
        for p in partial.rglob("*")
        if p.is_file()
    }
    driver = {"position": step, "seen": {}, "best": None}
    about: dict[str, Any] = {
        "updates": step,
        "layout": asdict(Layout(tp=2, dp=2)),
        "files": files,
        "driver": driver,
    }
    checkpoints.publish(partial, run / "checkpoints", step=step, **about)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose last sync was smoothed INT8 with scales of an FP8 cache; its sent tensors."""
    folder = tmp_path_factory.mktemp("run")
    config = config_of("qwen3", tie_word_embeddings=True)
    layers = 2
    source = made(folder / "hf", config)
    shape = ModelShape.from_hf(config)
    done("import", source, folder / "imported")
    amax_LNH = 1 + 40 * torch.rand(layers, 2, shape.hidden) ** 8
    smoothing = Smoothing(shape, 0.5, 10, TorchGroup(), lambda: amax_LNH)
    cache = CacheScales(layers, TorchGroup(), lambda: torch.rand(layers, 2) + 1)
    weights = StoredWeights(stored_model.find(source, None, None))
    sync = ShardSource(
        weights.model,
        weights.groups,
        Format.int8,
        ["lm_head"],
        smoothing=smoothing,
        cache_scales=cache,
    )
    sent = dict(sync.tensors(dict(weights.named_parameters())))
    leave_run(folder / "run", source, smoothing=0.5, kv_cache="fp8")
    leave_step(folder / "run", folder / "imported", 3, smoothing.state() | cache.state())
    return folder / "run", sent


def test_as_its_sampler_had_it(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, sent = run
    done("quantize", f"{folder}@3", tmp_path / "out", "--format", "as_sampler")
    assert_same_bits(list(tensors_of(tmp_path / "out").items()), sent)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == quantization_config(
        Format.int8, ["lm_head"], KvCache.fp8
    )
    verdicts(tmp_path, f"{folder}@3", tmp_path / "out")


def test_a_step_and_a_run(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run
    done("export", f"{folder}@3", tmp_path / "of_step")
    done("export", folder, tmp_path / "of_run")
    capsys.readouterr()
    for name in ("of_step", "of_run"):
        assert_same_bits(
            list(tensors_of(tmp_path / name).items()), tensors_of(folder.parent / "hf")
        )
    done("inspect", f"{folder}@3")
    said = capsys.readouterr().out
    assert "checkpoint of step 3" in said and "tp=2 dp=2" in said
    assert f"export {folder}@3 HF_FOLDER" in said
    assert f"{folder}@4" in fails(capsys, "export", f"{folder}@4", tmp_path / "x")


@pytest.mark.fault(
    "a checkpoint of a run is incomplete", "export names the file, and uses no other checkpoint"
)
def test_an_incomplete_step(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    data = next((folder / "checkpoints" / "step_3" / "policy").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert f"{data} was changed" in fails(capsys, "export", f"{folder}@3", tmp_path / "x")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that the commands name."""
    folder = tmp_path_factory.mktemp("workflows")
    config = config_of("qwen3", tie_word_embeddings=True)
    run = folder / "runs" / "dapo"
    policy = made(folder / "models" / "policy", config)
    done("quantize", policy, folder / "models" / "released-fp8", "--format", "fp8_block")
    leave_run(run, policy)
    for step in (100, 120):
        made(folder / "steps" / str(step), config, seed=step)
        done("import", folder / "steps" / str(step), folder / "imported" / str(step))
        leave_step(
            run,
            folder / "imported" / str(step),
            step,
            {"none": torch.zeros(1)},
        )
    return folder


def test_the_commands_as_they_stand_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert len(WORKFLOWS) == 4
    for line in "".join(WORKFLOWS).splitlines():
        program, tool, *words = shlex.split(line)
        assert (program, tool) == ("python", "tools/convert.py")
        assert convert.main(words) == 0, line
    sampled, int8 = (tensors_of(place / "served" / name) for name in ("dapo-sampled", "dapo-int8"))
    assert all(torch.equal(tensor, int8[name]) for name, tensor in sampled.items())
