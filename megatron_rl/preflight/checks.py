"""Checks of a recipe against machine, model and files before a run, a server or a standalone model
starts: every problem in one error, or in a list for the planner; and notes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_rl import hub
from megatron_rl.config import ConfigError, schema
from megatron_rl.config.evaluation import HeldOut, evaluated_tokens, held_out
from megatron_rl.config.fleet import local_formats
from megatron_rl.config.rules import Rule, findings
from megatron_rl.learner.modules import limits
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config
from megatron_rl.models.shape import HfConfig, Lora, ModelShape
from megatron_rl.preflight import engine, files, notes, roles
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import Machine, detect
from megatron_rl.preflight.sizes import size_problems
from megatron_rl.quantization.formats import FP8_CAPABILITY, format_problem
from megatron_rl.rewards import pool as rewards

# compute capability that Transformer Engine requires, by kind of scales
FP8_RECIPES = {"tensorwise": FP8_CAPABILITY, "blockwise": 9.0, "mxfp8": 10.0}


@dataclass(frozen=True)
class Checked:
    """A recipe that can run, with what was read on the way."""

    machine: Machine
    policy: Model
    # missing files, if the recipe is checked for another machine
    to_bring: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # valid settings that may surprise
    # contents of the training data, and scores of some of its answers, if they were read
    data: str = ""
    scores: str = ""


def check(
    config: schema.Config, found: Iterable[str] = (), on: Machine | None = None, here: bool = True
) -> Checked:
    """Raises one ConfigError that lists every problem, after those that are `found` already.

    `on`: a machine elsewhere, to which absent files are still to be brought. Without `here`
    something else has placed this process on GPUs.
    """
    facts, problems = _facts(config, on)
    if not here and "machine" in facts:
        facts["machine"] = replace(facts["machine"], nodes=0)
    problems = [*found, *problems, *findings((*RULES, *USER_CODE), facts)]
    absent = list(findings(ABSENT, facts))
    if on is None:
        problems += [each.error for each in absent if each.error]
    refuse(problems)
    to_bring = tuple(each.what for each in absent) if on else ()
    said = tuple(findings(notes.RULES, facts))
    return Checked(facts["machine"], facts["policy"], to_bring, said)


def refuse(problems: Iterable[str]) -> None:
    """Raises one ConfigError that lists every problem, once; none where there are none."""
    if found := dict.fromkeys(problems):
        raise ConfigError("\n".join(found))


def problems(config: schema.Config, on: Machine | None = None, complete: bool = False) -> list[str]:
    """Return the problems of a recipe that show without a call of the user's code. `complete`: its
    files have to exist, as for a job.
    """
    facts, found = _facts(config, on, cards=True)
    if complete:
        found += [each.error or f"not here: {each.what}" for each in findings(TO_FIND, facts)]
    return list(dict.fromkeys([*found, *findings(RULES, facts)]))


def _facts(
    config: schema.Config, on: Machine | None, cards: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the facts for the rules: sections, machine, model. Facts that cannot be read are
    problems.
    """
    sets = held_out(config)
    facts: dict[str, Any] = vars(config) | {
        "config": config,
        "elsewhere": on is not None,
        "sets": sets,
        "known_metrics": [name for one in sets for name in one.metrics()],
    }
    problems: list[str] = []
    try:
        facts["machine"] = on or detect(config.run.device)
    except ConfigError as error:
        problems.append(str(error))
    try:
        # an id is in the cache, unless a dry run could not reach the hub
        from_card = on or cards or hub.parse(config.model.path)
        hf_config = (read_card if from_card else read_hf_config)(config.model.folder)
        layout = Layout.from_config(config.learner)
        policy = Model.of(hf_config, layout, lora=Lora.of(config.learner.lora))
        # config.json with valid sizes
        facts |= {"policy": policy, "hf_config": hf_config, "shape": policy.shape}
    except ConfigError as error:
        problems.append(str(error))
    except ValueError as error:
        problems.append(f"model.path={config.model.path}: {error}")
    return facts, problems


def check_served(model: schema.ModelSection) -> None:
    """Check the model folder of a server, whose weights come from the run."""
    try:
        hf_config = read_hf_config(model.folder)
        facts = {"model": model, "hf_config": hf_config, "shape": ModelShape.from_hf(hf_config)}
    except ValueError as error:
        raise ConfigError(f"model.path={model.path}: {error}") from None
    refuse(findings((unquantized, files.weights, files.vocabulary, files.end_of_text), facts))


def check_alone(config: schema.Config, weights: Path, *more: Rule) -> list[str]:
    """Check a stored model that is used without a run. Returns notes; raises ConfigError with the
    problems.
    """
    facts, problems = _facts(config, None)
    if "shape" in facts:
        problems += files.weight_errors(weights, facts["shape"])
    problems += findings((*ALONE, *more), facts)
    problems += [each.error for each in files.absent_data(schema.DataSection(), facts["sets"])]
    refuse(problems)
    paths = [one.path for one in facts["sets"]]
    return list(notes.plain_text(config.model, config.data, paths))


def check_watched(config: schema.Config) -> None:
    """Check that the modules of a learner and an engine can be compared on this machine."""
    facts, _ = _facts(config, None)
    refuse(f"mismatch: {why}" for why in findings([engine.unwatchable], facts))


def unquantized(model: schema.ModelSection, hf_config: HfConfig) -> Iterator[str]:
    """Refuse a model whose stored weights are quantized."""
    if "quantization_config" in hf_config:
        yield (
            f"model.path: {model.path} is already quantized; name the BF16 model, and let "
            "quantization.format say what the sampler runs"
        )


def context(
    hf_config: HfConfig, rollout: schema.RolloutSection, eval: schema.EvalSection
) -> Iterator[str]:
    """Lengths of training and evaluation against the model's context."""
    longest = hf_config.get("max_position_embeddings")
    if longest is None:
        return
    wanted = rollout.context_tokens
    keys = "rollout.max_prompt_tokens + rollout.max_response_tokens"
    if rollout.max_context_tokens:
        keys = "rollout.max_context_tokens"
    if wanted > longest:
        hint = "one of the two" if "+" in keys else "it"
        yield f"{keys}: {wanted}, but the model's context is {longest} tokens; lower {hint}"
    wanted = rollout.max_prompt_tokens + max(evaluated_tokens(eval))
    if wanted > longest:
        yield f"max_response_tokens of eval: with the prompt {wanted} tokens, above the context of {longest}; lower it"


def formats(
    machine: Machine, sampler: schema.SamplerSection, quantization: schema.QuantizationSection
) -> Iterator[str]:
    """Weight formats for which the machine has no kernel."""
    key = "sampler.formats" if sampler.formats else "quantization.format"
    for format in dict.fromkeys(local_formats(sampler, quantization)):
        problem = format_problem(format, machine.kind, machine.name, machine.capability)
        if problem:
            yield f"{key}: {format}: {problem}"


def learner_fp8(machine: Machine, learner: schema.LearnerSection) -> Iterator[str]:
    """FP8 products of the learner, and the kind of scales that the GPU can use."""
    wanted = limits.fp8(learner)
    if wanted is None:
        return
    recipe = limits.fp8_recipe(learner)
    capability = machine.capability or math.inf
    if machine.kind == schema.Device.cpu:
        yield f"learner.megatron.fp8: {wanted} needs Transformer Engine on a GPU; leave it out"
    elif capability < FP8_CAPABILITY:
        yield (
            f"learner.megatron.fp8: {wanted} needs compute capability {FP8_CAPABILITY}, "
            f"{machine.name} has {capability}; leave it out"
        )
    elif capability < FP8_RECIPES.get(recipe, 0):
        yield (
            f"learner.megatron.fp8_recipe: {recipe} needs compute capability "
            f"{FP8_RECIPES[recipe]}, {machine.name} has {capability}; use "
            f"{'tensorwise' if capability < 9 else 'blockwise'}"
        )


def stop_metric(run: schema.RunSection, known_metrics: Sequence[str]) -> Iterator[str]:
    for metric, least in (run.stop or {}).items():
        if known_metrics and metric not in known_metrics:
            yield f"run.stop: no run logs {metric}; use one of {', '.join(known_metrics)}"
        elif not metric.endswith("reward_mean") and least > 1:
            yield f"run.stop: {metric} is a fraction and never reaches {least:g}; use 0 to 1"


def best_metric(
    checkpoint: schema.CheckpointSection, known_metrics: Sequence[str]
) -> Iterator[str]:
    if checkpoint.best is not None and known_metrics and checkpoint.best not in known_metrics:
        yield f"checkpoint.best: no run logs {checkpoint.best}; use one of {', '.join(known_metrics)}, or null"


def reward_function(reward: schema.RewardSection, run: schema.RunSection) -> Iterator[str]:
    try:
        rewards.check_importable(reward, variables=run.variables)
    except ConfigError as error:
        yield str(error)


def environment(
    environment: schema.EnvironmentSection,
    data: schema.DataSection,
    model: schema.ModelSection,
    run: schema.RunSection,
) -> Iterator[str]:
    """The class, and whether the model's template can hold conversations with it."""
    if environment.name is None or ":" not in environment.name:
        return
    from megatron_rl.environments.pool import check_importable
    from megatron_rl.environments.templates import problems

    try:
        about = check_importable(environment, run.variables)
        if model.folder.is_dir():  # else the folder is missing so far
            yield from problems(
                environment, model.folder, data.chat_template_kwargs or {}, about.tools, about.agent
            )
    except ConfigError as error:
        yield str(error)


def set_rewards(
    sets: Sequence[HeldOut], reward: schema.RewardSection, run: schema.RunSection
) -> Iterator[str]:
    for one in sets:
        if one.reward != reward:
            yield from (
                f"eval.sets.{one.name}: {problem}" for problem in reward_function(one.reward, run)
            )


RULES: tuple[Rule, ...] = (
    size_problems,
    limits.problems,
    limits.optimizer_fields,
    unquantized,
    context,
    formats,
    learner_fp8,
    stop_metric,
    best_metric,
    *engine.RULES,
    *files.MODEL_RULES,
    roles.ranks,
    roles.engine_gpus,
    roles.host_memory,
    roles.reach,
    files.unnamed_data,
)
# they call the user's code, in a process of its own
USER_CODE: tuple[Rule, ...] = (reward_function, environment, set_rewards)
ALONE: tuple[Rule, ...] = (
    unquantized,
    context,
    formats,
    reward_function,
    set_rewards,
    *engine.RULES,
    files.vocabulary,
    files.end_of_text,
)
TO_FIND: tuple[Rule, ...] = (
    files.absent_model,
    files.absent_data,
    files.absent_key,
    files.absent_trackers,
)
ABSENT: tuple[Rule, ...] = (*TO_FIND, files.absent_dir, files.absent_servers)
