"""Run directories read back, incomplete ones as far as they go: configuration, curves, lanes,
recorded tokens, their mismatch by cuts, and a table of it for sessions.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron_rl.checkpoint.resume import flatten
from megatron_rl.config import ConfigError
from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.files import read_json, read_whole
from megatron_rl.rollout_correction.breakdown import OF_SESSIONS, Slice, breakdowns, pooled
from megatron_rl.runs.console import table
from megatron_rl.runs.metrics_file import Curves, read_lines
from megatron_rl.runs.rollout_file import (
    STEP,
    Recorded,
    arrays,
    load_recorded,
    read_rollouts,
    recorded_steps,
)
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.runs.status import known_status

T = TypeVar("T")
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
LONGEST_PROBLEM = 300  # characters
RECORDED_STEPS = 8  # as many recorded steps, evenly spread, are read for histograms and cuts

# row of a chart -> the lanes that stand in it; the learner's rollout phase is its wait for answers
ROWS = {
    "sampler": ("sampler",),
    "rewards": ("rewards",),
    "learner": ("rollout", "prox", "correction", "update", "record", "checkpoint"),
    "sync, eval": ("sync", "eval"),
}
SHOWN = 6  # steps of a chart
BREAKDOWN = ("recorded tokens by", "", "tokens", "mean d", "k3", "mean |d|", "mult_prob_error")


class NotARun(ConfigError):
    pass


@dataclass(frozen=True)
class Tokens:
    """Trained-on response tokens of the recorded steps, one entry each."""

    sampler_logprobs: np.ndarray
    prox_logprobs: np.ndarray
    weights: np.ndarray  # NaN where the correction dropped the token, or none were recorded

    @property
    def log_ratio(self) -> np.ndarray:
        return np.clip(self.prox_logprobs - self.sampler_logprobs, -20.0, 20.0)


class Lane(NamedTuple):
    """A span of a chart: seconds since the chart's beginning."""

    row: str
    lane: str
    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class RunData(Curves):
    name: str
    path: Path
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    status: Mapping[str, Any]
    # files of a torn folder, and why; grows while it is read
    unreadable: list[str] = field(default_factory=list)

    def setting(self, key: str, default: Any = None) -> Any:
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        # where a section or a list is expected, a torn file may hold something else
        if isinstance(default, dict | list) and not isinstance(value, type(default)):
            return default
        return value

    @property
    def steps(self) -> int:
        """The last step with a line of metrics."""
        return int(self.lines[-1]["progress/step"]) if self.lines else 0

    @cached_property
    def tokens(self) -> Tokens | None:
        """None without recorded steps that hold both logprobs."""
        parts: list[Rows] = []
        for _, path in self._recorded():
            parts += readable(path, _tokens_of, list[Rows](), self.unreadable)
        if not any(len(mu) for mu, _, _ in parts):
            return None
        return Tokens(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    @cached_property
    def mismatch(self) -> list[Slice]:
        """The recorded steps along every cut; the policy that step N ought to sample from has
        version N - 1.
        """
        parts: list[Slice] = []
        for step, path in self._recorded():
            read = partial(recorded_breakdowns, policy_version=step - 1)
            parts += readable(path, read, list[Slice](), self.unreadable)
        return pooled(parts)

    @cached_property
    def lanes(self) -> list[Lane]:
        return readable(self.path / "lanes.jsonl", read_lanes, list[Lane](), self.unreadable)

    def logs(self) -> list[Path]:
        """Logs of every attempt."""
        return sorted((self.path / "logs").glob("attempt_*/*.log"))

    def _recorded(self) -> list[tuple[int, Path]]:
        steps = recorded_steps(RunDir(self.path).rollouts)
        picks = np.linspace(
            0,
            len(steps) - 1,
            min(len(steps), RECORDED_STEPS),
        ).round()
        return [steps[int(pick)] for pick in picks]


def load_run(path: Path) -> RunData:
    run = RunDir(path)
    if not any(file.is_file() for file in (run.metrics, run.config, run.status)):
        raise NotARun(
            f"{path} is not a run directory: it has no metrics.jsonl. Give the folder of a run, as "
            "runs/NAME"
        )
    problems: list[str] = []
    config = readable(run.config, _mapping, dict[str, Any](), problems)
    env = readable(run.env, read_json, dict[str, Any](), problems)
    readable(run.status, read_json, dict[str, Any](), problems)
    lines, torn = readable(
        run.metrics,
        read_lines,
        (list[dict[str, float]](), 0),
        problems,
    )
    if torn:
        problems.append(f"{run.metrics.name}: {torn} lines are incomplete or without a step")
    for file in sorted(run.rollouts.glob("*.parquet")):
        if not STEP.fullmatch(file.name):
            problems.append(f"rollouts/{file.name}: not named after a step")
    return RunData(
        tuple(lines), path.resolve().name, path, config, env, known_status(path), problems
    )


def readable(path: Path, read: Callable[[Path], T], otherwise: T, problems: list[str]) -> T:
    """Read a file that may be corrupt: an error goes to `problems`, and the rest is still shown."""
    try:
        return read(path)
    except Exception as error:
        text = " ".join(str(error).split())[:LONGEST_PROBLEM]
        problem = f"{path.parent.name}/{path.name}: {type(error).__name__}: {text}"
        if problem not in problems:
            problems.append(problem)
        return otherwise


def _mapping(path: Path) -> dict[str, Any]:
    found = read_yaml(read_whole(path).decode())
    if not isinstance(found, dict):
        raise TypeError(f"it holds {type(found).__name__}, not keys and values")
    return found


def load_runs(paths: Sequence[Path]) -> list[RunData]:
    """Load runs under distinct names: folders of the same name are called by their paths."""
    runs = [load_run(path) for path in paths]
    names = [run.name for run in runs]
    return [run if names.count(run.name) == 1 else replace(run, name=str(run.path)) for run in runs]


def config_differences(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Key -> value per run, only where they differ. A run's own name is no difference."""
    flat = [dict(flatten(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    values_of = {key: [one.get(key) for one in flat] for key in keys}
    return {
        key: values
        for key, values in values_of.items()
        if key not in ("run.name", "run.if_exists") and any(value != values[0] for value in values)
    }


def recorded_breakdowns(path: Path, policy_version: int | None = None) -> list[Slice]:
    """The breakdowns of one recorded step; none where it holds no learner logprobs."""
    return _breakdowns(load_recorded(path), policy_version)


def _breakdowns(recorded: Recorded, policy_version: int | None = None) -> list[Slice]:
    if recorded.prox_logprobs_N is None:
        return []
    return breakdowns(
        recorded.prox_logprobs_N,
        recorded.batch,
        finish_reasons=[one.rollout.finish_reason for one in recorded.scored],
        policy_version=policy_version,
        formats=[one.rollout.format for one in recorded.scored],
    )


def session_table(recorded: Iterable[Recorded]) -> str:
    """Mismatch of recorded sessions by turn, by place in it and by kind of token.

    Begins with an empty line; empty where there are no sessions, or no learner logprobs.
    """
    parts = pooled(part for one in recorded for part in _breakdowns(one) if part.by in OF_SESSIONS)
    if not parts:
        return ""
    rows = [
        [
            part.by,
            part.label,
            f"{part.tokens:,}",
            f"{-part.kl:+.2e}",
            f"{part.k3_kl:.2e}",
            f"{part.abs_diff:.2e}",
            f"{part.mult_prob_error:.4f}",
        ]
        for part in parts
    ]
    return "\n".join(["\n", *table(BREAKDOWN, rows)])


def _tokens_of(path: Path) -> list[Rows]:
    parts = []
    rows = read_rollouts(path)
    names = ("sampler_logprobs", "prox_logprobs", "weights", "kept", "loss_mask")
    columns = [arrays(rows, name) for name in names]
    for mu, p, weights, kept, mask in zip(*columns, strict=True):
        if p is None or mu is None:
            continue
        w = np.full(len(mu), np.nan) if weights is None else weights
        if kept is not None:
            w = np.where(kept, w, np.nan)
        use = mask & np.isfinite(mu) & np.isfinite(p)
        parts.append(
            (
                mu[use].astype(float),
                p[use].astype(float),
                w[use].astype(float),
            )
        )
    return parts


def read_lanes(path: Path, steps: int = SHOWN) -> list[Lane]:
    """Spans of some steps in a run's middle: early ones hold one-time work. Empty for old runs."""
    if not path.is_file():
        return []
    lines: dict[int, list[tuple[str, float, float]]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, LookupError, TypeError):  # a torn line
            line = json.loads(text)
            lines[line["step"]] = line["spans"]
    numbers = sorted(step for step in lines if step > 0)
    first = max(0, len(numbers) // 2 - steps // 2)
    chosen = set(numbers[first : first + steps])
    window = [span for step in chosen for span in lines[step] if span[0] in ROWS["learner"]]
    if not window:
        return []
    start = min(begin for _, begin, _ in window)
    stop = max(end for _, _, end in window)
    row_of = {lane: row for row, lanes in ROWS.items() for lane in lanes}
    return [
        Lane(
            row_of[lane],
            lane,
            step,
            max(begin, start) - start,
            min(end, stop) - start,
        )
        for step, spans in sorted(lines.items())
        for lane, begin, end in spans
        if lane in row_of and end > start and begin < stop
    ]
