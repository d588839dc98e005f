"""CPU instructions for BF16 and INT8 matrix products, as far as oneDNN's variables let torch and
vLLM use them, and settings for a small model without them.
"""

import os
from pathlib import Path
from typing import Any

from megatron_rl.processes.process import own_cores

CPU_FLAGS = Path("/proc/cpuinfo")
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first that is set counts
# one of each is required
NEEDS = {
    "bf16": ("avx512_bf16", "amx_tile"),
    "int8": ("avx512_vnni", "amx_tile"),
}
_PLAIN = ("SSE41", "AVX", "AVX2", "AVX512_CORE")
BELOW = {"bf16": (*_PLAIN, "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE_VNNI"), "int8": _PLAIN}


def limit(kind: str) -> str:
    """Return the variable that disables these products in oneDNN, with its value; empty if none."""
    for name in LIMITS:
        if value := os.environ.get(name):
            if value.upper() in BELOW[kind]:
                return f"{name}={value}"
            return ""
    return ""


def lacking() -> dict[str, str]:
    """Return the products that are computed in FP32 here, with the reason; empty if the processor
    does not list its instructions.
    """
    text = CPU_FLAGS.read_text() if CPU_FLAGS.exists() else ""
    listed = next((line.split() for line in text.splitlines() if line.startswith("flags")), None)
    if listed is None:
        return {}
    found = {kind: limit(kind) for kind in NEEDS}
    found |= {
        kind: f"no {' or '.join(any_of)}"
        for kind, any_of in NEEDS.items()
        if not {*any_of} & {*listed}
    }
    return {kind: why for kind, why in found.items() if why}


def fastest() -> dict[str, str]:
    """Return the fastest settings for a small model where BF16 is multiplied in FP32;
    docs/experiments/benchmarks.md has the speedup of each.
    """
    if "bf16" not in lacking():
        return {}
    return {"learner.precision": "fp32"} | (
        {"sampler.engines": "2"} if len(own_cores()) > 1 else {}
    )


def about() -> dict[str, Any]:
    """Describe for a run's record how matrices are multiplied here, why, and the settings that the
    quickstart derives.
    """
    missing = lacking()
    by = {
        kind: f"in FP32: {missing[kind]}" if kind in missing else "by instructions"
        for kind in NEEDS
    }
    if CPU_FLAGS.exists():
        return {"products": by, "quickstart": fastest()}
    return {}
