"""Planned bytes against those of a learner's ranks: storages, and tensors that autograd saves."""

from __future__ import annotations

from typing import Any

import learner_cases as cases
import pytest

from megatron_rl.apps.planner.memory.activations import Pack, Training
from megatron_rl.apps.planner.memory.learner import of_stage
from megatron_rl.config.schema import LearnerSection, Precision
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model

pytestmark = pytest.mark.ranks
SMALL = {**cases.QWEN3, "vocab_size": 512}
UNTIED = {**cases.QWEN2, "vocab_size": 512, "max_position_embeddings": 1024}
LARGE = {
    **cases.LLAMA,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "vocab_size": 1024,
}
EXPERTS = {**cases.QWEN3_MOE, "vocab_size": 512, "moe_intermediate_size": 96}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
ONE_OF_TWO = {**cases.CHUNKS, **FULL, "recompute_method": "block"}
SHORT = {"rows": 16, "prompt": 4, "response": 60}
LONG = {"rows": 4, "prompt": 20, "response": 480}

# name -> model, learner section, rows, precision
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int], str]] = {
    "tp2": (SMALL, {"tensor_parallel": 2}, SHORT, "bf16"),
    "tp2 with sequences shared": (
        LARGE,
        {"tensor_parallel": 2, "megatron": {"sequence_parallel": True}},
        SHORT,
        "bf16",
    ),
    "pp2": (SMALL, {"pipeline_parallel": 2}, SHORT, "bf16"),
    "pp2 interleaved": (
        SMALL,
        {"pipeline_parallel": 2, "megatron": {"virtual_pipeline_model_parallel_size": 2}},
        SHORT,
        "bf16",
    ),
    "dp2, long rows": (UNTIED, {"data_parallel": 2}, LONG, "bf16"),
    "cp2": (LARGE, {"context_parallel": 2}, SHORT, "bf16"),
    "ep2, sequences shared": (
        {**EXPERTS, "moe_intermediate_size": 192},
        {"context_parallel": 2, "expert_parallel": 2},
        SHORT,
        "bf16",
    ),
    "ep2": (EXPERTS, {"data_parallel": 2, "expert_parallel": 2}, SHORT, "bf16"),
    "tp2, recomputed": (LARGE, {"tensor_parallel": 2, "megatron": FULL}, SHORT, "bf16"),
    "pp2, recomputed": (LARGE, {"pipeline_parallel": 2, "megatron": FULL}, SHORT, "bf16"),
    "pp2 interleaved, one layer of a chunk recomputed": (
        {**LARGE, "num_hidden_layers": 8},
        {"pipeline_parallel": 2, "megatron": ONE_OF_TWO},
        SHORT,
        "bf16",
    ),
    "dp2, attention recomputed": (
        SMALL,
        {"data_parallel": 2, "megatron": SELECTIVE},
        SHORT,
        "bf16",
    ),
    "dp2, fp32": (LARGE, {"data_parallel": 2}, SHORT, "fp32"),
    "tp2, logits in fp32": (LARGE, {"tensor_parallel": 2}, SHORT, "bf16"),
}


def budget(rows: dict[str, int]) -> int:
    """Four rows of a pack, or one long one."""
    return (4 if rows is SHORT else 1) * (rows["prompt"] + rows["response"])


def head(name: str) -> Precision:
    return Precision.fp32 if name.endswith("logits in fp32") else Precision.bf16


def predicted(name: str, stage: int) -> dict[str, float]:
    hf, section, rows, precision = LAYOUTS[name]
    learner = LearnerSection(
        **section, precision=Precision(precision), tokens_per_microbatch=budget(rows)
    )
    model = Model.of(hf, Layout.from_config(learner), head(name))
    length = rows["prompt"] + rows["response"]
    in_pack = budget(rows) // length
    pack = Pack(tokens=budget(rows), responses=in_pack * rows["response"], longest=length)
    packs = rows["rows"] // in_pack // model.layout.dp
    found = of_stage(model, Training.of(learner, True), stage, pack, packs)
    kept = found.activations + max(found.head, found.recomputed)
    static = {name: getattr(found, name) for name in ("weights", "gradients", "optimizer")}
    return {**static, "logits": found.logits, "activations": kept}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, int]]]:
    jobs = []
    for name, (hf, section, rows, precision) in LAYOUTS.items():
        layout = {**section, "tokens_per_microbatch": budget(rows)}
        job = {
            "name": name,
            "kind": "memory",
            "hf": hf,
            "layout": layout,
            "batch": rows,
            "precision": precision,
        }
        job["head"] = head(name).value
        jobs.append(job)
    return cases.run_ranks(2, jobs, tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_within_a_tenth(measured: dict[str, list[dict[str, int]]], name: str) -> None:
    for rank, real in enumerate(measured[name]):
        stage = rank if "pipeline_parallel" in LAYOUTS[name][1] else 0
        assert predicted(name, stage) == pytest.approx(real, rel=0.1), f"rank {rank}"
