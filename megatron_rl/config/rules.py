"""Rules for conflicting recipe keys, except those of engines (engine_rules.py): each reads the
sections that its parameters name and yields errors with key, value and hint. load.py applies all;
`findings` runs these and those of preflight.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

from megatron_rl.config import schema
from megatron_rl.config.bounds import as_written, did_you_mean
from megatron_rl.config.choices import Alarm, alarm_setting
from megatron_rl.config.correction_rules import Findings, check_objective, corrects
from megatron_rl.config.plain_yaml import redact
from megatron_rl.config.shape import WANTED, fits
from megatron_rl.loss.table import LOSSES

Rule = Callable[..., Iterable[Any]]


def findings(rules: Iterable[Rule], facts: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the findings of the rules; a rule is skipped if a fact that it needs is missing."""
    for rule in rules:
        names = signature(rule).parameters
        if names.keys() <= facts.keys():
            yield from rule(**{name: facts[name] for name in names})


def answers(
    rollout: schema.RolloutSection,
    correction: schema.CorrectionConfig,
    reward: schema.RewardSection,
    advantage: schema.AdvantageConfig,
    loss: schema.LossConfig,
) -> list[str]:
    """Check that corrections, losses and rewards fit the source of the responses."""
    found = Findings(correction=correction, reward=reward, advantage=advantage)
    estimator = advantage.estimator
    if rollout.supervised:
        hint = "the data set's own answers come from no sampler, so there is no ratio; use"
        if correction.anchor != schema.Anchor.prox:
            found.add("correction.anchor", f"{hint} prox")
        if reward.learner_estimate:
            found.add("reward.learner_estimate", f"{hint} false")
    elif estimator == schema.Estimator.none and not LOSSES[loss.name].supervised:
        found.add(
            "advantage.estimator",
            "every sampled response would count the same regardless of its reward; use grpo",
        )
    longest = rollout.max_response_tokens
    if not 0 <= reward.overlong_buffer <= longest:
        found.add(
            "reward.overlong_buffer",
            f"it is part of rollout.max_response_tokens: {longest}; use 0 (off) to {longest}",
        )
    if estimator == schema.Estimator.maxrl and reward.overlong_buffer > 0:
        hint = f"which reward.overlong_buffer: {reward.overlong_buffer} takes below 0; use grpo, or"
        needs = "it divides by the mean reward and needs rewards of 0 or more"
        found.add("advantage.estimator", f"{needs}, {hint} reward.overlong_buffer: 0")
    if estimator == schema.Estimator.maxrl and reward.wrong < 0:
        found.add(
            "reward.wrong",
            "advantage.estimator: maxrl divides by the mean reward and needs rewards of 0 or more; "
            "use 0, or grpo",
        )
    return found


def group_size(rollout: schema.RolloutSection, advantage: schema.AdvantageConfig) -> list[str]:
    found = Findings(rollout=rollout)
    estimator = advantage.estimator
    if rollout.supervised or rollout.samples_per_prompt != 1:
        return found
    if estimator in schema.GROUP_ESTIMATORS:
        found.add(
            "rollout.samples_per_prompt",
            f"advantage.estimator: {estimator} compares the responses to one prompt; use 2 or more, "
            "or reinforce_pp",
        )
    elif rollout.dynamic_sampling:
        found.add(
            "rollout.dynamic_sampling",
            "a group of rollout.samples_per_prompt: 1 has no reward variance and is never "
            "kept; use false",
        )
    return found


def supervised(
    rollout: schema.RolloutSection, loss: schema.LossConfig, advantage: schema.AdvantageConfig
) -> Iterator[str]:
    if not rollout.supervised:
        return
    if not LOSSES[loss.name].supervised:
        yield f"loss.name: {loss.name} needs sampled responses; rollout.source=dataset goes with cross_entropy"
    if advantage.estimator != schema.Estimator.none:
        yield f"advantage.estimator: {advantage.estimator} on the data set's own answers is 0; use none"
    if rollout.samples_per_prompt != 1:
        yield "rollout.samples_per_prompt: the data set has one answer per prompt; use 1 with rollout.source=dataset"


def schedule(
    run: schema.RunSection, eval: schema.EvalSection, sync: schema.SyncSection
) -> Iterator[str]:
    if eval.every % sync.every:
        yield (
            f"eval.every: {eval.every} is not a multiple of sync.every={sync.every}: "
            "the sampler would be evaluated with an older policy"
        )
    yield from _sampled_again(eval)
    if run.stop is not None and not (
        len(run.stop) == 1 and all(key.startswith("eval/") for key in run.stop)
    ):
        yield (
            f"run.stop: {run.stop}, expected a metric of eval/ and a number, such as "
            "{eval/accuracy: 0.28}; run.stop=null removes the base's"
        )


def _sampled_again(eval: schema.EvalSection) -> Iterator[str]:
    sets: dict[str, schema.EvalSection | schema.EvalSet] = {"eval": eval}
    sets |= {f"eval.sets.{name}": one for name, one in (eval.sets or {}).items()}
    for key, one in sets.items():
        samples = one.samples or eval.samples
        temperature = one.temperature
        if samples > 1 and (eval.temperature if temperature is None else temperature) == 0:
            yield f"{key}.samples: {samples} greedy responses to a prompt are equal; set {key}.temperature above 0"


def best(checkpoint: schema.CheckpointSection) -> Iterator[str]:
    if checkpoint.best is not None and not checkpoint.every:
        yield (
            f"checkpoint.best: {checkpoint.best}, but checkpoint.every is 0: nothing is kept; set "
            "it, or checkpoint.best=null"
        )


def support(rollout: schema.RolloutSection) -> Iterator[str]:
    """An engine reports the sampling support only if the number of tokens is bounded; without an
    engine there is neither a support nor top logprobs.
    """
    if rollout.top_p < 1 and rollout.top_k is None:
        yield (
            f"rollout.top_p: {rollout.top_p:g} alone keeps a set of any size, which an engine does "
            "not report; set rollout.top_k too, such as 50"
        )
    if rollout.top_k is not None and rollout.supervised:
        yield f"rollout.top_k: {rollout.top_k}, but data set answers are not sampled; leave it out"
    if rollout.top_logprobs.max and rollout.supervised:
        yield (
            f"rollout.top_logprobs.max: {rollout.top_logprobs.max}, but data set answers are not "
            "sampled; use 0"
        )


def top_logprobs(
    rollout: schema.RolloutSection, correction: schema.CorrectionConfig
) -> Iterator[str]:
    """Check that the sampler reports the top logprobs that a correction needs."""
    if rollout.top_logprobs.max:
        return
    readers = [
        f"correction.reject[{place}].stat: {rule.stat}"
        for place, rule in enumerate(correction.reject)
        if rule.stat in schema.TOP_STATS
    ]
    if correction.center != schema.Center.none:
        readers.insert(0, f"correction.center: {correction.center}")
    for key in readers:
        yield (
            f"{key} needs the sampler's top logprobs, and rollout.top_logprobs.max is 0; set it, "
            "such as 32"
        )


def ahead(
    rollout: schema.RolloutSection,
    correction: schema.CorrectionConfig,
    loss: schema.LossConfig,
    sync: schema.SyncSection,
    sampler: schema.SamplerSection,
) -> Iterator[str]:
    """Check that stale rollouts are corrected, and that a batch can always be started."""
    key = f"rollout.max_staleness: {rollout.max_staleness}"
    if not rollout.max_staleness:
        return
    if rollout.supervised:
        yield f"{key}, but the data set's own answers are there already; use 0"
    elif not corrects(correction, loss):
        yield (
            f"{key} trains on responses of older policies, and nothing here corrects for that: use "
            "correction=tis (caps each token's weight), geo_mask_tis (also rejects responses), "
            "adaptive (solves the cap for a sample size) or bypass (correction.anchor=sampler)"
        )
    for place, rule in enumerate(correction.reject):
        finished = rollout.in_flight is schema.InFlight.drain
        if (
            rule.stat == schema.Stat.staleness
            and rule.high is not None
            and rule.high < rollout.max_staleness
            and finished
        ):
            yield (
                f"correction.reject[{place}].high: {rule.high:g} with {key} rejects most responses, "
                "which are that many steps old; raise it, or use rollout.in_flight=interrupt"
            )
    if sync.every > rollout.max_staleness + 1:
        yield (
            f"sync.every: {sync.every} with {key}: the sampler waits for a policy that is sent "
            f"later than the batch is needed; use at most {rollout.max_staleness + 1}, or raise "
            "rollout.max_staleness"
        )
    if sampler.sleep is not schema.Sleep.none:
        yield f"sampler.sleep: {sampler.sleep} with {key}: an engine cannot sleep; use none, or rollout.max_staleness=0"
    if rollout.in_flight is schema.InFlight.interrupt and sync.transport != schema.Transport.file:
        yield (
            f"rollout.in_flight: interrupt with sync.transport={sync.transport}: responses would "
            "read half-written weights; use sync.transport=file, or rollout.in_flight=drain"
        )


def rate(optim: schema.OptimSection) -> Iterator[str]:
    if optim.min_lr > optim.lr:
        yield f"optim.min_lr: {optim.min_lr:g} is above optim.lr: {optim.lr:g}, which decays to it; lower it"


def pipeline(learner: schema.LearnerSection) -> Iterator[str]:
    chunks = learner.virtual_pipeline
    stages = learner.pipeline_parallel
    if chunks is not None and not (stages > 1 and chunks > 1):
        yield (
            f"learner.megatron.virtual_pipeline_model_parallel_size: {chunks} with "
            f"learner.pipeline_parallel={stages}; interleaving needs at least 2 of each, null "
            "turns it off"
        )


def updates(learner: schema.LearnerSection, rollout: schema.RolloutSection) -> Iterator[str]:
    if learner.n_minibatches > rollout.prompts_per_step:
        yield (
            f"learner.n_minibatches: {learner.n_minibatches} updates of "
            f"rollout.prompts_per_step={rollout.prompts_per_step} groups leave empty ones; lower it"
        )


def lora(learner: schema.LearnerSection) -> Iterator[str]:
    given = learner.lora
    default = schema.LoraSection()
    if not given.rank:
        if given != default:
            other = "alpha" if given.alpha != default.alpha else "targets"
            yield f"learner.lora.{other}: nothing uses it while learner.lora.rank is 0; set that, such as 32"
        return
    if learner.forward is schema.Forward.as_sampler:
        yield f"learner.forward: as_sampler with learner.lora.rank={given.rank}: not built for adapters; use bf16"
    if not given.targets:
        yield f"learner.lora.targets: none, with learner.lora.rank={given.rank}; use [{schema.ALL_LINEAR}]"


def alarms(log: schema.LogSection) -> Iterator[str]:
    for name, value in log.alarms.items():
        if name not in list(Alarm):
            hint = did_you_mean(name, Alarm, "did you mean {}? ")
            yield f"log.alarms.{name}: no alarm; {hint}there are {', '.join(Alarm)}"
        elif alarm_setting(value) is None:
            yield (
                f"log.alarms.{name} is {as_written(value)}: use off, warn, stop, a bound of 0 or "
                "more, or both: {stop: 0.3}"
            )


WANDB_RUN: dict[str, Any] = {
    "tags": list[str],
    "group": str,
    "job_type": str,
    "git_commit": bool,
    "system_metrics": bool,
}


def wandb_run(log: schema.LogSection) -> Iterator[str]:
    for name, value in log.wandb_run.items():
        if name not in WANDB_RUN:
            hint = did_you_mean(name, WANDB_RUN, "did you mean {}? ")
            yield f"log.wandb_run.{name}: no such field; {hint}there are {', '.join(WANDB_RUN)}"
        elif not fits(WANDB_RUN[name], value):
            words = WANTED.get(WANDB_RUN[name], "a list, such as [baseline]")
            yield f"log.wandb_run.{name} is {as_written(value)}: use {words}"


def environment(
    environment: schema.EnvironmentSection,
    rollout: schema.RolloutSection,
    reward: schema.RewardSection,
    loss: schema.LossConfig,
    correction: schema.CorrectionConfig,
) -> list[str]:
    found = Findings(environment=environment, rollout=rollout, reward=reward)
    name = environment.name
    credit = environment.credit
    context = rollout.max_context_tokens
    single = rollout.max_prompt_tokens + rollout.max_response_tokens
    if redact(environment.settings) != environment.settings:
        hint = "let the environment read a variable of its process that run.variables names"
        found.append(
            f"environment.settings: a key names a secret, and secrets are not written down; {hint}"
        )
    if name is None:
        if context is not None:
            found.add(
                "rollout.max_context_tokens",
                "it is of conversations: name an environment, or use null",
            )
        return found
    if ":" not in name:
        found.add("environment.name", "use package.module:Class, or path/file.py:Class")
    if rollout.supervised:
        found.add(
            "environment.name",
            "rollout.source=dataset samples nothing; use sampler, or leave it out",
        )
    if context is not None and context < single:
        found.add(
            "rollout.max_context_tokens",
            f"a prompt and one response take up to {single} (max_prompt_tokens + "
            "max_response_tokens); use as many",
        )
    if reward.overlong_buffer:
        found.add(
            "reward.overlong_buffer",
            "it is of single responses; use 0, and reward.overlong_filter for truncated conversations",
        )
    if credit != schema.Credit.outcome:
        if LOSSES[loss.name].per_row or LOSSES[loss.name].selects:
            found.add(
                "environment.credit",
                f"loss.name={loss.name} knows one advantage a row; use outcome",
            )
        if any(rule.when for rule in correction.reject):
            found.add(
                "environment.credit",
                "a `when` of the correction looks at the row's advantage; use outcome",
            )
    return found


RULES: tuple[Rule, ...] = (
    check_objective,
    answers,
    environment,
    support,
    top_logprobs,
    ahead,
    group_size,
    supervised,
    schedule,
    best,
    rate,
    pipeline,
    updates,
    lora,
    alarms,
    wandb_run,
)
