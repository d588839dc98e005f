"""Detection of this CPU's instructions for BF16 and INT8 matrix products, as far as oneDNN's
variables let torch and vLLM use them, and the settings that suit a small model where they lack.
"""

import os
from pathlib import Path
from typing import Any

from megatron_rl.processes.process import own_cores

CPU_FLAGS = Path("/proc/cpuinfo")
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the first that is set counts
NEEDS = {"bf16": ("avx512_bf16", "amx_tile"), "int8": ("avx512_vnni", "amx_tile")}  # one of each
_PLAIN = ("SSE41", "AVX", "AVX2", "AVX512_CORE")
BELOW = {"bf16": (*_PLAIN, "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE_VNNI"), "int8": _PLAIN}


def limit(kind: str) -> str:
    """The variable that keeps oneDNN from these products, as it is set; empty where none does."""
    for name in LIMITS:
        if value := os.environ.get(name):
            if value.upper() in BELOW[kind]:
                return f"{name}={value}"
            return ""
    return ""


def lacking() -> dict[str, str]:
    """The products that are made in FP32 here, and why; none where a processor does not list its
    instructions.
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
    """Settings for a small model where BF16 is multiplied in FP32; docs/benchmarks.md says how far
    each pays.
    """
    if "bf16" not in lacking():
        return {}
    return {"learner.precision": "fp32"} | (
        {"sampler.engines": "2"} if len(own_cores()) > 1 else {}
    )


def about() -> dict[str, Any]:
    """How matrices are multiplied here, why, and what the quickstart sets because of it: for a
    run's record.
    """
    missing = lacking()
    by = {
        kind: f"in FP32: {missing[kind]}" if kind in missing else "by instructions"
        for kind in NEEDS
    }
    if CPU_FLAGS.exists():
        return {"products": by, "quickstart": fastest()}
    return {}
