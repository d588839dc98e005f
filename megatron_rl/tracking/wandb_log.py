"""Log of a run at W&B, online or offline: metrics, samples, alarms, one W&B run however often
resumed; comparisons take `WandbRun` alone. W&B is imported only where it is used. It gets no
arguments, and a commit or system metrics only by `log.wandb_run`.
"""

import configparser
import netrc
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_rl.config.plain_yaml import redact
from megatron_rl.config.schema import Wandb
from megatron_rl.files import read_bounded, write_atomic
from megatron_rl.logs import logger
from megatron_rl.processes.environment import hidden_secrets
from megatron_rl.tracking.alarms import AlarmEvent
from megatron_rl.tracking.status import git_state
from megatron_rl.tracking.tracker import PROJECT, Tracker
from megatron_rl.types import Metrics, Scored

SERVER = "https://api.wandb.ai"
ID = "wandb.id"  # of the run's directory
INIT_S = 20.0  # seconds to wait for the server to respond
FINISH_S = 20.0  # shorter than the launcher's wait for a finished driver


def has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        found = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return found.authenticators(urlsplit(_base_url()).netloc) is not None


def _base_url() -> str:
    """W&B's server: of the environment, or as `wandb login --host` has written it down."""
    settings = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error):
        settings.read(
            Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
            / "settings"
        )
    return os.environ.get("WANDB_BASE_URL") or str(
        settings.get("default", "base_url", fallback=SERVER)
    )


def resolve_mode(asked: Wandb) -> Wandb:
    """`none`, `offline` or `online`; raises where `online` cannot work."""
    if asked is Wandb.auto:
        if has_key():
            return Wandb.online
        return Wandb.offline
    if asked is Wandb.online and not has_key():
        raise ValueError(
            "log.wandb=online needs a W&B key: run `wandb login`, set WANDB_API_KEY, or use "
            "log.wandb=auto (offline without a key)"
        )
    return asked


class WandbRun:
    """A run at W&B: online if its server answers in time, else written for a later `wandb sync`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        mode: Wandb,
        git_commit: bool = False,
        system_metrics: bool = False,
        **about: Any,
    ) -> None:
        """`about`: more of `wandb.init`'s, such as the job type."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self.wandb = wandb
        self._id = run_id(folder)
        self.trouble = ""
        self.online = mode is Wandb.online
        begin: Callable[..., Any] = partial(
            wandb.init,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=self._id,
            resume="allow",
            allow_val_change=True,
            dir=str(folder),
            config=redact(config),
            settings=wandb.Settings(
                disable_git=True,  # would send the address of the remote, too
                git_commit=(git_state() or {}).get("commit") if git_commit else None,
                save_code=False,
                console="off",
                x_disable_meta=True,
                x_disable_stats=not system_metrics,
                init_timeout=INIT_S,
                finish_timeout=FINISH_S,
            ),
            **about,
        )
        with hidden_secrets(keep="WANDB_"):  # its service takes this process's environment
            try:
                self.run = begin(mode="online" if self.online else "offline")
            except wandb.Error as error:
                if not self.online:
                    raise
                wandb.teardown()  # a pending init would keep the run's name reserved
                self.online = False
                self.run = begin(mode="offline")
                why = next(iter(str(error).splitlines()), type(error).__name__)
                self.trouble = f"W&B cannot be reached, so this run is kept offline: {why}"

        self.where: str = self.run.url or self._sync

    def end(self, exit_code: int) -> None:
        begun = time.monotonic()
        self.run.finish(exit_code=exit_code)
        late = time.monotonic() - begun >= FINISH_S
        # its writer is a separate process: the file is complete once that has ended
        self.wandb.teardown()
        if late:
            logger("wandb").info(
                f"W&B did not take everything within {FINISH_S:.0f} s; send it by {self._sync}"
            )

    @property
    def _sync(self) -> str:
        """The command that sends all attempts, in their order."""
        return f"wandb sync {Path(self.run.dir).parents[1]}/*-{self._id}"


class WandbLog(Tracker):
    """Log of a training run at W&B.

    Steps that an attempt logged after its last checkpoint are logged again by the next attempt.
    """

    def __init__(
        self,
        resolved: Mapping[str, Any],
        run_dir: Path,
        mode: Wandb,
        resumes_after: int,
        about: Mapping[str, Any],
    ) -> None:
        if (run_dir / ID).is_file():
            self.held = resumes_after
        self._logged = WandbRun(in_columns(resolved), run_dir, mode, **about)
        self.run = self._logged.run
        self.where = self._logged.where
        self.trouble = self._logged.trouble
        if self._logged.online:
            self.held = self.run.starting_step - 1

    def log(self, step: int, row: Metrics) -> None:
        self.run.log(dict(row), step=step, commit=True)  # else held until the next step

    def samples(self, step: int, shown: Sequence[Scored]) -> None:
        head: list[str | int] = ["prompt", "answer", "reward", "verdict"]
        rows = [
            [
                one.rollout.prompt.text,
                one.text,
                one.reward,
                str(one.verdict or one.error or ""),
            ]
            for one in shown
        ]
        table = self._logged.wandb.Table(columns=head, data=rows)
        self.run.log({"samples": table}, step=step)

    def alarms(self, news: Sequence[AlarmEvent], active: Mapping[str, Any]) -> None:
        """An alert for each that was raised; the run's summary lists those that stand."""
        for one in news:
            if one.raised:
                title = f"{self.run.name}: {one.alarm}"[:63]
                level = "ERROR" if one.stops else "WARN"
                self.run.alert(title, str(one), level)
        self.run.summary.update({"alarms": ", ".join(active)})

    def finish(self, state: str, numbers: Metrics) -> None:
        self.run.summary.update({f"summary/{name}": value for name, value in numbers.items()})
        self._logged.end(0 if state == "finished" else 1)


def in_columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a column per value of the correction: W&B shows no lists."""
    correction = config.get("correction")
    if not isinstance(correction, Mapping):
        return dict(config)
    numbered = {
        str(place): rule for place, rule in enumerate(correction.get("reject") or (), start=1)
    }
    return {**config, "correction": {**correction, "reject": numbered}}


def run_id(run_dir: Path) -> str:
    """The run's name at W&B: as long as the directory is the same."""
    path = run_dir / ID
    if not path.is_file():
        write_atomic(path, f"{secrets.token_hex(8)}\n")
    return read_bounded(path).decode().strip()
