"""Resuming a run: refuses changed keys or data, picks the newest complete checkpoint (before a gap
in the records), cuts records back to its step and removes newer rollouts and checkpoints; saver.py
loads the state.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.checkpoints import Checkpoint
from megatron_rl.config import ConfigError, from_mapping, to_yaml
from megatron_rl.config.load import recorded as recorded_mapping
from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.files import open_regular, replacing

# keys that may change on resume: length, records, machines
MAY_CHANGE = (
    "run.root",
    "run.steps",
    "run.stop",
    "run.stop.",
    "run.if_exists",
    "run.resume_allow",
    "run.device",
    "run.hang_timeout_s",
    "log.",
    "checkpoint.",
    "eval.",
    "data.eval",
    "sampler.",
    "reward.workers",
    "reward.timeout_s",
    "learner.tensor_parallel",
    "learner.offload",
    "learner.pipeline_parallel",
    "learner.expert_parallel",
    "learner.data_parallel",
    "learner.megatron.",
    "learner.context_parallel",
    "learner.recompute",
    "learner.tokens_per_microbatch",
    "sync.transport",
    "sync.dir",
    "sync.full_every",
    "sync.probe_every",
    "sync.probe_budget",
)
FIXED = "learner.lora."  # fixed for all checkpoints of a run
NONE = "(none)"  # a key that one of two recipes does not have


def refuse_changes(recorded: Path, resolved_yaml: str) -> None:
    """Raise if a key that affects learning has changed, unless it is in run.resume_allow."""
    before = read_yaml(to_yaml(from_mapping(recorded_mapping(recorded))))
    after = read_yaml(resolved_yaml)
    allowed = (after.get("run") or {}).get("resume_allow") or ()
    free_sections = tuple(free for free in MAY_CHANGE if free.endswith("."))
    found = [
        (key, old, new)
        for key, old, new in changes(before, after)
        if key not in MAY_CHANGE
        and not key.startswith(free_sections)
        and (key not in allowed or key.startswith(FIXED))
    ]
    if found:
        listed = "\n".join(f"  {key}: {old} -> {new}" for key, old, new in found)
        names = ", ".join(key for key, *_ in found if not key.startswith(FIXED))
        hint = f", or resume with the change: run.resume_allow=[{names}]"
        if any(key.startswith(FIXED) for key, *_ in found):
            hint = f". Other adapters than the checkpoints' need a run of their own ({FIXED}*)"
        raise ConfigError(
            f"run.if_exists=resume: the recipe is not the one that {recorded.parent} began "
            f"with:\n{listed}\nUndo that{hint}"
        )


def refuse_other_data(
    recorded: str | None, found: str, allowed: Collection[str], where: str
) -> None:
    """Raise if the place in the order of prompts is of other data. `recorded`: None if old."""
    if recorded not in (None, found) and "data.train" not in allowed:
        raise ConfigError(
            f"data.train: prompts or answers in {where} are not those that the run has drawn from "
            "so far: some prompts would be repeated, others skipped. Restore the old order, "
            "or resume at the same position in the new ones: run.resume_allow=[data.train]"
        )


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, old value, new value) of each difference."""
    before = dict(flatten(old))
    after = dict(flatten(new))
    for key in sorted(before.keys() | after.keys()):
        was = before.get(key, NONE)
        now = after.get(key, NONE)
        if was != now:
            yield key, was, now


def newest_resumable(run: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest complete checkpoint; if the records have a gap (a full disk), the newest
    before it.
    """
    newest = None
    for found in checkpoints.complete_checkpoints(run / "checkpoints", note):
        missing = gap(run, found.step, found.said)
        if missing is None:
            return found
        note(
            f"the records of {run} have a gap before the checkpoint of step {found.step}: {missing}"
        )
        newest = newest or found
    if newest:
        note(
            f"no checkpoint is from before the gap: the run resumes after step {newest.step}, and the gap stays"
        )
    return newest


def gap(run: Path, step: int, said: bool = True) -> str | None:
    """Describe the first missing line up to a step in an existing file. `said`: as in `rewind`."""
    for name, first, last in (
        ("metrics.jsonl", 0, step if said else step - 1),
        ("ledger.jsonl", 1, step),
    ):
        there = set(map(_step, _lines(run / name)))
        for wanted in range(first, last + 1) if there else ():
            if wanted not in there:
                return f"{name} has no line of step {wanted}"
    return None


def rewind(run: Path, step: int, said: bool = True) -> None:
    """Cut the records back to a step; without its line of metrics if that was written after the
    save (`said`).
    """
    _keep_lines(run / "metrics.jsonl", step if said else step - 1)
    _keep_lines(run / "ledger.jsonl", step)
    for path in (run / "rollouts").glob("step_*.parquet"):
        number = path.stem.removeprefix("step_")
        if number.isdigit() and int(number) > step:
            path.unlink()
    checkpoints.forget_after(run / "checkpoints", step)


def _keep_lines(path: Path, step: int) -> None:
    if not path.exists():
        return
    with replacing(path) as partial, partial.open("wb") as kept:
        kept.writelines(line for line in _lines(path) if _step(line) <= step)


def _lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with open_regular(path) as file:
        return file.readlines()


def _step(line: bytes) -> float:
    """Step of a line; infinite if it is incomplete or has none, so that it is not kept."""
    try:
        if line.endswith(b"\n"):
            found = json.loads(line)
            return int(found.get("progress/step", found.get("step")))
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError):
        pass
    return float("inf")


def flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of a configuration."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item
