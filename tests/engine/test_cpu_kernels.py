"""The host kernels answer with the numbers of the vLLM kernels they replace; attention stays
off AMX tiles.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from preloaded import said

pytestmark = pytest.mark.engine

BF16_ROUNDING = 2.0**-9


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    script = Path(__file__).with_name("compare_cpu_kernels.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return json.loads(said("vllm", [script], env=environment).splitlines()[-1])


def test_the_cpu_kernels_agree_with_vllm_s_own(result):
    if result["fp8_kernel"] == "RoundedFp8Kernel":  # a host with FP8 matrix units keeps vLLM's
        # one rounding of the output against two: FP8 itself rounds ten times coarser
        assert result["fp8_fast_to_slow"] < 2.5 * BF16_ROUNDING
    assert result["int8_kernel"] == "SymmetricInt8Kernel"
    assert result["int8_is_exact"]


def test_the_learner_computes_an_engine_s_layers_byte_for_byte(result):
    """INT8 and FP8; random, long, sliced, and what rounding might treat apart. Where a new vLLM
    rounds in another way, this names the layer and the row.
    """
    assert result["learner_differs"] == []


def test_how_many_tokens_are_computed_at_once_changes_next_to_nothing(result):
    changed = result["changed_alone"]
    assert changed["int8"] == 0
    # sums in FP32, of another order, beside the middle of two BF16 values
    assert changed["fp8"] < 1e-3


def test_attention_never_runs_on_tiles(result):
    vllms, ours = result["attention"]
    assert ours == ("vec" if result["has_tiles"] else vllms)
    if result["has_tiles"]:
        assert vllms == "amx", "vLLM avoids tiles by itself: cpu_kernels.attention_kernel can go"
