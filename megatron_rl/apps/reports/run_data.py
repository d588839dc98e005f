"""Run directories read back, incomplete ones as far as they go: configuration, curves, lanes,
recorded tokens, their mismatch by cuts, and a table of it for sessions.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_rl.checkpoint.resume import flatten
from megatron_rl.config import ConfigError
from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.files import JsonObject, read_bounded, read_json
from megatron_rl.rollout_correction.breakdown import OF_SESSIONS, Slice, breakdowns, pooled
from megatron_rl.tracking.console import table
from megatron_rl.tracking.metrics_file import Curves, read_lines
from megatron_rl.tracking.rollout_file import STEP, Recorded, load_recorded, recorded_steps
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.tracking.status import known_status

LONGEST_PROBLEM = 300  # characters
RECORDED_STEPS = 8  # as many recorded steps, evenly spread, are read for histograms and cuts

# chart row -> its lanes; the learner's rollout phase is its wait for responses
ROWS = {
    "sampler": ("sampler",),
    "rewards": ("rewards",),
    "learner": ("rollout", "prox", "correction", "update", "record", "checkpoint"),
    "sync, eval": ("sync", "eval"),
}
SHOWN = 6  # steps of a chart
BREAKDOWN = ("recorded tokens by", "", "tokens", "mean d", "k3", "mean |d|", "mult_prob_error")
TOP_BREAKDOWN = ("KL (top tokens)", "TV (top tokens)")


class NotARun(ConfigError):
    pass


@dataclass(frozen=True)
class Tokens:
    """Trained-on response tokens of recorded steps with both logprobs, one entry each."""

    log_ratio: np.ndarray  # learner's logprob less the sampler's
    weights: np.ndarray  # NaN where the correction dropped the token, or none were recorded


class Lane(NamedTuple):
    """A span of a chart: seconds since the chart's beginning."""

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
    # unreadable files and the reasons; extended while the run is read
    unreadable: list[str] = field(default_factory=list)

    def setting(self, key: str, default: Any = None) -> Any:
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        # an incomplete file may hold another type in the place of a section or a list
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
        parts, _ = self._recorded
        if not any(len(one.weights) for one in parts):
            return None
        return Tokens(
            np.concatenate([one.log_ratio for one in parts]),
            np.concatenate([one.weights for one in parts]),
        )

    @cached_property
    def mismatch(self) -> list[Slice]:
        """The recorded steps along every cut; the policy that step N ought to sample from has
        version N - 1.
        """
        return pooled(self._recorded[1])

    @cached_property
    def lanes(self) -> list[Lane]:
        path = RunDir(self.path).timeline
        with reading(path, self.unreadable):
            return read_lanes(path)
        return []

    @cached_property
    def _recorded(self) -> tuple[list[Tokens], list[Slice]]:
        """Tokens and breakdowns of some of the recorded steps, evenly spread."""
        files = recorded_steps(RunDir(self.path).rollouts)
        tokens: list[Tokens] = []
        slices: list[Slice] = []
        for pick in np.linspace(0, len(files) - 1, min(len(files), RECORDED_STEPS)).round():
            _, path = files[int(pick)]
            with reading(path, self.unreadable):
                recorded = load_recorded(path)
                tokens += _tokens_of(recorded)
                slices += recorded_breakdowns(recorded, recorded.version)
        return tokens, slices


def load_run(path: Path) -> RunData:
    run = RunDir(path)
    if not any(file.is_file() for file in (run.metrics, run.config, run.status)):
        raise NotARun(
            f"{path} is not a run directory: it has no metrics.jsonl. Give the folder of a run, as runs/NAME"
        )
    problems: list[str] = []
    config: JsonObject = {}
    env: JsonObject = {}
    lines: list[dict[str, float]] = []
    incomplete = 0
    with reading(run.config, problems):
        config = _mapping(run.config)
    with reading(run.env, problems):
        env = read_json(run.env)
    with reading(run.status, problems):
        read_json(run.status)
    with reading(run.metrics, problems):
        lines, incomplete = read_lines(run.metrics)
    if incomplete:
        problems.append(f"{run.metrics.name}: {incomplete} lines are incomplete or without a step")
    for file in sorted(run.rollouts.glob("*.parquet")):
        if not STEP.fullmatch(file.name):
            problems.append(f"rollouts/{file.name}: not named after a step")
    return RunData(
        tuple(lines), path.resolve().name, path, config, env, known_status(path), problems
    )


@contextmanager
def reading(path: Path, problems: list[str]) -> Iterator[None]:
    """Read a file that may be corrupt: an error goes to `problems`, and the rest is still shown."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())[:LONGEST_PROBLEM]
        problem = f"{path.parent.name}/{path.name}: {type(error).__name__}: {text}"
        if problem not in problems:
            problems.append(problem)


def _mapping(path: Path) -> JsonObject:
    found = read_yaml(read_bounded(path).decode())
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


def recorded_breakdowns(recorded: Recorded, policy_version: int | None = None) -> list[Slice]:
    """The breakdowns of one recorded step; none where it holds no learner logprobs."""
    if recorded.prox_logprobs_N is None:
        return []
    return breakdowns(
        recorded.prox_logprobs_N,
        recorded.batch,
        finish_reasons=[one.rollout.finish_reason for one in recorded.scored],
        policy_version=policy_version,
        formats=[one.rollout.format for one in recorded.scored],
        top_prox_E=recorded.top_prox_logprobs_E,
    )


def session_table(recorded: Iterable[Recorded]) -> str:
    """Mismatch of recorded sessions by turn, by place in it and by kind of token.

    Begins with an empty line; empty where there are no sessions, or no learner logprobs.
    """
    parts = pooled(
        part for one in recorded for part in recorded_breakdowns(one) if part.by in OF_SESSIONS
    )
    if not parts:
        return ""
    top = any(part.top_tokens for part in parts)
    rows = [
        [
            part.by,
            part.label,
            f"{part.tokens:,}",
            f"{-part.kl:+.2e}",
            f"{part.k3_kl:.2e}",
            f"{part.abs_diff:.2e}",
            f"{part.mult_prob_error:.4f}",
            *([f"{part.top_kl:.2e}", f"{part.top_tv:.2e}"] if top else []),
        ]
        for part in parts
    ]
    head = BREAKDOWN + (TOP_BREAKDOWN if top else ())
    return "\n".join(["\n", *table(head, rows)])


def _tokens_of(recorded: Recorded) -> Iterator[Tokens]:
    """Tokens of one recorded step; nothing where it holds no learner logprobs."""
    if recorded.prox_logprobs_N is None:
        return
    mu_N = recorded.batch.sampler_logprobs_N.double()
    d_N = recorded.prox_logprobs_N.double() - mu_N
    use_N = recorded.batch.mask_N & d_N.isfinite()
    weights_N = recorded.weights_N
    if weights_N is None:
        weights_N = d_N.new_full(d_N.shape, math.nan)
    yield Tokens(d_N[use_N].clamp(-20.0, 20.0).numpy(), weights_N[use_N].double().numpy())


def read_lanes(path: Path, steps: int = SHOWN) -> list[Lane]:
    """Spans of some steps in a run's middle: early ones hold one-time work. Empty for old runs."""
    if not path.is_file():
        return []
    lines: dict[int, list[tuple[str, float, float]]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, LookupError, TypeError):  # an incomplete line
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
    return [
        Lane(lane, step, max(begin, start) - start, min(end, stop) - start)
        for step, spans in sorted(lines.items())
        for lane, begin, end in spans
        if end > start and begin < stop
    ]
