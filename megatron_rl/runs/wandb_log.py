"""Log of a run at W&B, online or offline: metrics, samples, alarms, one W&B run however often
resumed; comparisons take `WandbRun` alone. W&B is imported only where it is used, and gets no
arguments, git or machine data.
"""

import configparser
import netrc
import os
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_rl.config.plain_yaml import redact
from megatron_rl.config.schema import Wandb
from megatron_rl.files import read_whole, write_whole
from megatron_rl.processes.environment import hidden_secrets
from megatron_rl.runs.alarms import News
from megatron_rl.runs.metrics_file import read_metrics
from megatron_rl.runs.status import ENDED
from megatron_rl.types import Scored

HOST = "api.wandb.ai"
PROJECT = "megatron-rl"
ID = "wandb.id"  # of the run's directory
INIT_S = 20.0  # a server that does not answer within this is not waited for
FINISH_S = 20.0  # less than a launcher waits for a driver that has said its last word
MAGIC = b":W&B"
HEADER = 7
# of the file that W&B writes, a log in LevelDB's format: pieces of records, each with length and
# kind
BLOCK = 32 << 10
_PIECE = struct.Struct("<4xHB")  # after a checksum
# of the kinds: whole, first, middle, last
_WHOLE = 1
_LAST = 4


def has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        found = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return (
        found.authenticators(
            _base_url().removeprefix("https://").removeprefix("http://").rstrip("/")
        )
        is not None
    )


def _base_url() -> str:
    """W&B's server: of the environment, or as `wandb login --host` has written it down."""
    settings = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error):
        settings.read(
            Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
            / "settings"
        )
    return os.environ.get("WANDB_BASE_URL") or str(
        settings.get("default", "base_url", fallback=HOST)
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
    """One run at W&B. Online where its server answers in time; else written here, for `wandb sync`
    to send later.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, mode: Wandb, **about: str) -> None:
        """`about`: more of `wandb.init`'s, such as the job type."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self.wandb = wandb
        self._id = run_id(folder)
        self.trouble = ""
        self.online = mode is Wandb.online
        with hidden_secrets(keep="WANDB_"):  # its service takes this process's environment
            try:
                self.run = self._begin(
                    config, folder, about, "online" if self.online else "offline"
                )
            except wandb.Error as error:
                if not self.online:
                    raise
                wandb.teardown()  # what has not answered keeps the run's name to itself
                self.online, self.run = False, self._begin(config, folder, about, "offline")
                why = next(iter(str(error).splitlines()), type(error).__name__)
                self.trouble = f"W&B cannot be reached, so this run is kept offline: {why}"

    def _begin(
        self,
        config: Mapping[str, Any],
        folder: Path,
        about: Mapping[str, Any],
        mode: Literal["online", "offline"],
    ) -> Any:
        return self.wandb.init(
            mode=mode,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=self._id,
            resume="allow",
            allow_val_change=True,
            dir=str(folder),
            config=redact(config),
            settings=self.wandb.Settings(
                disable_git=True,
                save_code=False,
                console="off",
                x_disable_meta=True,
                x_disable_stats=True,
                init_timeout=INIT_S,
                finish_timeout=FINISH_S,
            ),
            **about,
        )

    @property
    def where(self) -> str:
        return self.run.url or self._sync

    def finish(self, exit_code: int) -> str:
        """What remains to be done by hand ("": nothing)."""
        begun = time.monotonic()
        self.run.finish(exit_code=exit_code)
        late = time.monotonic() - begun >= FINISH_S
        # its writer is a process of its own: only when it has ended is the file whole
        self.wandb.teardown()
        missing = f"W&B did not take everything within {FINISH_S:.0f} s; what is missing is sent by {self._sync}"
        return missing if late else ""

    @property
    def _sync(self) -> str:
        """The command that sends all attempts, in their order."""
        return f"wandb sync {Path(self.run.dir).parents[1]}/*-{self._id}"


class WandbLog(WandbRun):
    """The log of a training run at W&B, where a run that goes on is the same run. History only
    grows: what an attempt has logged after the checkpoint stays; what a kill has kept from W&B
    comes from metrics.jsonl.
    """

    def __init__(
        self,
        resolved: Mapping[str, Any],
        run_dir: Path,
        mode: Wandb,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._dir = run_dir
        self._note = note
        self._gone = False
        here = held_steps(run_dir, run_id(run_dir))
        super().__init__(in_columns(resolved), run_dir, mode)
        # the last step that W&B has
        self._held = self.run.starting_step - 1 if self.online else here
        if (run_dir / "metrics.jsonl").is_file():
            for line in read_metrics(run_dir / "metrics.jsonl"):
                self.log(int(line["progress/step"]), line)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._held:
            self._tell(lambda: self.run.log(dict(metrics), step=step))

    def samples(self, step: int, shown: Sequence[Scored]) -> None:
        if step <= self._held:
            return
        head: list[str | int] = ["prompt", "answer", "reward", "verdict"]
        rows = [
            [one.rollout.prompt.text, one.text, one.reward, str(one.verdict or one.error or "")]
            for one in shown
        ]
        table = self.wandb.Table(columns=head, data=rows)
        self._tell(lambda: self.run.log({"samples": table}, step=step))

    def alarms(self, news: Sequence[News], standing: Mapping[str, Any]) -> None:
        """An alert for each that was raised; the run's summary lists those that stand."""
        for one in news:
            if one.raised:
                said = (
                    f"{self.run.name}: {one.alarm}"[:63],
                    str(one),
                    "ERROR" if one.stops else "WARN",
                )
                self._tell(partial(self.run.alert, *said))
        self._tell(lambda: self.run.summary.update({"alarms": ", ".join(standing)}))

    def close(self, state: str, came_to: Mapping[str, float] | None = None) -> str:
        """What remains to be done by hand ("": nothing). `came_to`: the run's own numbers, for its
        summary.
        """
        assert state in ENDED
        numbers = {f"summary/{name}": value for name, value in (came_to or {}).items()}
        self._tell(lambda: self.run.summary.update(numbers))
        left: list[str] = []
        self._tell(lambda: left.append(self.finish(0 if state == "finished" else 1)))
        return "".join(left)

    def _tell(self, say: Callable[[], Any]) -> None:
        """Says something to W&B, whose own process may be killed without ending the run."""
        if self._gone:
            return
        try:
            say()
        except (
            Exception
        ) as error:  # of every kind: its client passes on what its pipe and its service raise
            self._gone = True
            self._note(
                f"W&B's process is gone ({type(error).__name__}: {error}). The run goes on; what "
                "W&B lacks comes from metrics.jsonl when the run is started again"
            )


def in_columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose correction has a column for every value: W&B shows sections so, but not
    lists.
    """
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
    try:
        known = read_whole(path).decode().strip()
    except (OSError, ValueError):
        known = ""
    if not re.fullmatch(r"[a-z0-9]{4,32}", known):
        known = secrets.token_hex(8)
        write_whole(path, f"{known}\n")
    return known


def held_steps(run_dir: Path, id: str) -> int:
    """The last step in what earlier attempts have written; -1 where there is none."""
    files = list((run_dir / "wandb").glob(f"*-{id}/run-{id}.wandb"))
    return max((step for file in files for step in logged_steps(file)), default=-1)


def logged_steps(path: Path) -> list[int]:
    """Steps in the file that W&B writes of a run, in their order. One that was cut short holds
    those before.
    """
    return [record.history.step.num for record in records(path, "history")]


def records(path: Path, kind: str) -> Iterator[Any]:
    """Its records of one kind, such as history, run or summary, as W&B defines them."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for content in _pieced(path.read_bytes()):
        record = Record()
        try:
            record.ParseFromString(content)
        except DecodeError:
            return
        if record.WhichOneof("record_type") == kind:
            yield record


def _pieced(content: bytes) -> Iterator[bytes]:
    at = HEADER
    begun = b""
    while content.startswith(MAGIC) and at + _PIECE.size <= len(content):
        left = BLOCK - at % BLOCK
        if left < _PIECE.size:
            at += left
            continue
        length, kind = _PIECE.unpack_from(content, at)
        at += _PIECE.size + length
        if not _WHOLE <= kind <= _LAST or at > len(content):
            return
        begun += content[at - length : at]
        if kind in (_WHOLE, _LAST):
            yield begun
            begun = b""
