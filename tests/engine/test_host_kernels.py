"""The host kernels answer with the numbers of the vLLM kernels they replace."""

import json
import os
import sys
from pathlib import Path

import pytest
from preloaded import run

pytestmark = pytest.mark.engine

BF16_ROUNDING = 2.0**-9


def test_the_host_kernels_agree_with_vllm_s_own():
    script = Path(__file__).with_name("compare_host_kernels.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = run("vllm", [sys.executable, script], timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    if result["fp8_kernel"] == "RoundedFp8Kernel":  # a host with FP8 matrix units keeps vLLM's
        # one rounding of the output against two: FP8 itself rounds ten times coarser
        assert result["fp8_fast_to_slow"] < 2.5 * BF16_ROUNDING
    assert result["fp8_slow_to_bf16"] > 5 * BF16_ROUNDING, "the comparison must be able to see FP8 rounding"
    assert result["int8_kernel"] == "SymmetricInt8Kernel"
    assert result["int8_equal"]
    assert result["shapes_equal"]
