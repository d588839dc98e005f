"""Alarms: the one table of what each looks at, its bound and what to do about it, and which stand, step after step.

One is raised after some steps in a row beyond its bound, and cleared after as many well inside. Steps that do not
measure it count as none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.choices import Alarm, AlarmSetting, alarm_setting
from megatron_rl.config.schema import Format
from megatron_rl.runs import alarm_values as values
from megatron_rl.runs.alarm_values import GRAD_NORM, K3, WINDOW, Line, Past, Value

GATES = dict.fromkeys(Format, 0.02) | {Format.none: 0.005, Format.int4: 0.2}  # of K3, in nats
Bound = float | Mapping[Format, float]


@dataclass(frozen=True)
class Rule:
    looks_at: str
    action: str
    value: Value
    bound: Bound
    steps: int
    below: bool  # raised below the bound; else above
    always: bool = False  # also where the data set answers, in place of a sampler


def above(value: Value, bound: Bound, steps: int) -> tuple[Value, Bound, int, bool]:
    return value, bound, steps, False


def below(value: Value, bound: Bound, steps: int) -> tuple[Value, Bound, int, bool]:
    return value, bound, steps, True


RULES = {
    Alarm.mismatch: Rule(
        f"`{K3}`: how far sampler and learner disagree",
        "Suspect the sync first: sync/probe_abs_diff beside its budget. Then the format: quantization.ignore keeps "
        "the worst layers in BF16, quantization.format=none shows what remains. With rollout.ahead, or sync.every "
        "above 1, it is mostly staleness (rollout/staleness_mean): lower them. correction=icepop keeps the worst "
        "tokens out of the loss meanwhile.",
        *above(values.metric(K3), GATES, 5),
    ),
    Alarm.mismatch_jump: Rule(
        f"`{K3}` over its median of the last {WINDOW} steps",
        "Something has changed, for the policy or the engine: look at the step before the first, at restarts of "
        "servers, sync/quant_error_max and optim/grad_norm. Lower optim.lr where the policy itself moved too far.",
        *above(values.over_median(K3), 10.0, 5),
    ),
    Alarm.mismatch_over_bf16: Rule(
        "`rollout_corr/FORMAT/k3_kl` of the worst format over that of the fleet's BF16 servers",
        "The format, not the engines' numerics, makes the difference: its scales are wrong, or the model does not "
        "suit it. Try quantization.smoothing (INT8) or quantization.ignore.",
        *above(values.over_bf16, 300.0, 5),
    ),
    Alarm.probe: Rule(
        "`sync/probe_abs_diff` over `sync/probe_budget`: right after a sync",
        "Sampler and learner differ by more than the format does to activations without outliers, and by less than "
        "a wrong matrix makes. `megatron-rl mismatch` on the model says where it enters: where it is outliers, "
        "quantization.smoothing=0.5 (INT8), quantization.ignore or quantization=fp8. Answers of another "
        "temperature or of older weights would look the same.",
        *above(values.share(("sync/probe_abs_diff",), "sync/probe_budget"), 1.0, 1),
    ),
    Alarm.ess: Rule(
        "`rollout_corr/rollout_is_eff_sample_size`: of the applied weights",
        "A few tokens carry the gradient. Lower correction.weight.high, or let it be solved: "
        "correction.weight.target_ess; the cause is the mismatch.",
        *below(values.metric("rollout_corr/rollout_is_eff_sample_size"), 0.5, 5),
    ),
    Alarm.rejected: Rule(
        "`rollout_corr/rollout_rs_masked_fraction`: tokens that correction.reject keeps out",
        "What is paid for is thrown away, and what is left is biased to short answers: widen the bounds of "
        "correction.reject, or lower the mismatch.",
        *above(values.metric("rollout_corr/rollout_rs_masked_fraction"), 0.3, 5),
    ),
    Alarm.non_finite: Rule(
        "tokens without a finite logprob, or updates that were skipped: the larger share",
        "Tokens: the engine's kernels or scales are wrong, compare with quantization.format=none. Updates: lower "
        "optim.lr; `megatron-rl rerun-step` repeats what learner.on_nonfinite=skip_and_dump has kept.",
        *above(values.not_finite, 0.01, 3),
        always=True,
    ),
    Alarm.entropy: Rule(
        "`loss/entropy`, in nats",
        "The policy has stopped exploring. Raise loss.clip_high, add loss.entropy_coef or a KL to the start "
        "(loss.kl_coef), lower optim.lr; loss.name=clip_cov holds back the tokens that drive it.",
        *below(values.metric("loss/entropy"), 0.01, 10),
    ),
    Alarm.reward_errors: Rule(
        "`reward/errors` over `rollout/n`: answers without a score",
        "The rewards fail or are late, the hard answers' more often. Raise reward.timeout_s or reward.workers; "
        "what the function that reward.name names has printed is in the log of rank 0.",
        *above(values.share(("reward/errors",), "rollout/n"), 0.05, 3),
    ),
    Alarm.no_spread: Rule(
        "`rollout/groups_kept_fraction`: groups that can be learned from",
        "Nearly all groups are all right or all wrong (rollout/groups_all_right, rollout/groups_all_wrong): the "
        "problems of data.train are too easy or too hard by now. Change them, or raise rollout.samples_per_prompt.",
        *below(values.metric("rollout/groups_kept_fraction"), 0.05, 10),
    ),
    Alarm.truncated: Rule(
        "`rollout/truncated_fraction`: answers cut at the length limit",
        "Raise rollout.max_response_tokens; reward.overlong_buffer makes long answers dearer before the limit, "
        "reward.overlong_filter keeps cut ones out of the loss.",
        *above(values.metric("rollout/truncated_fraction"), 0.5, 5),
    ),
    Alarm.aborted: Rule(
        "`rollout/aborted_fraction`: answers that the sampler gave up on",
        "Read the engine's log. Its cache may be too small: raise sampler.vllm.gpu_memory_utilization (on hosts "
        "sampler.vllm.kv_cache_memory_bytes), or lower sampler.vllm.max_num_seqs.",
        *above(values.metric("rollout/aborted_fraction"), 0.05, 3),
    ),
    Alarm.gradient: Rule(
        f"`{GRAD_NORM}` over its median of the last {WINDOW} steps",
        "Lower optim.lr or optim.megatron.clip_grad, and look at the mismatch of the same steps: a few tokens with "
        "large ratios do this, which correction=icepop leaves out.",
        *above(values.over_median(GRAD_NORM), 20.0, 3),
        always=True,
    ),
    Alarm.sampler_worse: Rule(
        "minus `update/sampler_gain` over its standard error, where `update/learner_gain` is positive",
        "The learner gains and the sampler, which answers, loses: steps are smaller than its format can show, or "
        "outliers move its scales. quantization.smoothing=0.5 (INT8), quantization.ignore or quantization=fp8 make it "
        "finer, learner.forward=as_sampler (hosts) trains what it computes; learner.update_check.refuse takes such "
        "steps back.",
        *above(values.sampler_loss, 1.0, 5),
    ),
    Alarm.replay_lost: Rule(
        "`router/replayed`: share of tokens that went to the sampler's experts",
        "An engine does not tell the experts that it has chosen: servers that were started by hand need "
        "sampler.routed_experts=true, too. router/replayed/layer_N says whether it is all layers.",
        *below(values.metric("router/replayed"), 0.999, 1),
    ),
    Alarm.below_start: Rule(
        "accuracy of a held-out set over its first: 1 unless it is clearly below (3 standard errors)",
        "The run unlearns what it began with: lower optim.lr first, then look at the mismatch, at loss/entropy and at "
        "reward/no_answer. checkpoint.best=eval/accuracy keeps the best policy.",
        *below(values.accuracy_over(lambda past: past.first, values.CLEARLY), 1.0, 2),
        always=True,
    ),
    Alarm.half_of_best: Rule(
        "the same over its best so far, by 4 standard errors",
        "Most of what was learned is lost, which seldom comes back by itself: go on from an earlier checkpoint with a "
        "lower optim.lr, or a KL to the start (loss.kl_coef). checkpoint.best=eval/accuracy keeps the best policy.",
        *below(values.accuracy_over(lambda past: past.best, values.CHOSEN), 0.5, 1),
        always=True,
    ),
    Alarm.reward_falls: Rule(
        "mean `reward/sampler_mean` of 10 steps, below the best 10 before, in `reward/std`; 0 unless it is clear",
        "The policy gets worse on its own prompts: lower optim.lr, and look at the mismatch and the sample size "
        "(rollout_corr/rollout_is_eff_sample_size). Prompts that come in an order of growing difficulty do this too.",
        *above(values.reward_fall, 0.25, 10),
    ),
    Alarm.clip_idle: Rule(
        "the largest share of tokens so far that a clip of the loss acted on, in updates after a step's first",
        "The clip is of another size than the ratios: with loss.name=gspo it is 3e-4 (conf/gspo.yaml), with a ratio of "
        "tokens 0.2 (conf/dapo.yaml). Or the updates are too small for one: then it may stay.",
        *below(values.most_clipped, 1e-6, 40),
    ),
    Alarm.clip_always: Rule(
        "share of tokens that a clip of the loss acts on, in updates after a step's first",
        "Most of the batch gives no gradient: loss.clip_low and clip_high are too small for loss.name (with a ratio of "
        "tokens 0.2, conf/dapo.yaml), optim.lr is too high, or learner.n_minibatches.",
        *above(values.clipped, 0.25, 5),
    ),
    Alarm.failed_saves: Rule(
        "`progress/failed_saves`: checkpoints in a row that were not saved",
        "An end of the run now loses all since its newest checkpoint. The notes in driver.log say why "
        "each failed: free space where run.root is, or lower checkpoint.keep_last and log.disk_gib.",
        *above(values.metric("progress/failed_saves"), 2.0, 1),
        always=True,
    ),
}


def bound_of(rule: Rule, given: AlarmSetting, formats: Sequence[Format]) -> float:
    if given.bound is not None:
        return given.bound
    return max(rule.bound[one] for one in formats) if isinstance(rule.bound, Mapping) else rule.bound


def clear_at(bound: float, below: bool) -> float:
    """Value that clears a standing alarm: a fifth away from its bound; for shares at most half of the way to 1."""
    if not below:
        return 0.8 * bound
    return min(bound / 0.8, (bound + 1) / 2) if bound <= 1 else bound / 0.8


@dataclass(frozen=True)
class News:
    """An alarm that was raised or cleared."""

    alarm: Alarm
    raised: bool  # else cleared
    stops: bool
    step: int
    value: float
    bound: float

    @property
    def what(self) -> str:
        rule = RULES[self.alarm]
        side = "below" if rule.below else "above"
        raised = f"{side} {self.bound:g} for {rule.steps} step{'s' * (rule.steps > 1)}"
        return f"{self.alarm}: {self.told}, {raised if self.raised else 'cleared'}"

    @property
    def told(self) -> str:
        """The value, in as many digits as tell it from its bound."""
        several = (f"{self.value:.{digits}g}" for digits in range(3, 17))
        return next((one for one in several if float(one) != self.bound), f"{self.value:g}")

    def __str__(self) -> str:
        return f"{self.what}. {RULES[self.alarm].action}" if self.raised else self.what


@dataclass
class _Watch:
    alarm: Alarm
    rule: Rule
    stops: bool
    bound: float
    standing: bool = False
    in_a_row: int = 0

    def after(self, value: float) -> bool:
        """Whether the alarm has been raised or cleared by this value. One that is no number is beyond every bound."""
        limit = clear_at(self.bound, self.rule.below) if self.standing else self.bound
        inside = value >= limit if self.rule.below else value <= limit
        self.in_a_row = self.in_a_row + 1 if inside == self.standing else 0
        if self.in_a_row < self.rule.steps:
            return False
        self.standing, self.in_a_row = not self.standing, 0
        return True


@dataclass
class Alarms:
    """The alarms of one attempt, which counts from its own first step where it goes on with a run."""

    given: Mapping[str, Any] = field(default_factory=dict)  # log.alarms
    formats: Sequence[Format] = (Format.none,)
    sampled: bool = True  # by a sampler; else the answers are the data set's own
    standing: dict[str, dict[str, Any]] = field(default_factory=dict)  # for status.json
    stop: str | None = None  # why the run is to end

    def __post_init__(self) -> None:
        self.past = Past()
        settings = {alarm: alarm_setting(self.given.get(alarm, "warn")) or AlarmSetting() for alarm in RULES}
        self._watches = [
            _Watch(alarm, rule, settings[alarm].stops, bound_of(rule, settings[alarm], self.formats))
            for alarm, rule in RULES.items()
            if settings[alarm].on and (self.sampled or rule.always)
        ]

    def goes_on(self, lines: Iterable[Line], step: int) -> None:
        """Takes the accuracies of earlier attempts, up to the step after which this one goes on."""
        for line in lines:
            if line["progress/step"] <= step:
                self.past.add_accuracies(line)

    def told(self) -> list[str]:
        return [f"{alarm} since step {about['step']} ({about['value']})" for alarm, about in self.standing.items()]

    def after(self, line: Line) -> list[News]:
        """Takes a step's metrics; returns what they have raised and cleared."""
        news = []
        for watch in self._watches:
            value = watch.rule.value(line, self.past)
            if value is None or not watch.after(value):
                continue
            step, alarm = int(line["progress/step"]), watch.alarm
            one = News(alarm, watch.standing, watch.stops, step, value, watch.bound)
            news.append(one)
            if one.raised:
                self.standing[alarm] = {"step": step, "value": one.told, "bound": watch.bound}
                self.stop = self.stop or (f"alarm {one.what}" if watch.stops else None)
            else:
                del self.standing[alarm]
        self.past.add(line)
        return news
