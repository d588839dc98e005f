"""Summary of a checked recipe in a few lines, for `megatron-rl train --dry-run`; `plan` has some of
its rows, too.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.evaluation import held_out
from megatron_rl.config.fleet import describe_sampler
from megatron_rl.config.prox_pass import anchored_to_learner, makes_prox_pass
from megatron_rl.config.schema import (
    Anchor,
    CheckpointSection,
    Config,
    CorrectionConfig,
    Decay,
    Forward,
    LearnerSection,
    Level,
    LossConfig,
    OptimSection,
    Outside,
    RunSection,
)
from megatron_rl.learner.modules import limits
from megatron_rl.loss.table import CLIP, LOSSES
from megatron_rl.models.layout import Layout
from megatron_rl.preflight.checks import Checked
from megatron_rl.preflight.notes import writes
from megatron_rl.preflight.sync_plan import plan_sync

ANCHORS = {
    Anchor.sampler: "the sampler",
    Anchor.interpolated: "interpolated, by each token's staleness",
}


def describe(config: Config, checked: Checked, changes: Sequence[str] = ()) -> str:
    learner = config.learner
    rollout = config.rollout
    layout = checked.policy.layout
    plan = plan_sync(checked.policy, config.quantization.format, config.quantization.ignore)
    rows = [
        ("run", str(Path(config.run.root) / str(config.run.name))),
        ("machine", str(checked.machine)),
        (
            "model",
            f"{config.model.path}, {plan.plain_bytes / 2e6:.2f}M parameters, {config.model.init}",
        ),
        ("learner", f"{layout.world} ranks ({axes(layout)}), {arithmetic(learner)}"),
        ("sampler", describe_sampler(config.sampler, config.quantization)),
        (
            "sync",
            f"{config.sync.transport}, {plan.nbytes / 1e6:.2f} MB in {len(plan.transfers)} "
            "tensors each time",
        ),
        (
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} answers, at most "
            f"{rollout.max_response_tokens} tokens each; {learner.n_minibatches} "
            f"update(s){_prox(config)}",
        ),
        *objective(config),
        ("steps", f"{config.run.steps}" + _stop(config.run)),
        ("disk", str(writes(checked.policy.shape, checked.policy.hf_config, config))),
        *changed(changes),
        *(("to bring:", what) for what in checked.to_bring),
        *(("note:", what) for what in checked.notes),
    ]
    return "\n".join(f"{name:<8} {text}" for name, text in rows) + "\nnothing was written (dry run)"


def axes(layout: Layout) -> str:
    sizes = (
        ("TP", layout.tp),
        ("PP", layout.pp),
        ("CP", layout.cp),
        ("EP", layout.ep),
        ("DP", layout.dp),
    )
    return " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "one rank"


def objective(config: Config) -> list[tuple[str, str]]:
    """What is minimised, at which rate, how it is measured, and what is kept."""
    return [
        ("loss", _loss(config)),
        ("optim", _schedule(config.optim)),
        ("eval", _held_out(config)),
        ("kept", _checkpoints(config.checkpoint)),
    ]


def changed(changes: Sequence[str]) -> list[tuple[str, str]]:
    """Rows of what a recipe makes of its base."""
    return [("changed" if place == 0 else "", change) for place, change in enumerate(changes)]


def arithmetic(learner: LearnerSection) -> str:
    if learner.forward == Forward.bf16:
        forward = ""
    else:
        forward = ", forward as the sampler computes it"
    if scaled := limits.fp8(learner):
        return f"fp8 ({scaled}, {limits.fp8_recipe(learner)}), the rest in {learner.precision}{forward}"
    return f"{learner.precision}{forward}"


def _loss(config: Config) -> str:
    loss = config.loss
    if loss.kl_coef:
        kl = f"KL {loss.kl_coef:g} ({loss.kl_estimator})"
    else:
        kl = "no KL"
    correction = _correction(config.correction)
    return f"{loss.name}{_clip(loss)}, {kl}, {config.advantage.estimator} advantages, correction: {correction}"


def _clip(loss: LossConfig) -> str:
    if not set(CLIP) <= set(LOSSES[loss.name].reads):
        return ""
    if loss.params.get("absolute"):
        return f" with ratios up to {loss.clip_high:g}"
    dual = ""
    if loss.params.get("dual_clip") is not None:
        dual = f", dual clip {loss.params['dual_clip']:g}"
    return f" with clip {loss.clip_low:g} below and {loss.clip_high:g} above{dual}"


def _schedule(optim: OptimSection) -> str:
    if optim.decay == Decay.constant:
        decay = str(optim.decay)
    else:
        decay = f"{optim.decay} to {optim.min_lr:g}"
    return f"learning rate {optim.lr:g}, {optim.warmup_steps} steps of warm-up, then {decay}"


def _held_out(config: Config) -> str:
    sets = held_out(config)
    if not sets or not config.eval.every:
        return "never"
    named = (f"{one.name or 'eval'} ({one.path}, {one.samples} answer(s) each)" for one in sets)
    return f"every {config.eval.every} steps: {', '.join(named)}"


def _checkpoints(checkpoint: CheckpointSection) -> str:
    if checkpoint.every:
        moments = [f"every {checkpoint.every} steps"]
    else:
        moments = []
    moments += [f"every {checkpoint.minutes:g} minutes"] if checkpoint.minutes else []
    if checkpoint.best:
        best = f", and the one with the highest {checkpoint.best}"
    else:
        best = ""
    if moments:
        return f"checkpoints {' and '.join(moments)}, the last {checkpoint.keep_last}{best}"
    return "no checkpoints"


def _correction(correction: CorrectionConfig) -> str:
    weight = correction.weight
    if correction.reject:
        rules = f", {len(correction.reject)} reject rule(s)"
    else:
        rules = ""
    if weight.level == Level.none:
        return f"no weight{rules}"
    inside = " to ".join(f"{bound:g}" for bound in (weight.low, weight.high) if bound is not None)
    if weight.target_ess is not None:
        bounds = f", capped for an effective sample size of {weight.target_ess:g}"
    elif weight.outside == Outside.zero:
        where = "above" if weight.low is None else "below" if weight.high is None else "outside"
        bounds = f", 0 {where} {inside}"
    else:
        low = f", at least {weight.low:g}" if weight.low is not None else ""
        bounds = (f" capped at {weight.high:g}" if weight.high is not None else "") + low
    return f"{weight.level} weight{bounds}{rules}"


def _prox(config: Config) -> str:
    made = makes_prox_pass(config.correction, config.loss, config.learner, config.rollout)
    if made or config.rollout.supervised:
        return ""
    if not anchored_to_learner(config.correction, config.rollout):
        return f"; no proximal pass, the ratio's anchor is {ANCHORS[config.correction.anchor]}"
    return ", whose own forward pass gives the proximal logprobs"


def _stop(run: RunSection) -> str:
    return "".join(f", or {metric} >= {least:g}" for metric, least in (run.stop or {}).items())
