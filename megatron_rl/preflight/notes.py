"""Notes on settings that may surprise, none of which refuses a recipe; and an estimate of what a
run writes to disk.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import schema
from megatron_rl.config.plain_yaml import CONF, read_yaml
from megatron_rl.data.layouts import field
from megatron_rl.data.tokenizer import has_template
from megatron_rl.files import free_bytes
from megatron_rl.loss.table import CLIP, LOSSES
from megatron_rl.models.mapping import parameters, trained
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.machine import Machine

LONGEST_ROW = 1 << 20
GIB = 1 << 30
LINE = 4096  # bytes of metrics and ledger for each step
# of a recorded token: its number, three logprobs or weights, two marks, and its text
RESPONSE_TOKEN = 22
PROMPT_TOKEN = 8
# of the top logprobs, at most: their number at a token; id and logprob of each
TOP_COUNT = 2
TOP_ENTRY = 6
# of a parameter in a checkpoint: the weight, the optimizer's copy of it, two moments; in FP32 the
# weight is that copy
PARAMETER = {schema.Precision.bf16: 2 + 4 + 8, schema.Precision.fp32: 4 + 8}


def unreachable_stop(run: schema.RunSection, eval: schema.EvalSection) -> Iterator[str]:
    if run.stop and eval.every == 0:
        yield f"run.stop={run.stop} never happens, as eval.every=0 turns evaluations off; the run ends after run.steps"


def unseen_steps(run: schema.RunSection, log: schema.LogSection) -> Iterator[str]:
    if late := [step for step in log.profile_steps if step > run.steps]:
        yield f"log.profile_steps={log.profile_steps}: {late} never come; the run ends after run.steps={run.steps}"


def unusual_clip(loss: schema.LossConfig) -> Iterator[str]:
    """Note on a clip range of another loss, which would never act or always."""
    about = LOSSES[loss.name]
    least, most = about.clips
    read = [key for key in CLIP if key in about.reads]
    if loss.params.get("absolute"):
        read.remove("clip_low")
    if odd := {key: getattr(loss, key) for key in read if not least <= getattr(loss, key) <= most}:
        said = ", ".join(f"loss.{key}={clip:g}" for key, clip in odd.items())
        follows = "nearly all is clipped"
        if max(odd.values()) > most:
            follows = "next to nothing is clipped"
        usual = f"usual with it is {least:g} to {most:g}{_preset(loss.name)}"
        yield f"{said} with loss.name={loss.name}: {follows}; {usual}"


def low_of_calibrated(correction: schema.CorrectionConfig) -> Iterator[str]:
    weight = correction.weight
    if weight.cap.confidence is not None and weight.low is not None:
        yield (
            f"correction.weight.low={weight.low:g} with correction.weight.cap.confidence: where the "
            "cap was published, a lower bound lowered accuracy; null is usual"
        )


def _preset(loss: str) -> str:
    file = CONF / ("dapo.yaml" if loss == "ppo" else f"{loss}.yaml")
    if not file.is_file():
        return ""
    clips = read_yaml(file.read_text(encoding="utf-8"))["loss"]
    said = " and ".join(f"{clips[key]:g}" for key in CLIP if key in clips)
    return f", such as {said} in conf/{file.name} (base: ../conf/{file.name})"


def chat_template(
    environment: schema.EnvironmentSection, data: schema.DataSection, model: schema.ModelSection
) -> Iterator[str]:
    """Note on how the model's chat template renders the turns of a conversation."""
    if environment.name is not None and has_template(model.folder):
        from megatron_rl.environments.templates import describe

        yield f"environment {environment.name}: {describe(environment, model.folder, data.chat_template_kwargs or {})}"


def plain_prompts(model: schema.ModelSection, data: schema.DataSection) -> Iterator[str]:
    yield from plain_text(model, data, data.sources("train"))


def plain_text(
    model: schema.ModelSection, data: schema.DataSection, paths: Iterable[str]
) -> Iterator[str]:
    """Note on plain-text prompts that a chat model would get without its template."""
    if (
        data.chat_template_kwargs is not None
        or data.system_prompt is not None
        or not has_template(model.folder)
    ):
        return
    for path in paths:
        if _is_text(Path(path), data.prompt_key or "prompt"):
            yield (
                f"the prompts of {path} are plain text and are not put into the chat template that "
                f"{model.path} has; for a chat model set "
                "data.chat_template_kwargs={}, or give lists of messages"
            )


def slow_products(machine: Machine, learner: schema.LearnerSection) -> Iterator[str]:
    if machine.fastest and learner.precision is schema.Precision.bf16:
        yield (
            "this CPU multiplies BF16 in FP32 (see host in env.json); a small model is "
            "faster with " + " ".join(f"{key}={value}" for key, value in machine.fastest)
        )


def _is_text(file: Path, key: str) -> bool:
    """True if the first row has text in that column; unreadable files are reported elsewhere."""
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


@dataclass(frozen=True)
class Writes:
    """Estimated bytes written by a run; compression and shorter responses reduce the rollouts."""

    checkpoint: int
    checkpoints: int  # number kept, plus the one being written
    rollouts: int
    models: int  # the last one, and the best where one is asked for
    lines: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.models + self.lines + self.rollouts

    def __str__(self) -> str:
        parts = [
            (self.checkpoint, f"{self.checkpoints} checkpoints of {_gib(self.checkpoint)}"),
            (self.rollouts, f"rollouts {_gib(self.rollouts)}"),
            (self.models, f"models {_gib(self.models)}"),
        ]
        return f"at most {_gib(self.total)}: " + ", ".join(
            [text for nbytes, text in parts if nbytes] or ["metrics"]
        )


def writes(shape: ModelShape, config: schema.Config) -> Writes:
    run = config.run
    rollout = config.rollout
    checkpoint = config.checkpoint
    log = config.log
    saves = bool(checkpoint.every)
    kept = checkpoint.keep_last + bool(checkpoint.best)
    written = rollout.context_tokens - rollout.max_prompt_tokens  # in all turns of a row
    token = RESPONSE_TOKEN + top_bytes(rollout)
    row = rollout.max_prompt_tokens * PROMPT_TOKEN + written * token
    recorded = run.steps // log.record_every if log.record_every else 0
    return Writes(
        checkpoint=trained(shape) * PARAMETER[config.learner.precision] if saves else 0,
        checkpoints=min(kept + 1, max(1, run.steps)) if saves else 0,
        rollouts=recorded * rollout.prompts_per_step * rollout.samples_per_prompt * row,
        models=2 * parameters(shape) * (1 + bool(checkpoint.best)) if checkpoint.export_hf else 0,
        lines=run.steps * LINE,
    )


def top_bytes(rollout: schema.RolloutSection) -> int:
    """Return the bytes of a token's top logprobs, at most."""
    most = rollout.top_logprobs.max
    return TOP_COUNT + most * TOP_ENTRY if most else 0


def short_disk(shape: ModelShape, config: schema.Config, elsewhere: bool) -> Iterator[str]:
    """Note on too little disk space; no error, as the estimate is an upper bound and a full disk
    does not stop a run.
    """
    if elsewhere:
        return
    wanted = writes(shape, config)
    try:
        room = free_bytes(Path(config.run.root))
    except OSError:  # a mount that does not respond
        return
    if room < wanted.total:
        yield (
            f"run.root={config.run.root} has {_gib(room)} free, and the run writes {wanted}. Free "
            "space, raise log.record_every, or lower checkpoint.keep_last"
        )


def _gib(nbytes: int) -> str:
    if nbytes >= GIB / 10:
        return f"{nbytes / GIB:.1f} GiB"
    return f"{nbytes / 2**20:.1f} MiB"


def unread_score(reward: schema.RewardSection) -> Iterator[str]:
    if reward.wrong and not set(reward.weights) & set(schema.VERIFIERS):
        yield f"reward.wrong={reward.wrong:g} is not used: {reward.name} returns its own scores"


RULES = (
    unreachable_stop,
    unread_score,
    unseen_steps,
    unusual_clip,
    low_of_calibrated,
    chat_template,
    plain_prompts,
    short_disk,
    slow_products,
)
