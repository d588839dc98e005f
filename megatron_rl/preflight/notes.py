"""Notes on settings that may surprise: shown beside the plan and at the start of a run; none refuses a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_rl.config.schema import (
    DataSection,
    EvalSection,
    LearnerSection,
    LossConfig,
    ModelSection,
    Precision,
    RunSection,
)
from megatron_rl.data.layouts import field
from megatron_rl.data.tokenizer import has_template
from megatron_rl.loss.table import CLIP, LOSSES
from megatron_rl.preflight.disk import short_disk
from megatron_rl.preflight.machine import Machine

LONGEST_ROW = 1 << 20


def unreachable_stop(run: RunSection, eval: EvalSection) -> Iterator[str]:
    if run.stop and eval.every == 0:
        yield f"run.stop={run.stop} never happens, as eval.every=0 turns evaluations off; the run ends after run.steps"


def unusual_clip(loss: LossConfig) -> Iterator[str]:
    """A clip of another loss: of another size, so that it never acts, or always does."""
    about = LOSSES[loss.name]
    least, most = about.clips
    read = [key for key in CLIP if key in about.reads and not (loss.absolute and key == "clip_low")]
    if odd := {key: getattr(loss, key) for key in read if not least <= getattr(loss, key) <= most}:
        said = ", ".join(f"loss.{key}={clip:g}" for key, clip in odd.items())
        follows = "next to nothing is clipped" if max(odd.values()) > most else "nearly all is clipped"
        yield f"{said} with loss.name={loss.name}: {follows}; usual with it is {least:g} to {most:g} (conf/*.yaml)"


def plain_prompts(model: ModelSection, data: DataSection) -> Iterator[str]:
    yield from plain_text(model, data, data.sources("train"))


def plain_text(model: ModelSection, data: DataSection, paths: Iterable[str]) -> Iterator[str]:
    """Files whose prompts a chat model would read as they stand."""
    if data.template is not None or data.system_prompt is not None or not has_template(model.folder):
        return
    for path in paths:
        if _is_text(Path(path), data.prompt_key or "prompt"):
            yield (
                f"the prompts of {path} are plain text and are not put into the chat template that {model.path} has; "
                "for a chat model set data.template={}, or give lists of messages"
            )


def slow_products(machine: Machine, learner: LearnerSection) -> Iterator[str]:
    if machine.fastest and learner.precision is Precision.bf16:
        yield (
            "this host multiplies BF16 in FP32, as env.json says under host; a small model is faster with "
            + " ".join(f"{key}={value}" for key, value in machine.fastest)
        )


def _is_text(file: Path, key: str) -> bool:
    """Whether the first row has text there; what cannot be read is said elsewhere."""
    if not file.is_file():
        return False
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet
            import pyarrow.types

            kind = pyarrow.parquet.read_schema(file).field(key).type
            return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
        with file.open(encoding="utf-8") as lines:
            return isinstance(field(json.loads(lines.readline(LONGEST_ROW)), key), str)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


RULES = (unreachable_stop, unusual_clip, plain_prompts, short_disk, slow_products)
