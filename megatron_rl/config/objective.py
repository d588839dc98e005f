"""Typed dataclasses of the recipe sections correction, advantage, loss (docs/concepts/rollout-correction.md), optim
and learner.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.bounds import (  # isort: skip
    OPTIMIZER,
    TRANSFORMER,
    Coefficient,
    Count,
    Positive,
    Ranks,
    Shape,
    Tau,
    above,
    at_least,
    between,
    need,
)
from megatron_rl.config.choices import (  # isort: skip
    TOP_STATS,
    Aggregate,
    Anchor,
    Center,
    Decay,
    Divergence,
    Estimator,
    Forward,
    KlOn,
    KlTo,
    Level,
    LossName,
    NonFinite,
    Offload,
    OnNonFinite,
    Outside,
    Precision,
    Recompute,
    Reduce,
    Reduction,
    Router,
    Stat,
    TrustRegion,
    When,
)

from megatron_rl.loss.table import LOSSES

ALL_LINEAR = "all-linear"
RECOMPUTE = "recompute_"  # prefix of the recomputation fields of TransformerConfig
RECOMPUTED: dict[Recompute, dict[str, Any]] = {
    Recompute.selective: {"recompute_granularity": "selective"},
    Recompute.full: {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass(frozen=True)
class ConfidenceCap:
    """A cap of 1 + confidence max(1 - p, floor), with p the learner's probability of the token."""

    # slope of the cap, such as 2.3; null: the cap is weight.high
    confidence: Annotated[float | None, above(0)] = None
    # smallest 1 - p, near the resolution of logprobs
    floor: Annotated[float, between(0, 1)] = 0.005


@dataclass(frozen=True)
class WeightConfig:
    # level of the importance ratio: per token, or shared by a sequence, turn, prefix or segment (64
    # trained tokens of a row)
    level: Level = Level.token
    aggregate: Aggregate = Aggregate.product  # how the ratios of several tokens make one
    outside: Outside = Outside.truncate  # handling of a weight outside low and high
    # smallest weight, such as 0.5; null: none
    low: Annotated[
        float | None,
        need(
            lambda low: low >= 0,
            "ratios are never negative; use 0 or more, or null for no lower bound",
        ),
    ] = None
    # largest weight, such as 4; null: none
    high: Annotated[
        float | None, need(lambda cap: cap > 0, "a cap is above 0, or null for no cap")
    ] = 2.0
    cap: ConfidenceCap = field(default_factory=ConfidenceCap)  # in place of high
    # effective sample size of a batch for which the cap is solved, such as 0.95; null: the cap is high
    target_ess: Annotated[
        float | None,
        need(
            lambda share: 0 < share <= 1, "it is a share of the kept tokens, above 0 and at most 1"
        ),
    ] = None
    normalize: bool = False  # if true, weights are divided by their mean over the batch


@dataclass(frozen=True)
class RejectRule:
    """A rejection rule. Keys that are choices are required: bounds mean nothing without them."""

    # unit that is rejected: the token, or all tokens of its sequence, turn, prefix or segment (64
    # trained tokens of a row)
    level: Level = field(default=Level.sequence, metadata={"choices": tuple(Level)[1:]})
    # statistic of a token's ratio
    stat: Stat = field(default=Stat.ratio, metadata={"choices": tuple(Stat)})
    reduce: Reduce | None = None  # aggregation of the tokens' statistics; null: at level token
    low: float | None = None  # smallest accepted value, such as 0.99; null: no bound
    high: float | None = None  # largest accepted value, such as 1.01; null: no bound
    when: When | None = None  # restricts the rule to these tokens; null: all
    # instead of bounds: maximum mean over accepted tokens, such as 1.02; the worst are rejected
    budget: float | None = None


@dataclass(frozen=True)
class CorrectionConfig:
    anchor: Anchor = Anchor.prox  # the policy in the denominator of the loss's ratio
    weight: WeightConfig = field(default_factory=WeightConfig)
    # rules, all of which a token has to pass, such as [{level: token, stat: ratio, high: 5}]
    reject: list[RejectRule] = field(default_factory=list)
    # score centering: subtracts the expected gradient under the sampler, from its top logprobs
    center: Center = Center.none
    rebaseline: bool = True  # if true, rejected responses are left out of the advantage baseline
    # if true, the loss is divided by the tokens that rules accept; false: by all
    renormalize: bool = True
    # handling of a token whose sampler logprob is not finite
    non_finite: NonFinite = NonFinite.drop

    @property
    def reads_top_logprobs(self) -> bool:
        """True if it needs the sampler's top logprobs, and the learner's of the same tokens."""
        return self.center != Center.none or any(rule.stat in TOP_STATS for rule in self.reject)


@dataclass(frozen=True)
class AdvantageConfig:
    estimator: Estimator = Estimator.grpo  # how rewards become advantages


@dataclass(frozen=True)
class LossParams:
    """Parameters of individual losses in `loss.params`; LOSSES lists those of each loss."""

    # dual clip: maximum loss of a token with negative advantage, in units of abs(A), such as 3;
    # null: none
    dual_clip: Annotated[
        float | None,
        need(lambda clip: clip > 1, "it bounds the loss at dual_clip x |A|; use more than 1"),
    ] = None
    absolute: bool = False  # if true, clip_high caps the ratio itself, without a lower bound
    # temperature of the gate if the advantage is above 0; larger is narrower
    tau_positive: Tau = 1.0
    tau_negative: Tau = 1.05  # the same if the advantage is 0 or below
    # distance that clip_low and clip_high bound
    trust_region: TrustRegion = TrustRegion.total_variation
    # share of tokens that are selected
    cov_fraction: Annotated[
        float,
        need(lambda share: 0 < share <= 1, "it is a share of the tokens, above 0 and at most 1"),
    ] = 2e-4
    cov_low: float = 1.0  # lower end of the band of covariances to draw from
    cov_high: float = 5.0  # its upper end
    # cost of a selected token for each nat of distance from the anchor
    cov_kl_coef: Coefficient = 1.0
    # power and rate of the soft weight where the advantage is 0 or more
    gamma_positive: Shape = field(default_factory=lambda: [2.0, 3.0])
    gamma_negative: Shape = field(default_factory=lambda: [3.0, 2.0])  # the same below 0


def resolved_params(loss: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of a loss. Defaults of other losses' parameters are left out."""
    defaults = vars(LossParams())
    known = LOSSES[loss].params if loss in LOSSES else ()
    own = {name: defaults[name] for name in known}
    return own | {
        name: value
        for name, value in given.items()
        if name in known or name not in defaults or value != defaults[name]
    }


@dataclass(frozen=True)
class LossConfig:
    name: LossName = "ppo"  # formula of the policy loss
    clip_low: Coefficient = 0.2  # how far below 1 the ratio may go
    clip_high: Coefficient = 0.28  # how far above 1 the ratio may go
    # ppo, cispo: level of the clipped ratio
    level: Level = field(default=Level.token, metadata={"choices": tuple(Level)[1:-1]})
    # ppo, cispo: aggregation of the ratios of several tokens
    aggregate: Aggregate = Aggregate.product
    # parameters of this loss, such as {dual_clip: 3}: loss.params.* below; unset ones have their
    # defaults
    params: dict[str, Any] = field(default_factory=dict)
    # null: token_mean, and seq_mean_token_mean for gspo and gmpo
    reduction: Reduction | None = None
    kl_coef: Coefficient = 0.0  # coefficient of the KL penalty; 0: none, and no reference is loaded
    # which KL, of pi (the policy), ref (the reference), mu (the sampler) and a (the anchor)
    kl_to: KlTo = KlTo.reference
    kl_estimator: Divergence = Divergence.k3  # how the KL is estimated from a sampled token
    # weights the KL to the reference by min(pi / anchor, kl_cap), which makes its gradient
    # unbiased up to the cap, such as 100; null: no weight
    kl_cap: Annotated[float | None, above(0)] = None
    entropy_coef: float = 0.0  # coefficient of the entropy bonus
    # tokens of KL and entropy
    kl_on: KlOn = KlOn.trained

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", resolved_params(self.name, self.params))

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0 and self.kl_to == KlTo.reference


@dataclass(frozen=True)
class OptimSection:
    lr: Annotated[float, above(0)] = 1e-6  # the highest learning rate
    min_lr: Annotated[float, at_least(0)] = 0.0  # learning rate at run.steps, the end of the decay
    warmup_steps: Count = 10  # optimizer updates until lr is reached
    decay: Decay = Decay.constant  # schedule of the learning rate after warmup
    # fields of megatron-core's OptimizerConfig and DistributedDataParallelConfig, such as
    # {weight_decay: 0.1}
    megatron: Annotated[dict[str, Any], OPTIMIZER] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraSection:
    """LoRA adapters, trained instead of the model and merged at every sync (docs/guides/lora.md)."""

    # rank of each adapter; 0: no adapters, the whole model is trained
    rank: Annotated[int, between(0, 1024)] = 0
    alpha: Annotated[float, above(0)] = 32.0  # numerator of the adapter scale, alpha / rank
    # linear layers as config.json's family names them, such as [q_proj, v_proj]; all-linear: all
    # but router and head
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])


@dataclass(frozen=True)
class LearnerSection:
    tensor_parallel: Ranks = 1  # ranks that share each layer
    pipeline_parallel: Ranks = 1  # stages of layers
    expert_parallel: Ranks = 1  # ranks that share the experts
    # ranks that share each sequence, for responses that do not fit on one
    context_parallel: Ranks = 1
    data_parallel: Annotated[int, between(1, 65536)] = 1  # replicas of the learner
    precision: Precision = Precision.bf16  # precision of weights and of layer outputs
    forward: Forward = Forward.bf16  # arithmetic of linear layers
    router: Router = Router.own  # source of the experts of a token: docs/concepts/precision.md
    # maximum tokens of a micro-batch; fewer take less memory
    tokens_per_microbatch: Positive = 8192
    n_minibatches: Positive = 1  # optimizer updates per batch
    # handling of a loss or gradient that is not finite (docs/guides/resume-and-failures.md)
    on_nonfinite: OnNonFinite = OnNonFinite.raise_
    lora: LoraSection = field(default_factory=LoraSection)
    # activation recomputation in backward; learner.megatron.recompute_* take precedence
    recompute: Recompute = Recompute.auto
    # learner state moved to CPU memory while a colocated engine samples
    offload: Offload = Offload.none
    # fields of megatron-core's TransformerConfig, passed unchanged, such as {sequence_parallel:
    # true}
    megatron: Annotated[dict[str, Any], TRANSFORMER] = field(default_factory=dict)

    @property
    def transformer(self) -> dict[str, Any]:
        """Fields of TransformerConfig: what `recompute` stands for, under those of `megatron`."""
        given = {
            key: one
            for key, one in self.megatron.items()
            if one is not None or not key.startswith(RECOMPUTE)
        }
        if f"{RECOMPUTE}granularity" in given:
            word = {}
        else:
            word = RECOMPUTED.get(self.recompute, {})
        return {**word, **given}

    @property
    def undecided(self) -> bool:
        """True if the recomputation depends on the memory of the machine."""
        return self.recompute is Recompute.auto and not any(
            key.startswith(RECOMPUTE) for key in self.transformer
        )

    @property
    def virtual_pipeline(self) -> int | None:
        """Chunks of layers per stage; None: one."""
        return self.megatron.get("virtual_pipeline_model_parallel_size")
