"""A run's directory: its paths, its claim by a lock (for a new or resumed run; an old one
archived), secrets hidden.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.checkpoints import Checkpoint, steps
from megatron_rl.checkpoint.resume import newest_resumable, refuse_changes, rewind
from megatron_rl.config import ConfigError
from megatron_rl.config.plain_yaml import read_yaml, redact, write_yaml
from megatron_rl.config.schema import IfExists
from megatron_rl.files import open_regular, write_atomic
from megatron_rl.processes.folder_lock import LOCK, held, hold, holder, sign
from megatron_rl.processes.heartbeat import FOLDER
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.status import ENDED, environment, known_status, mark_status, read_status

LONGEST_BEFORE = 150  # characters of the previous attempt's end reason
SUMMARY = "summary.json"  # of an evaluation
LAUNCHER = "MEGATRON_RL_LAUNCHER"  # its process id, in the environment of the ranks that it starts


class RunDirectoryUsed(ConfigError):
    pass


class _Inside:
    """Descriptor of a path inside a run's directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """Paths in a run's directory; also owner.lock, logs/, and with log.wandb wandb.id, wandb/."""

    path: Path
    # lock of the process that has claimed the directory
    lock: FileIO | None = field(default=None, compare=False, repr=False)

    config = _Inside("config.yaml")  # the resolved configuration
    env = _Inside("env.json")  # versions and platform
    # state: starting | running | finished | stopped | failed, and the reason
    status = _Inside("status.json")
    metrics = _Inside("metrics.jsonl")  # one line per step
    rollouts = _Inside("rollouts")  # step_N.parquet: tokens and both logprobs
    bf16_evaluation = _Inside("bf16_evaluation")  # files of `megatron-rl eval`, of the last policy
    timeline = _Inside("timeline.jsonl")  # busy spans of sampler, rewards and learner
    # which prompts each step has drawn, and which of them it has trained on
    ledger = _Inside("ledger.jsonl")
    checkpoints = _Inside("checkpoints")  # step_N/: to resume from
    # updates that were not finite, to be repeated; traces, what filled a GPU
    dumps = _Inside("dumps")
    model = _Inside("model")  # the last policy, with checkpoint.export_hf
    best_model = _Inside("model-best")  # the best one by checkpoint.best
    report = _Inside("report.html")
    heartbeats = _Inside(f"logs/{FOLDER}")  # rank_N.json

    @property
    def attempt(self) -> int:
        """Number of the latest start; 0 before the first."""
        names = [entry.name for entry in (self.path / "logs").glob("attempt_*")]
        return max((int(name[8:]) for name in names if name[8:].isdigit()), default=0)

    def n_lines(self) -> int:
        """Count of the lines of metrics."""
        with open_regular(self.metrics) as lines:
            return sum(1 for _ in lines)

    @property
    def resumes_after(self) -> int | None:
        """The step that this attempt resumes from; None for a new run."""
        return read_status(self.path).get("resumes_after")

    @property
    def logs(self) -> Path:
        """The logs of the latest start."""
        return self.path / "logs" / f"attempt_{self.attempt}"


def check_run_dir(path: Path, if_exists: IfExists, resolved_yaml: str = "") -> str:
    """Raise if `open_run` would, else describe its effect on an old directory. Read-only."""
    try:
        above = next((folder for folder in path.parents if folder.exists()), path)
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            raise _unusable(path, f"{above} is no folder that can be written")
        if path.exists() and not path.is_dir():
            raise RunDirectoryUsed(
                f"run.name: run directory {path} is a file; choose another name: run.name=..."
            )
        if _used(path):
            _check_free(path, if_exists)
            if if_exists is IfExists.resume and resolved_yaml and RunDir(path).config.is_file():
                refuse_changes(RunDir(path).config, resolved_yaml)
            return _makes_of(path, if_exists)
        return ""
    except FileNotFoundError:
        return ""  # another start has just moved it aside
    except OSError as error:
        raise _unusable(path, error.strerror) from None


def _makes_of(path: Path, if_exists: IfExists) -> str:
    if if_exists is IfExists.resume and (found := steps(RunDir(path).checkpoints)):
        return f"{path} exists: a start resumes after step {max(found)}, its newest checkpoint, if that is complete"
    why = ""
    if if_exists is IfExists.refuse:
        why = ", as it ended before its first step"
    elif if_exists is IfExists.resume:
        why = ", as no checkpoint is in it"
    return f"{path} exists: a start moves it to {archive_name(path)} and begins anew{why}"


def open_run(path: Path, if_exists: IfExists, resolved_yaml: str) -> tuple[RunDir, str]:
    """Claim a directory for a new or resumed run; return it and a line about an old one, or "".

    The status stays "starting" until a Recorder takes over: launchers claim before rank 0 exists.
    """
    check_run_dir(path, if_exists, resolved_yaml)
    try:
        lock, found, moved = _claim(path, if_exists)
        try:
            sign(lock)
            return _furnish(RunDir(path, lock), resolved_yaml, found), moved
        except BaseException:
            if found is None:
                shutil.rmtree(path, ignore_errors=True)  # remove only the incomplete folder
            raise
    except OSError as error:
        raise _unusable(path, error.strerror) from None


def _claim(path: Path, if_exists: IfExists) -> tuple[FileIO, Checkpoint | None, str]:
    """Lock a new directory, or one to resume in; return its checkpoint and a line about an old one.

    An old one is moved under its own lock, so that of several starts a single one moves it.
    """
    moved = ""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if os.path.lexists(path) and not path.is_dir():
                raise
            continue  # it existed, and has been moved aside meanwhile
        try:
            lock = hold(path)
        except FileNotFoundError:
            continue  # another start has just moved it aside
        if lock is None:
            owner = _owner(path, read_status(path))
            raise _refused(path, f"belongs to a run that is active or being started ({owner})")
        if not _used(path):
            return lock, None, moved
        notes: list[str] = []
        if if_exists is IfExists.resume and (found := newest_resumable(path, notes.append)):
            notes.append(f"{path} resumes after step {found.step}, saved at {found.time}")
            return lock, found, "\n".join(notes)
        with lock:
            _check_free(path, if_exists, locked=False)
            archived = archive_name(path)
            why = ""
            if if_exists is IfExists.refuse:
                before = _describe(path, known_status(path, locked=False))
                why = f": it ended before its first step ({before})"
            elif if_exists is IfExists.resume and notes:
                why = f": none of its {len(notes)} checkpoints is complete; the run begins again"
            elif if_exists is IfExists.resume:
                why = ": it holds no checkpoint to resume from; the run begins again"
            path.rename(archived)
            moved = "\n".join((*notes, f"the old {path} is now {archived}{why}"))


def _furnish(run: RunDir, resolved_yaml: str, found: Checkpoint | None) -> RunDir:
    if found is not None:
        rewind(run.path, found.step, found.said)
    shutil.rmtree(run.heartbeats, ignore_errors=True)  # of the attempt before
    for folder in (
        run.rollouts,
        run.checkpoints,
        run.heartbeats,
        run.path / "logs" / f"attempt_{run.attempt + 1}",
    ):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(run.config, write_yaml(redact(read_yaml(resolved_yaml))))
    write_atomic(run.env, json.dumps(environment(), indent=2) + "\n")
    about: dict[str, Any] = {}
    if before := read_status(run.path):
        about["before"] = {
            "state": before.get("state"),
            "reason": str(before.get("reason"))[:LONGEST_BEFORE],
        }
    mark_status(
        run.path,
        "starting",
        pid=os.getpid(),
        host=platform.node(),
        attempt=run.attempt,
        **about,
        restarts=os.environ.get("SLURM_RESTART_COUNT"),
        resumes_after=found and found.step,
        stopping=None,
        stuck=None,
    )
    return run


def claimed_for_this_process(path: Path) -> bool:
    """True if a launcher, or this process, has opened the run that is still to be recorded."""
    status = read_status(path)
    launcher = os.environ.get(LAUNCHER)
    return status.get("state") == "starting" and str(status.get("pid", launcher)) in (
        str(launcher),
        str(os.getpid()),
    )


def archive_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(name for name in names if not name.exists())


def _check_free(path: Path, if_exists: IfExists, locked: bool | None = None) -> None:
    """Raise if a used directory is not free. `locked`: as in `known_status`, True if another
    process has the lock.
    """
    if locked is None:
        locked = held(path)
    status = known_status(path, locked)
    if locked or ("pid" in status and status.get("state") not in ENDED):
        raise _refused(path, f"belongs to an active run ({_owner(path, status)})")
    if if_exists is IfExists.refuse and not _ended_before_its_first_step(path, status):
        raise _refused(
            path,
            f"is used ({_describe(path, status)})",
            f", or move the old one to {archive_name(path)}: run.if_exists=archive",
        )


def _owner(path: Path, status: Mapping[str, Any]) -> str:
    """Name the process that holds the lock.

    The status may be that of the attempt before, or have been copied with the folder.
    """
    said = status.get("pid"), status.get("host")
    pid, host = (holder(path) if held(path) else None) or said
    words = f"process {pid} on {host}"
    if host == platform.node() and not Path(f"/proc/{pid}").exists():
        words = f"processes of {words}, which has terminated"
    if (pid, host) == said:
        return f"{words}, last sign of life {status.get('heartbeat')}"
    return words


def _refused(path: Path, why: str, more: str = "") -> RunDirectoryUsed:
    return RunDirectoryUsed(
        f"run.name: run directory {path} {why}. Nothing was changed. Choose another name: "
        f"run.name={path.name}_2{more}"
    )


def _unusable(path: Path, why: str | None) -> ConfigError:
    return ConfigError(
        f"run.root={path.parent}: {path.name} cannot be made there: {why}; name a folder with room"
    )


def _used(path: Path) -> bool:
    return path.is_dir() and any(entry.name != LOCK for entry in path.iterdir())


def _ended_before_its_first_step(path: Path, status: Mapping[str, Any]) -> bool:
    """True if a run has only logs, so that the next run of that name may replace it."""
    run = RunDir(path)
    begun = run.metrics.is_file() and any(
        line["progress/step"] >= 1 for line in read_metrics(run.metrics)
    )
    return status.get("state") in ("failed", "stopped") and not begun


def _describe(path: Path, status: Mapping[str, Any]) -> str:
    run = RunDir(path)
    state = status.get("state", "no status")
    if status.get("reason"):
        first, *_ = str(status["reason"]).splitlines()
        state += f": {first}"
    lines = run.n_lines() if run.metrics.exists() else "no"
    return f"{state}, {lines} lines of metrics"
