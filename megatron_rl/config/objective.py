"""Typed dataclasses of the recipe sections correction, advantage, loss (docs/corrections.md), optim
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
    Aggregate,
    Anchor,
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
RECOMPUTE = "recompute_"  # how fields of TransformerConfig begin that say what is recomputed
RECOMPUTED: dict[Recompute, dict[str, Any]] = {
    Recompute.selective: {"recompute_granularity": "selective"},
    Recompute.full: {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass(frozen=True)
class WeightConfig:
    # whose ratio of learner and sampler weighs a token: its own, or one that it shares
    level: Level = Level.token
    aggregate: Aggregate = Aggregate.product  # how the ratios of several tokens make one
    outside: Outside = Outside.truncate  # what becomes of a weight beyond low or high
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
    # effective sample size of a batch for which the cap is solved, such as 0.95; null: it is high
    target_ess: Annotated[
        float | None,
        need(
            lambda share: 0 < share <= 1, "it is a share of the kept tokens, above 0 and at most 1"
        ),
    ] = None
    normalize: bool = False  # weights are divided by their mean over the batch


@dataclass(frozen=True)
class RejectRule:
    """One rule. A recipe must name what `choices` lists, as bounds mean nothing without them."""

    # what leaves: the token, or all tokens of its sequence, turn or prefix
    level: Level = field(default=Level.sequence, metadata={"choices": tuple(Level)[1:]})
    # what is judged of a token's ratio
    stat: Stat = field(default=Stat.ratio, metadata={"choices": tuple(Stat)})
    reduce: Reduce | None = None  # how the tokens' statistics make one; null: at level token
    low: float | None = None  # smallest value that stays, such as 0.99; null: no bound
    high: float | None = None  # largest value that stays, such as 1.01; null: no bound
    when: When | None = None  # judges only there; null: everywhere
    # in place of bounds: the mean that survivors may have, such as 1.02; the worst leave
    budget: float | None = None


@dataclass(frozen=True)
class CorrectionConfig:
    anchor: Anchor = Anchor.prox  # the policy that the loss takes its ratio against
    weight: WeightConfig = field(default_factory=WeightConfig)
    # rules, all of which a token has to pass, such as [{level: token, stat: ratio, high: 5}]
    reject: list[RejectRule] = field(default_factory=list)
    rebaseline: bool = True  # advantages compare the answers that rules have left
    # the loss is divided by the tokens that rules have left; false: by all
    renormalize: bool = True
    # what becomes of a token whose sampler logprob is no number
    non_finite: NonFinite = NonFinite.drop


@dataclass(frozen=True)
class AdvantageConfig:
    estimator: Estimator = Estimator.grpo  # how rewards become advantages


@dataclass(frozen=True)
class LossParams:
    """Parameters of single losses, in `loss.params`: each loss has those that LOSSES lists."""

    # the most that a token of a wrong response may cost, in advantages, such as 3; null: no limit
    dual_clip: Annotated[
        float | None,
        need(lambda clip: clip > 1, "it bounds the loss at dual_clip x |A|; use more than 1"),
    ] = None
    absolute: bool = False  # if true, clip_high caps the ratio itself, without a lower bound
    # temperature of the gate where the advantage is above 0; larger is narrower
    tau_positive: Tau = 1.0
    tau_negative: Tau = 1.05  # the same where it is not
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
    name: LossName = "ppo"  # the formula
    clip_low: Coefficient = 0.2  # how far below 1 a ratio may go
    clip_high: Coefficient = 0.28  # how far above 1 a ratio may go
    # ppo, cispo: whose ratio is clipped
    level: Level = field(default=Level.token, metadata={"choices": tuple(Level)[1:]})
    # ppo, cispo: how the ratios of several tokens make one
    aggregate: Aggregate = Aggregate.product
    # of this loss alone, such as {dual_clip: 3}: loss.params.* below; unset ones have their defaults
    params: dict[str, Any] = field(default_factory=dict)
    # null: token_mean, and seq_mean_token_mean for gspo and gmpo
    reduction: Reduction | None = None
    kl_coef: Coefficient = 0.0  # of the KL penalty; 0: none, and no reference is loaded
    # from the policy to the reference; or, as the sampler has written the tokens, from it or the
    # anchor to the policy
    kl_to: KlTo = KlTo.reference
    kl_estimator: Divergence = Divergence.k3  # how the KL is estimated from a sampled token
    # weighs the reference's by pi / anchor up to this, for the gradient of KL(pi || reference)
    # itself, such as 100; null: no weight
    kl_cap: Annotated[float | None, above(0)] = None
    entropy_coef: float = 0.0  # of the bonus for entropy
    # tokens of KL and entropy: those trained on, or rejected ones that are counted too
    kl_on: KlOn = KlOn.trained

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", resolved_params(self.name, self.params))

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0 and self.kl_to == KlTo.reference


@dataclass(frozen=True)
class OptimSection:
    lr: Annotated[float, above(0)] = 1e-6  # the highest learning rate
    min_lr: Annotated[float, at_least(0)] = 0.0  # where a decay ends, at run.steps
    warmup_steps: Count = 10  # updates until lr is reached
    decay: Decay = Decay.constant  # the learning rate's way down from there
    # fields of megatron-core's OptimizerConfig and DistributedDataParallelConfig, such as
    # {weight_decay: 0.1}
    megatron: Annotated[dict[str, Any], OPTIMIZER] = field(default_factory=dict)


@dataclass(frozen=True)
class LoraSection:
    """Adapters that are trained in place of the model, and merged into it at every sync
    (docs/lora.md).
    """

    # of each adapter; 0: there are none, the whole model is trained
    rank: Annotated[int, between(0, 1024)] = 0
    alpha: Annotated[float, above(0)] = 32.0  # what an adapter adds is multiplied by alpha / rank
    # linear layers as config.json's family names them, such as [q_proj, v_proj]; all-linear: all
    # but router and head
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])


@dataclass(frozen=True)
class LearnerSection:
    tensor_parallel: Ranks = 1  # ranks that share each layer
    pipeline_parallel: Ranks = 1  # stages of layers
    expert_parallel: Ranks = 1  # ranks that share the experts
    # ranks that share each sequence, for answers longer than one can hold
    context_parallel: Ranks = 1
    data_parallel: Annotated[int, between(1, 65536)] = 1  # replicas of the learner
    precision: Precision = Precision.bf16  # of weights, and of what layers compute
    forward: Forward = Forward.bf16  # how linear layers are computed
    router: Router = Router.own  # who chooses the experts of a token: docs/one_arithmetic.md
    # answers are packed up to so many; fewer take less memory
    tokens_per_microbatch: Positive = 8192
    n_minibatches: Positive = 1  # updates for each batch
    # what a loss or a gradient that is no number does (docs/survival.md)
    on_nonfinite: OnNonFinite = OnNonFinite.raise_
    lora: LoraSection = field(default_factory=LoraSection)
    # what backward computes again, so that a forward pass need not keep it;
    # learner.megatron.recompute_* come first
    recompute: Recompute = Recompute.auto
    # to the host's memory, while an engine that sleeps meanwhile samples on the GPUs
    offload: Offload = Offload.none
    # fields of megatron-core's TransformerConfig, handed over as is, such as {sequence_parallel:
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
        """Whether what is recomputed depends on the memory of the machine."""
        return self.recompute is Recompute.auto and not any(
            key.startswith(RECOMPUTE) for key in self.transformer
        )

    @property
    def virtual_pipeline(self) -> int | None:
        """Chunks of layers per stage; None: one."""
        return self.megatron.get("virtual_pipeline_model_parallel_size")
