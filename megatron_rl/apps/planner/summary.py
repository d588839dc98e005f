"""Summary of a checked recipe, for `megatron-rl train --dry-run`; `plan` has some of its rows."""

from collections.abc import Sequence
from typing import Any

from megatron_rl.config.evaluation import held_out
from megatron_rl.config.fleet import describe_sampler
from megatron_rl.config.schema import Config, Forward, LearnerSection
from megatron_rl.learner.modules import limits
from megatron_rl.loss.prox_pass import anchored_to_learner, makes_prox_pass
from megatron_rl.loss.table import LOSSES
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import parameters
from megatron_rl.preflight.checks import Checked
from megatron_rl.preflight.notes import writes


def describe(config: Config, checked: Checked, changes: Sequence[str] = ()) -> str:
    learner = config.learner
    rollout = config.rollout
    layout = checked.policy.layout
    millions = parameters(checked.policy.shape) / 1e6
    ranks = axes(layout)
    if layout.world > 1:
        ranks = f"{layout.world} ranks ({ranks})"
    steps = str(config.run.steps)
    if config.run.stop:
        steps += f", or {config.run.stop}"
    rows = [
        ("run", str(config.run.folder)),
        ("machine", str(checked.machine)),
        ("model", f"{config.model.path}, {millions:.2f}M parameters, {config.model.init}"),
        ("learner", f"{ranks}, {arithmetic(learner)}"),
        ("sampler", describe_sampler(config.sampler, config.quantization)),
        ("sync", settings(config.sync, "transport")),
        ("data", f"{', '.join(config.data.sources('train'))}: {checked.data or 'not read'}"),
        ("reward", f"{config.reward.name} {checked.scores}"),
        (
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} responses, at most "
            f"{rollout.max_response_tokens} tokens each; {learner.n_minibatches} optimizer "
            f"update(s){_prox(config)}",
        ),
        *objective(config),
        ("steps", steps),
        ("disk", str(writes(checked.policy.shape, config))),
        *changed(changes),
        *(("missing:", what) for what in checked.to_bring),
        *(("note:", what) for what in checked.notes),
    ]
    return (
        "\n".join(f"{name:<10} {text}".rstrip() for name, text in rows)
        + "\nnothing was written (dry run)"
    )


def axes(layout: Layout) -> str:
    sizes = {
        "TP": layout.tp,
        "PP": layout.pp,
        "CP": layout.cp,
        "EP": layout.ep,
        "DP": layout.dp,
    }
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 rank"


def objective(config: Config) -> list[tuple[str, str]]:
    """Rows of loss, correction, optimizer, evaluations and checkpoints."""
    rules = len(config.correction.reject)
    correction = f"weight {settings(config.correction.weight, 'level')}, reject rules: {rules}"
    evaluated = "never"
    if config.eval.every:
        sets = (f"{one.name or 'eval'} ({one.path} x {one.samples})" for one in held_out(config))
        evaluated = f"every {config.eval.every} steps: {', '.join(sets)}"
    loss = settings(config.loss, "name", *LOSSES[config.loss.name].reads)
    return [
        ("loss", f"{loss}, advantages: {config.advantage.estimator}"),
        ("correction", correction),
        ("optim", settings(config.optim, "lr")),
        ("eval", evaluated),
        ("checkpoint", settings(config.checkpoint, "every", "keep_last")),
    ]


def settings(section: Any, *always: str) -> str:
    """Keys of a section that are not at their default, as key=value."""
    default = type(section)()
    shown = [
        f"{key}={value}"
        for key, value in vars(section).items()
        if key in always or value != getattr(default, key)
    ]
    return " ".join(shown)


def changed(changes: Sequence[str]) -> list[tuple[str, str]]:
    """Rows of the keys that differ from the recipe's base."""
    return [("from base" if place == 0 else "", change) for place, change in enumerate(changes)]


def arithmetic(learner: LearnerSection) -> str:
    forward = ""
    if learner.forward != Forward.bf16:
        forward = ", forward as the sampler computes it"
    if scaled := limits.fp8(learner):
        return f"fp8 ({scaled}, {limits.fp8_recipe(learner)}), the rest in {learner.precision}{forward}"
    return f"{learner.precision}{forward}"


def _prox(config: Config) -> str:
    if config.rollout.supervised:
        return ""
    if makes_prox_pass(config.correction, config.loss, config.learner, config.rollout):
        return ", after a separate proximal pass"
    if not anchored_to_learner(config.correction, config.rollout):
        return f"; no proximal pass, the ratio's anchor is {config.correction.anchor}"
    return ", whose own forward pass gives the proximal logprobs"
