"""W&B, when asked for. The package is imported only where it is used, and gets no arguments, git or machine data."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import LogSection, Wandb
from megatron_rl.runs.run_dir import redact
from megatron_rl.runs.status import ENDED

HOST = "api.wandb.ai"
PROJECT = "megatron-rl"


def has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        found = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    host = os.environ.get("WANDB_BASE_URL", HOST).removeprefix("https://").removeprefix("http://").rstrip("/")
    return found.authenticators(host) is not None


def resolve_mode(asked: Wandb) -> Wandb:
    """`none`, `offline` or `online`; raises where `online` cannot work."""
    if asked is Wandb.auto:
        return Wandb.online if has_key() else Wandb.offline
    if asked is Wandb.online and not has_key():
        raise ValueError(
            "log.wandb=online needs a W&B key: run `wandb login`, set WANDB_API_KEY, or use log.wandb=auto "
            "(offline without a key)"
        )
    return asked


class WandbLog:
    def __init__(self, config: LogSection, resolved: Mapping[str, Any], run_dir: Path, mode: Wandb) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            mode="online" if mode is Wandb.online else "offline",
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            dir=str(run_dir),
            config=redact(resolved),
            settings=wandb.Settings(
                disable_git=True, save_code=False, console="off", x_disable_meta=True, x_disable_stats=True
            ),
        )

    @property
    def where(self) -> str:
        return self._run.url or f"wandb sync {Path(self._run.dir).parent}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, state: str) -> None:
        assert state in ENDED
        self._run.finish(exit_code=0 if state == "finished" else 1)
        self._wandb.teardown()  # its writer is a process of its own: only when it has ended is the file whole
