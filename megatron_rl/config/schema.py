"""Every configuration key, typed: the dataclasses that recipes fill in. Torch-free.

The bounds of a value stand in its type; rules about two keys at once are in `rules.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from megatron_rl.config.bounds import (  # isort: skip
    AUTO, FOLDER_NAME, OPTIMIZER, TRANSFORMER, VLLM, Coefficient, Count, Nucleus, Positive, Ranks, Samples, Seconds,
    Shape, Tau, above, are_modules, at_least, between, expect, is_reward, is_source, is_weight, need,
)  # fmt: skip
from megatron_rl.config.choices import (  # isort: skip
    Aggregate, Anchor, Cache, Credit, Decay, Device, Divergence, Estimator, Format, Forward, History, IfExists,
    InFlight, KlOn, KlTo, KvCache, Level, LongPrompts, LossName, ModelInit, NonFinite, Offload, OnNonFinite, Outside,
    Precision, Reduce, Reduction, RolloutSource, Sleep, Stale, Stat, TargetBy, Transport, TrustRegion, Wandb, When,
)  # fmt: skip

from megatron_rl.config.evaluation_sets import EvalSection  # isort: skip

KEPT = "hf"  # what an imported checkpoint keeps of the Hugging Face folder that it came from
TIES = 16  # candidates beyond top_k: an engine keeps all that tie with the last one, and BF16 logits often do
VERIFIERS = ("exact_match", "math_dapo", "math_verify", "reasoning_gym")
# estimators whose baseline is the other answers to the same prompt
GROUP_ESTIMATORS = frozenset({Estimator.grpo, Estimator.dr_grpo, Estimator.rloo, Estimator.maxrl})


def format_number(name: str) -> int:
    """A format's place in the enumeration, for tensors; -1 where an answer came from no engine."""
    return list(Format).index(Format(name)) if name else -1


@dataclass(frozen=True)
class RunSection:
    name: Annotated[str | None, FOLDER_NAME] = None  # null: the recipe file's stem
    root: str = "runs"
    seed: Count = 1
    steps: Count = 100
    if_exists: IfExists = IfExists.refuse
    resume_allow: list[str] = field(default_factory=list)  # keys that may have changed when a run goes on
    device: Device = Device.auto
    patience_s: Seconds = 600.0  # of silence that end the run, where nothing else has a limit (docs/survival.md)
    stop: dict[str, float] | None = None  # end early, such as {eval/accuracy: 0.28}: once the metric reaches the value


@dataclass(frozen=True)
class ModelSection:
    # a Hugging Face folder (config.json, tokenizer, weights where init is pretrained), or what `convert.py import` made
    path: str = ""
    init: ModelInit = ModelInit.pretrained
    # of the logits, in the learner and in the engines that a run starts; weights stay in BF16
    head_precision: Precision = Precision.bf16

    @property
    def folder(self) -> Path:
        """The folder that holds config.json and the tokenizer."""
        kept = Path(self.path) / KEPT
        imported = not (Path(self.path) / "config.json").is_file() and (kept / "config.json").is_file()
        return kept if imported else Path(self.path)


@dataclass(frozen=True)
class DataSection:
    # .jsonl, .parquet, or the folder of a Hugging Face data set (folder/split); or several with the share of prompts
    # that each gives, such as {data/math.parquet: 0.8, data/gsm8k.parquet: 0.2}
    train: Annotated[Any, need(is_source, "name a file, or a mapping of files to weights above 0")] = ""
    eval: str | None = None
    # text, or a list of chat messages; dots reach into a column, also in answer_key; null: recognised by the columns
    prompt_key: str | None = None
    answer_key: str | None = None
    system_prompt: str | None = None  # before the prompts that have none of their own
    # of the model's chat template, such as {enable_thinking: false}; with {} too, a prompt that is text is what a user
    # says; null: it is read as it stands
    template: dict[str, Any] | None = None
    shuffle: bool = True
    long_prompts: LongPrompts = LongPrompts.error  # what happens to prompts above rollout.max_prompt_tokens

    def sources(self, key: str) -> dict[str, float]:
        """Path and weight of each file of `train` or `eval`."""
        named = getattr(self, key)
        return dict(named) if isinstance(named, Mapping) else {named: 1.0} if named else {}


@dataclass(frozen=True)
class RolloutSection:
    source: RolloutSource = RolloutSource.sampler
    prompts_per_step: Positive = 64
    samples_per_prompt: Samples = 8
    max_prompt_tokens: Positive = 512
    max_response_tokens: Positive = 512  # with an environment: of one turn
    max_context_tokens: Positive | None = None  # of a whole conversation; null: the sum of the two above
    # vLLM samples at nothing below or above
    temperature: Annotated[float, between(0.01, 2, "0.01 to 2 (greedy is for evaluation)")] = 1.0
    # tokens are drawn among the k most likely ones, and of those among the first that hold a share top_p of their
    # probability; the learner renormalises over what was kept. null: among all
    top_k: Annotated[int | None, between(1, 1024)] = None
    top_p: Nucleus = 1.0
    dynamic_sampling: bool = True  # DAPO: groups without spread are replaced by new ones
    max_gen_batches: Positive = 4  # generation calls per step at most
    # batches that the sampler is ahead of the learner, and so the most updates that a token is older than the policy
    # that it trains (docs/ahead.md); 0: they take turns
    ahead: Annotated[int, between(0, 64)] = 0
    stale: Stale = Stale.wait
    in_flight: InFlight = InFlight.finish  # what an update does to answers that are being written
    in_flight_cache: Cache = Cache.rebuild

    @property
    def context_tokens(self) -> int:
        return self.max_context_tokens or self.max_prompt_tokens + self.max_response_tokens

    @property
    def supervised(self) -> bool:
        """Whether the data set's own answers are trained on."""
        return self.source == RolloutSource.dataset

    @property
    def candidates(self) -> int:
        """Tokens whose logprobs an engine has to report at every position, beside the sampled one's; 0: none."""
        return 0 if self.top_k is None else self.top_k + TIES


@dataclass(frozen=True)
class EnvironmentSection:
    """Who answers the policy, for several turns (docs/environments.md). Without a name nobody does."""

    # package.module:Class, path/file.py:Class, or a coroutine function run(base_url, row): an agent
    name: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # what the class is given
    turns: Positive = 8  # answers at most
    tool_timeout_s: Seconds = 10.0  # of a tool, reset or step; then it is stopped
    session_timeout_s: Seconds = 600.0  # of an agent
    observation_tokens: Positive = 512  # of what a turn adds: more is cut, and says so
    sessions: Annotated[int, between(1, 65536)] = 64  # open at once, each with a process of its own
    history: History = History.template
    tool_parser: str = AUTO  # one of vLLM's; auto: told from the chat template
    credit: Credit = Credit.outcome
    discount: Annotated[float, between(0, 1)] = 1.0  # of later turns' rewards, with credit: turns
    variables: list[str] = field(default_factory=list)  # of the process's environment, beside PATH and HOME


@dataclass(frozen=True)
class FleetSection:
    """Servers in place of the embedded engine: those of this machine, and those elsewhere."""

    # servers that the run starts on this machine
    replicas: Annotated[int, between(0, 1024, "0 (none, or only addresses) to 1024")] = 0
    # servers on nodes of their own: how many; slurm/dapo_split.sbatch starts them, and gives their addresses
    servers: Annotated[int, between(0, 1024)] = 0
    addresses: list[str] = field(default_factory=list)  # servers started elsewhere, such as http://node7:8000
    formats: list[Format] = field(default_factory=list)  # of each, started ones first; empty: quantization.format


@dataclass(frozen=True)
class SamplerSection:
    tensor_parallel: Ranks = 1
    engines: Ranks = 1  # embedded ones, each on its share of sampler.devices, or of a host's cores
    # GPUs among those this job sees, such as "4,5"; for a fleet a list such as ["0,1", "2,3"]; null: all
    devices: Any | None = None
    start_timeout_s: Seconds = 600.0
    request_timeout_s: Seconds = 600.0
    sleep: Sleep = Sleep.none  # of an engine that shares its GPU with the learner, while the learner works
    fleet: FleetSection = field(default_factory=FleetSection)
    # handed to vLLM as is
    vllm: Annotated[dict[str, Any], VLLM] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantizationSection:
    format: Format = Format.none
    ignore: Annotated[  # names or re:patterns, as in checkpoints
        list[str], need(are_modules, "what follows re: must be a regular expression, such as re:.*down_proj")
    ] = field(default_factory=lambda: ["lm_head"])
    kv_cache: KvCache = KvCache.none  # fp8: scales measured on the learner's forward pass, sent with the weights
    # int8: how far outliers of the activations move into the weights, such as 0.5; null or 0: not at all
    smoothing: Annotated[float | None, expect(lambda a: 0 <= a < 1, "0 < alpha < 1 such as 0.5, or null (off)")] = None


@dataclass(frozen=True)
class SyncSection:
    transport: Transport = Transport.file
    dir: str | None = None  # file: null is a private folder in shared memory; a shared filesystem across hosts
    every: Positive = 1  # steps between updates of the sampler; above 1 it samples from an older policy
    # file: every so many versions a whole one, in between patches of what changed; 1: always whole ones
    full_every: Positive = 1
    verify_every: Count = 10  # the logprob probe: after the first sync, then every so many; 0: the first only
    # nats; auto (or null): so many times what one rounding does to this policy (weight_sync/probe_budget.py)
    probe_budget: Annotated[
        Any | None, need(lambda nats: nats == AUTO or is_weight(nats), "use auto, or nats above 0")
    ] = AUTO
    probe_layers: bool = False  # with it, both engines' values at every point of one answer (docs/one_arithmetic.md)
    # ipc, nccl: hold an update beside the live weights until it is verified; false: verified in place, before the
    # next request, which takes no memory and cannot fall back on the version before
    staged: bool = True

    @property
    def budget(self) -> float | None:
        """The probe's budget in nats; None where it is unset or measured (`auto`)."""
        return None if self.probe_budget in (None, AUTO) else float(self.probe_budget)


@dataclass(frozen=True)
class RewardSection:
    # one of VERIFIERS | package.module:function | path/file.py:function; or several with weights, the first of which
    # says what is right, such as {math_dapo: 1.0, "mine.py:brevity": 0.1}
    name: Annotated[
        Any, need(is_reward, "use the name of a reward, or a mapping of names to weights, which are numbers")
    ] = "exact_match"
    # the score of a wrong answer to a verifier; -1 as published for DAPO
    wrong: Annotated[float, between(-1, 0, "-1 to 0")] = 0.0
    workers: Annotated[int, between(1, 1024)] = 1
    timeout_s: Seconds = 10.0
    environment: list[str] = field(default_factory=list)  # variables that a reward sees, beside PATH and HOME
    overlong_buffer: int = 0  # DAPO: linear penalty inside the last so many response tokens
    overlong_penalty: Annotated[float, need(lambda value: value >= 0, "it is subtracted; use 0 or more")] = 1.0
    learner_estimate: bool = False  # log the mean reward under the learner; one more forward pass over all answers
    overlong_filter: bool = False  # DAPO: truncated answers leave the mask

    @property
    def weights(self) -> dict[str, float]:
        return dict(self.name) if isinstance(self.name, Mapping) else {self.name: 1.0}

    @property
    def needs_answer(self) -> bool:
        """Whether a row without an answer cannot be judged. Some tasks of reasoning-gym have many, and name none."""
        return any(name in VERIFIERS and name != "reasoning_gym" for name in self.weights)


@dataclass(frozen=True)
class WeightConfig:
    level: Level = Level.token
    aggregate: Aggregate = Aggregate.product
    outside: Outside = Outside.truncate
    low: Annotated[
        float | None, need(lambda low: low >= 0, "ratios are never negative; use 0 or more, or null for no lower bound")
    ] = None
    high: Annotated[float | None, need(lambda cap: cap > 0, "a cap is above 0, or null for no cap")] = 2.0
    target_ess: Annotated[
        float | None, need(lambda share: 0 < share <= 1, "it is a share of the kept tokens, above 0 and at most 1")
    ] = None
    target_by: TargetBy = TargetBy.cap  # what is solved for target_ess
    normalize: bool = False
    when: When | None = None  # only there, 1 elsewhere
    current: bool = False  # of the policy as it is at each update, not as it was before the batch's first


@dataclass(frozen=True)
class RejectRule:
    # `choices`: a recipe must name these, as bounds mean nothing without them
    level: Level = field(default=Level.sequence, metadata={"choices": tuple(Level)[1:]})
    stat: Stat = field(default=Stat.ratio, metadata={"choices": tuple(Stat)})
    reduce: Reduce | None = None
    low: float | None = None
    high: float | None = None
    when: When | None = None
    budget: float | None = None


@dataclass(frozen=True)
class CorrectionConfig:
    anchor: Anchor = Anchor.prox
    weight: WeightConfig = field(default_factory=WeightConfig)
    reject: list[RejectRule] = field(default_factory=list)
    rebaseline: bool = True
    weigh_baseline: bool = False  # grpo, dr_grpo: the baseline of least variance, of rewards weighed by squared weights
    renormalize: bool = True
    # optim.lr is multiplied by the effective sample size to this power; 0.5 for Adam (VCPO)
    step_power: Annotated[float, between(0, 1)] = 0.0
    non_finite: NonFinite = NonFinite.drop


@dataclass(frozen=True)
class AdvantageConfig:
    estimator: Estimator = Estimator.grpo


@dataclass(frozen=True)
class LossConfig:
    name: LossName = "ppo"
    clip_low: Coefficient = 0.2
    clip_high: Coefficient = 0.28
    # ppo family
    dual_clip: Annotated[
        float | None, need(lambda clip: clip > 1, "it bounds the loss at dual_clip x |A|; use more than 1")
    ] = None
    absolute: bool = False  # cispo: clip_high is a cap on the ratio itself, without a lower bound
    # ppo, cispo: whose ratio is clipped, and how those of its tokens make one
    level: Level = field(default=Level.token, metadata={"choices": tuple(Level)[1:]})
    aggregate: Aggregate = Aggregate.product
    # the clip of a row's t-th token is the power t^clip_growth of the first one's; 0.5 for products of prefixes (CTPO)
    clip_growth: Annotated[float, between(-1, 1)] = 0.0
    # the clip's upper bound is divided by what correction.weight.high left of a token's weight (QuRL)
    clip_by_weight: bool = False
    tau_positive: Tau = 1.0  # sapo
    tau_negative: Tau = 1.05
    trust_region: TrustRegion = TrustRegion.total_variation  # dppo
    # dppo: the mean distance that a row's tokens may have so far, above which the next ones may have less (CPPO)
    prefix_budget: Annotated[float | None, above(0)] = None
    late_weight: Annotated[float, between(0, 1)] = 1.0  # with it: what the distance of a row's last token counts
    # clip_cov, kl_cov: share of tokens that are selected
    cov_fraction: Annotated[
        float, need(lambda share: 0 < share <= 1, "it is a share of the tokens, above 0 and at most 1")
    ] = 2e-4
    cov_low: float = 1.0  # clip_cov: band of covariances to draw from
    cov_high: float = 5.0
    cov_kl_coef: Coefficient = 1.0  # kl_cov
    gamma_positive: Shape = field(default_factory=lambda: [2.0, 3.0])  # vespo
    gamma_negative: Shape = field(default_factory=lambda: [3.0, 2.0])
    reduction: Reduction | None = None  # null: token_mean, and seq_mean_token_mean for gspo and gmpo
    kl_coef: Coefficient = 0.0
    # from the policy to the reference; or, as the sampler has written the tokens, from it or the anchor to the policy
    kl_to: KlTo = KlTo.reference
    kl_estimator: Divergence = Divergence.k3
    # weighs the reference's by pi / anchor up to this, for the gradient of KL(pi || reference) itself; null: no weight
    kl_cap: Annotated[float | None, above(0)] = None
    entropy_coef: float = 0.0
    kl_on: KlOn = KlOn.trained  # tokens of KL and entropy: those trained on, or rejected ones that are counted too

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0 and self.kl_to == KlTo.reference


@dataclass(frozen=True)
class OptimSection:
    lr: Annotated[float, above(0)] = 1e-6
    min_lr: Annotated[float, at_least(0)] = 0.0
    warmup_steps: Count = 10
    decay: Decay = Decay.constant
    # fields of OptimizerConfig, and of DistributedDataParallelConfig, as overlap_grad_reduce
    megatron: Annotated[dict[str, Any], OPTIMIZER] = field(default_factory=dict)


@dataclass(frozen=True)
class LearnerSection:
    tensor_parallel: Ranks = 1
    pipeline_parallel: Ranks = 1
    expert_parallel: Ranks = 1
    data_parallel: Annotated[int, between(1, 65536)] = 1
    precision: Precision = Precision.bf16
    forward: Forward = Forward.bf16
    tokens_per_microbatch: Positive = 8192
    n_minibatches: Positive = 1
    on_nonfinite: OnNonFinite = OnNonFinite.raise_
    offload: Offload = Offload.none  # to the host's memory, while an engine that sleeps meanwhile samples on the GPUs
    # TransformerConfig fields, handed over as is, such as sequence_parallel, fp8
    megatron: Annotated[dict[str, Any], TRANSFORMER] = field(default_factory=dict)

    @property
    def virtual_pipeline(self) -> int | None:
        """Chunks of layers per stage; None: one."""
        return self.megatron.get("virtual_pipeline_model_parallel_size")


@dataclass(frozen=True)
class CheckpointSection:
    """The whole state of a run, to go on from: run.if_exists=resume. It is kept at the end too, unless both are 0."""

    every: Count = 0  # steps; 0: by time only
    minutes: Annotated[float, at_least(0)] = 30.0  # 0: by steps only
    keep_last: Positive = 2
    keep_every: Count = 0  # steps whose checkpoints stay; 0: none
    # a metric, such as eval/accuracy: the checkpoint with the highest stays, and log.export leaves its model-best/
    best: str | None = None


@dataclass(frozen=True)
class LogSection:
    wandb: Wandb = Wandb.none
    record_every: Count = 10  # rollouts with both logprobs, as parquet; 0: never
    export: bool = False  # the final policy as a Hugging Face folder, model/
    # of the run's directory: the oldest recorded rollouts, then dumps, make room; null: no limit
    disk_gib: Annotated[float | None, above(0)] = None
    # of docs/alarms.md, by name: off, warn, stop, a bound of its own, or {stop: bound}
    alarms: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    sampler: SamplerSection = field(default_factory=SamplerSection)
    quantization: QuantizationSection = field(default_factory=QuantizationSection)
    sync: SyncSection = field(default_factory=SyncSection)
    reward: RewardSection = field(default_factory=RewardSection)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimSection = field(default_factory=OptimSection)
    learner: LearnerSection = field(default_factory=LearnerSection)
    eval: EvalSection = field(default_factory=EvalSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
