"""A run's directory: where everything lies, who may claim it, and what it says about itself.

runs/<name>/
  config.yaml       the resolved configuration
  env.json          versions and platform
  status.json       starting | running | finished | stopped | failed, and why
  metrics.jsonl     one line per step
  rollouts/         step_N.parquet: tokens and both logprobs
  checkpoints/
  logs/attempt_N/   one folder per start
  report.html
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_rl.config.plain_yaml import read_yaml, write_yaml
from megatron_rl.config.schema import IfExists
from megatron_rl.files import write_whole

PACKAGES = (
    *("megatron-rl", "megatron-core", "torch", "vllm", "transformers", "transformer-engine", "nvidia-modelopt"),
    *("compressed-tensors", "safetensors", "numpy", "pyarrow", "omegaconf", "wandb", "plotly", "rich"),
)
ENDED = ("finished", "stopped", "failed")
# Configuration is free of secrets by design; the pass-through maps are the only way one could slip in.
SECRET_KEY = re.compile(r"(^|_)(api_?key|secret|password|passwd|credentials?|bearer|(hf|auth|access)_?token)s?$", re.I)


class RunDirectoryUsed(RuntimeError):
    pass


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def attempt(self) -> int:
        """Number of the latest start; 0 before the first."""
        names = [entry.name for entry in (self.path / "logs").glob("attempt_*")]
        return max((int(name[8:]) for name in names if name[8:].isdigit()), default=0)

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt}"


def check_run_dir(path: Path, if_exists: IfExists) -> None:
    """Raises where `open_run` would. Touches nothing: for early checks and dry runs."""
    if path.exists() and not path.is_dir():
        raise RunDirectoryUsed(f"run directory {path} is a file; choose another name: run.name=...")
    if if_exists is IfExists.refuse and _used(path):
        raise RunDirectoryUsed(
            f"run directory {path} is used ({_describe(path)}). Nothing was changed. Either choose another name: "
            f"run.name={path.name}_2, or move the old one to {archive_name(path)}: run.if_exists=archive"
        )


def archive_name(path: Path) -> Path:
    number = 1
    while path.with_name(f"{path.name}.{number}").exists():
        number += 1
    return path.with_name(f"{path.name}.{number}")


def open_run(path: Path, if_exists: IfExists, resolved_yaml: str) -> tuple[RunDir, str]:
    """Claims a directory for a new run. Returns it, and a line about what became of an old one ("": none).

    The status stays "starting" until a Recorder takes over: a launcher can claim the directory, and
    put its children's logs there, before the driver rank exists.
    """
    check_run_dir(path, if_exists)
    moved = ""
    if _used(path):
        archived = archive_name(path)
        path.rename(archived)
        moved = f"the old {path} is now {archived}"
    run = RunDir(path)
    for folder in (run.rollouts, run.checkpoints, path / "logs" / "attempt_1"):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(run.config, _redacted_yaml(resolved_yaml))
    write_whole(run.env, json.dumps(environment(), indent=2) + "\n")
    mark_status(path, "starting")
    return run, moved


def mark_status(path: Path, state: str, reason: str = "", **more: Any) -> None:
    """Also for a launcher whose driver rank died without a word."""
    status = {**read_status(path), "state": state, "reason": reason, "time": _now(), **more}
    write_whole(RunDir(path).status, json.dumps(status, indent=2) + "\n")


def read_status(path: Path) -> dict[str, Any]:
    try:
        return json.loads(RunDir(path).status.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def environment() -> dict[str, Any]:
    """What a reader needs to reproduce the run. Never environment variables, arguments or remote addresses."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "time": _now(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
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


def _used(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _describe(path: Path) -> str:
    state = read_status(path).get("state", "no status")
    metrics = RunDir(path).metrics
    if not metrics.exists():
        return f"{state}, no metrics"
    with metrics.open("rb") as lines:
        return f"{state}, {sum(1 for _ in lines)} lines of metrics"


def redact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: "(hidden)" if SECRET_KEY.search(str(key)) and item not in (None, "") else redact(item)
            for key, item in value.items()
        }
    return [redact(item) for item in value] if isinstance(value, list) else value


def _redacted_yaml(text: str) -> str:
    config = read_yaml(text)
    hidden = redact(config)
    return text if hidden == config else write_yaml(hidden)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
