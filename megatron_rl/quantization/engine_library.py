"""vLLM's library of operators for hosts, in a process without vLLM: loaded by itself, in a twentieth of a second."""

from __future__ import annotations

import functools
import importlib.util
import platform
from pathlib import Path

import torch


def has(*operators: str) -> bool:
    """Whether vLLM's build for hosts is installed, and has these."""
    return _is_loaded() and all(hasattr(torch.ops._C, name) for name in operators)


@functools.cache
def _is_loaded() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    if torch.version.cuda is not None or torch.version.hip is not None:
        return False  # another build of vLLM, with other operators of the same names
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return False
    try:
        torch.ops.load_library(str(Path(found.origin).with_name(_library())))
    except OSError:
        return False
    return True


def _library() -> str:
    """Of several, by the processor, as vLLM chooses."""
    if torch.cpu._is_avx512_bf16_supported():
        return "_C.abi3.so"
    return "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"
