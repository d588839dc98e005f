"""Every configuration key, typed: the dataclasses that recipes fill in.

Imports nothing heavy, so that a mistyped recipe is refused before torch is loaded. Defaults here are
the defaults of the project; `conf/base.yaml` only repeats those a reader should see.
`config.py` turns YAML into these objects; checks that need two keys at once live in `checks.py`.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class IfExists(StrEnum):
    refuse = "refuse"
    archive = "archive"


class ModelInit(StrEnum):
    pretrained = "pretrained"
    random = "random"


class RolloutSource(StrEnum):
    sampler = "sampler"  # reinforcement learning: the policy answers
    dataset = "dataset"  # supervised warm start: the data set's own answers


class LongPrompts(StrEnum):
    error = "error"
    drop = "drop"


class Format(StrEnum):
    none = "none"
    int8 = "int8"
    fp8 = "fp8"
    fp8_block = "fp8_block"


def format_number(name: str) -> int:
    """A format's place in the enumeration, for tensors; -1 where an answer came from no engine."""
    return list(Format).index(Format(name)) if name else -1


class KvCache(StrEnum):
    none = "none"  # as the weights' activations: BF16
    fp8 = "fp8"


class Transport(StrEnum):
    file = "file"
    ipc = "ipc"
    nccl = "nccl"
    nccl_m2n = "nccl_m2n"


class Sleep(StrEnum):
    none = "none"
    offload = "offload"  # weights wait on the host
    discard = "discard"  # weights are given up: the next sync brings all of them


class Precision(StrEnum):
    bf16 = "bf16"
    fp32 = "fp32"


class Fp8(StrEnum):
    none = "none"
    hybrid = "hybrid"
    e4m3 = "e4m3"


class OnNonFinite(StrEnum):
    # `raise` is a Python keyword and cannot name a member; its value is what recipes write
    raise_ = "raise"
    skip = "skip"
    skip_and_dump = "skip_and_dump"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Decay(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Wandb(StrEnum):
    none = "none"
    auto = "auto"  # online with a key, offline without
    offline = "offline"
    online = "online"


@dataclass(frozen=True)
class RunSection:
    name: str | None = None  # null: the recipe file's stem
    root: str = "runs"
    seed: int = 1
    steps: int = 100
    if_exists: IfExists = IfExists.refuse
    device: Device = Device.auto
    stop_metric: str | None = None  # stop once this metric ...
    stop_at: float = 0.0  # ... reaches this value


@dataclass(frozen=True)
class ModelSection:
    path: str = ""  # a Hugging Face folder: config.json, tokenizer, and weights where init is pretrained
    init: ModelInit = ModelInit.pretrained


@dataclass(frozen=True)
class DataSection:
    train: str = ""  # .jsonl or .parquet
    eval: str | None = None
    prompt_key: str = "prompt"  # text, or a list of chat messages
    answer_key: str = "answer"
    shuffle: bool = True
    deduplicate: bool = True
    long_prompts: LongPrompts = LongPrompts.error  # what happens to prompts above rollout.max_prompt_tokens


@dataclass(frozen=True)
class RolloutSection:
    source: RolloutSource = RolloutSource.sampler
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    dynamic_sampling: bool = True  # DAPO: groups without spread are replaced by new ones
    max_gen_batches: int = 4  # generation calls per step at most


@dataclass(frozen=True)
class FleetSection:
    """vLLM servers over HTTP in place of the embedded engine; their number is replicas plus addresses."""

    replicas: int = 0  # servers that the run starts on this machine
    addresses: list[str] = field(default_factory=list)  # servers started elsewhere, such as http://node7:8000
    formats: list[Format] = field(
        default_factory=list
    )  # of each server, started ones first; empty: quantization.format
    devices: list[str] = field(default_factory=list)  # GPUs of each started server, such as ["0,1", "2,3"]
    port: int | None = None  # of the first started server, the next ones follow; null: free ones
    key_variable: str = "MEGATRON_RL_FLEET_KEY"  # the environment variable that holds the key of `addresses`
    restarts: int = 3  # of each started server within a run
    probe_every_s: float = 2.0  # between two looks at every server


@dataclass(frozen=True)
class SamplerSection:
    tensor_parallel: int = 1
    max_sequences: int = 256  # decoded at once
    devices: str | None = None  # GPUs of the engine, such as "4,5", counted among those this job sees; null: all
    memory_gib: float = 1.0  # KV cache on hosts; on GPUs vllm.gpu_memory_utilization rules
    start_timeout_s: float = 600.0
    request_timeout_s: float = 600.0
    sleep: Sleep = Sleep.none  # of an engine that shares its GPU with the learner, while the learner works
    fleet: FleetSection = field(default_factory=FleetSection)
    vllm: dict[str, Any] = field(default_factory=dict)  # handed to vLLM as is


@dataclass(frozen=True)
class QuantizationSection:
    format: Format = Format.none
    ignore: list[str] = field(default_factory=lambda: ["lm_head"])  # names or re:patterns, as in checkpoints
    kv_cache: KvCache = KvCache.none  # fp8: scales measured on the learner's forward pass, sent with the weights
    # int8: how far outliers of the activations move into the weights, such as 0.5; null or 0: not at all
    smoothing: float | None = None
    smoothing_every: int = 10  # syncs between new smoothing scales


@dataclass(frozen=True)
class SyncSection:
    transport: Transport = Transport.file
    dir: str | None = None  # file: null is a private folder in shared memory; a shared filesystem across hosts
    every: int = 1  # steps between updates of the sampler; above 1 it samples from an older policy
    bucket_mib: int = 64
    delta: bool = False  # file: only what changed since the version before travels
    full_every: int = 20  # with delta: every so many versions a whole one
    verify_every: int = 10  # the logprob probe: after the first sync, then every so many; 0: the first only
    probe_budget: float | None = None  # null: by format
    # ipc, nccl: hold an update beside the live weights until it is verified; false: verified in place, before the
    # next request, which takes no memory and cannot fall back on the version before
    staged: bool = True


@dataclass(frozen=True)
class RewardSection:
    name: str = "exact_match"  # exact_match | package.module:function
    workers: int = 1
    timeout_s: float = 10.0
    memory_gib: float = 8.0  # of a worker, and of each process that it starts
    environment: list[str] = field(default_factory=list)  # variables that a reward needs beside the usual ones
    overlong_buffer: int = 0  # DAPO: linear penalty inside the last so many response tokens
    overlong_penalty: float = 1.0
    learner_estimate: bool = False  # log the mean reward under the learner; one more forward pass over all answers
    overlong_filter: bool = False  # DAPO: truncated answers leave the mask


class Anchor(StrEnum):
    prox = "prox"
    sampler = "sampler"


class Level(StrEnum):
    none = "none"
    token = "token"
    sequence = "sequence"


class Aggregate(StrEnum):
    product = "product"
    geometric = "geometric"


class Outside(StrEnum):
    truncate = "truncate"
    zero = "zero"


class Stat(StrEnum):
    ratio = "ratio"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    m2 = "m2"
    abs = "abs"


class Reduce(StrEnum):
    sum = "sum"
    mean = "mean"
    max = "max"
    min = "min"


class When(StrEnum):
    negative_advantage = "negative_advantage"


class NonFinite(StrEnum):
    drop = "drop"
    one = "one"
    zero = "zero"
    reject = "reject"
    raise_ = "raise"


@dataclass(frozen=True)
class WeightConfig:
    level: Level = Level.token
    aggregate: Aggregate = Aggregate.product
    outside: Outside = Outside.truncate
    low: float | None = None
    high: float | None = 2.0
    target_ess: float | None = None
    normalize: bool = False


@dataclass(frozen=True)
class RejectRule:
    # `choices`: a recipe must name these, as bounds mean nothing without them
    level: Level = field(default=Level.sequence, metadata={"choices": (Level.token, Level.sequence)})
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
    renormalize: bool = True
    non_finite: NonFinite = NonFinite.drop


class Estimator(StrEnum):
    grpo = "grpo"
    dr_grpo = "dr_grpo"
    rloo = "rloo"
    reinforce_pp = "reinforce_pp"
    maxrl = "maxrl"
    none = "none"  # advantage 1 everywhere: the supervised warm start


# estimators whose baseline is the other answers to the same prompt
GROUP_ESTIMATORS = frozenset({Estimator.grpo, Estimator.dr_grpo, Estimator.rloo, Estimator.maxrl})


@dataclass(frozen=True)
class AdvantageConfig:
    estimator: Estimator = Estimator.grpo


class LossName(StrEnum):
    ppo = "ppo"
    gspo = "gspo"
    cispo = "cispo"
    sapo = "sapo"
    gmpo = "gmpo"
    dppo = "dppo"
    clip_cov = "clip_cov"
    kl_cov = "kl_cov"
    reinforce = "reinforce"
    rollout_is = "rollout_is"
    cross_entropy = "cross_entropy"


class Reduction(StrEnum):
    token_mean = "token_mean"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    prompt_mean = "prompt_mean"


class Divergence(StrEnum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    abs = "abs"


class TrustRegion(StrEnum):
    total_variation = "total_variation"
    binary_kl = "binary_kl"


@dataclass(frozen=True)
class LossConfig:
    name: LossName = LossName.ppo
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None  # ppo family
    absolute: bool = False  # cispo: clip_high is a cap on the ratio itself, without a lower bound
    tau_positive: float = 1.0  # sapo
    tau_negative: float = 1.05
    trust_region: TrustRegion = TrustRegion.total_variation  # dppo
    cov_fraction: float = 2e-4  # clip_cov, kl_cov: share of tokens that are selected
    cov_low: float = 1.0  # clip_cov: band of covariances to draw from
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0  # kl_cov
    reduction: Reduction | None = None  # null: token_mean, and seq_mean_token_mean for gspo and gmpo
    kl_coef: float = 0.0
    kl_estimator: Divergence = Divergence.k3
    entropy_coef: float = 0.0


@dataclass(frozen=True)
class OptimSection:
    lr: float = 1e-6
    min_lr: float = 0.0
    warmup_steps: int = 10
    decay: Decay = Decay.constant
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True)
class LearnerSection:
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int | None = None  # chunks per stage; null: plain 1F1B
    context_parallel: int = 1
    expert_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    precision: Precision = Precision.bf16
    fp8: Fp8 = Fp8.none
    tokens_per_microbatch: int = 8192
    n_minibatches: int = 1
    recompute: bool = False
    on_nonfinite: OnNonFinite = OnNonFinite.raise_
    megatron: dict[str, Any] = field(default_factory=dict)  # TransformerConfig fields, handed over as is


@dataclass(frozen=True)
class EvalSection:
    every: int = 10  # 0: never
    max_prompts: int = 256
    max_response_tokens: int | None = None  # null: as in rollout


@dataclass(frozen=True)
class LogSection:
    wandb: Wandb = Wandb.none
    project: str = "megatron-rl"
    group: str | None = None
    record_every: int = 10  # rollouts with both logprobs, as parquet; 0: never
    export: bool = False  # the final policy as a Hugging Face folder


@dataclass(frozen=True)
class Config:
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
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
    log: LogSection = field(default_factory=LogSection)
