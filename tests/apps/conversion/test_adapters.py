"""Adapters of a run and of PEFT: merged on export, and from one into the other."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from models import config_of, done, fails, made, tensors_of
from simulated import assert_same_bits
from test_of_runs import leave_step

from megatron_rl.apps.evaluation.stored_model import StoredWeights, find
from megatron_rl.checkpoint.torch_dist.reader import blocks
from megatron_rl.checkpoint.torch_dist.writer import write_blocks, write_index
from megatron_rl.config import from_mapping, to_yaml
from megatron_rl.models.mapping import adapters, params
from megatron_rl.models.shape import Lora, ModelShape

LORA = {"rank": 4, "alpha": 6.0, "targets": ["q_proj", "v_proj", "o_proj", "up_proj"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of adapters of some of the layers."""
    folder = tmp_path_factory.mktemp("adapters")
    config = config_of("qwen3", tie_word_embeddings=True)
    base = made(folder / "hf", config)
    shape = replace(ModelShape.from_hf(config), lora=Lora(4, 6.0, tuple(LORA["targets"])))
    random = torch.Generator().manual_seed(1)
    policy = folder / "policy"
    found = []
    policy.mkdir()
    for param in params(shape):
        for one in adapters(param, shape):
            full = [torch.randn(size, generator=random).mul_(0.1).bfloat16() for size in one.shapes]
            found.append(blocks(one, shape, full))
    write_index(policy, write_blocks(policy / "rank_0.distcp", chain.from_iterable(found)))
    (folder / "run").mkdir()
    about: dict[str, Any] = {"model": {"path": str(base)}, "learner": {"lora": LORA}}
    (folder / "run" / "config.yaml").write_text(to_yaml(from_mapping(about)))
    leave_step(folder / "run", policy, 3, {})
    return folder / "run"


def test_peft_reads_what_a_run_has_trained(tmp_path: Path, run: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    done("export", f"{run}@3", tmp_path / "merged")
    done("adapters", f"{run}@3", tmp_path / "peft")
    base = AutoModelForCausalLM.from_pretrained(run.parent / "hf", dtype=torch.float32)
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base, tmp_path / "peft")
        its = dict(loaded.merge_and_unload().named_parameters())
    ours = tensors_of(tmp_path / "merged")
    moved = {name for name, weight in ours.items() if not torch.equal(weight.float(), before[name])}
    assert {name.split(".")[-2] for name in moved} == set(LORA["targets"]) and len(moved) == 2 * 4
    for name, weight in ours.items():
        assert bool(((weight.float() - its[name]).abs() <= its[name].abs() * 2**-8 + 1e-7).all()), (
            name
        )


def test_what_peft_has_written_is_merged(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done("adapters", f"{run}@3", tmp_path / "peft")
    done("export", tmp_path / "peft", tmp_path / "merged", "--hf", run.parent / "hf")
    done("export", run, tmp_path / "of_run")
    assert_same_bits(list(tensors_of(tmp_path / "merged").items()), tensors_of(tmp_path / "of_run"))
    capsys.readouterr()
    done("inspect", tmp_path / "peft", "--hf", run.parent / "hf")
    assert "PEFT's adapters" in capsys.readouterr().out
    # what engines are given to evaluate
    stored = StoredWeights(find(tmp_path / "peft", None, run.parent / "hf"))
    shards = dict(stored.named_parameters())
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(
        shards["decoder.layers.0.self_attention.linear_proj.weight"],
        tensors_of(tmp_path / "merged")[name],
    )


def test_adapters_of_another_kind_are_refused(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "whole model" in fails(capsys, "adapters", run.parent / "hf", tmp_path / "x")
    shutil.copytree(run / "checkpoints" / "step_3" / "policy", tmp_path / "bare")
    words = ("export", tmp_path / "bare", tmp_path / "x", "--hf", run.parent / "hf")
    assert "adapters alone" in fails(capsys, *words)
