"""Mixtures of experts in a live engine: equal to a fresh one after updates, and faults named.

The Qwen3 mixture runs INT8 with its experts in BF16, the Mixtral all BF16.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("mixtures")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    script = Path(__file__).with_name("mixture_cases.py")
    with (folder / "log").open("wb") as log:
        run = subprocess.run(
            [sys.executable, script, folder], env=environment, stdout=log, stderr=log, timeout=PATIENCE_S, check=False
        )
    assert run.returncode == 0, (folder / "log").read_text()[-3000:]
    return json.loads((folder / "found.json").read_text())


VICTIMS = {
    "qwen3_moe": ("model.layers.1.mlp.experts.2.down_proj.weight", "experts.routed_experts.w2_weight[2]"),
    "mixtral": ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "experts.routed_experts.w13_weight[3]"),
}


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_updates_reach_every_expert_and_faults_are_named(family: str, found: dict) -> None:
    case = found[family]
    victim, stack = VICTIMS[family]
    assert case["said"] == ["", "", ""]
    assert case["changes"]
    assert case["back"], "a change and a change back"
    assert case["fresh"], "as an engine that starts from the exported folder"
    assert f"missing tensor {victim}" in case["missing"]
    assert f"misshapen tensor {victim}" in case["misshapen"]
    assert case["intact"], "a refused update leaves the answers as they were"
    assert case.get("kept_kernels_show", True), "without packing the experts again the answers are wrong"
    assert stack in case["unwritten"]
    assert "unwritten" in case["unwritten"]
    assert case["healed"]
