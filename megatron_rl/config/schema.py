"""Every configuration key, typed: the dataclasses that recipes fill in.

Imports nothing heavy, so that a mistyped recipe is refused before torch is loaded. Defaults here are
the defaults of the project; `conf/base.yaml` only repeats those a reader should see. The bounds of a value stand
beside its field; rules about two keys at once are in `rules.py`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config.bounds import FOLDER_NAME, above, at_least, between, expect, inside, is_pattern, need
from megatron_rl.loss.table import LOSSES

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
KEPT = "hf"  # what an imported checkpoint keeps of the Hugging Face folder that it came from

AUTO = "auto"
POSITIVE = at_least(1)
NOT_NEGATIVE = at_least(0)
ABOVE_0 = above(0)
COEFFICIENT = need(lambda value: value >= 0, "use 0 or more")
RANKS = between(1, 4096)
WEEK_S = 7 * 24 * 3600
SECONDS = expect(lambda value: 0 < value <= WEEK_S, f"seconds: above 0, at most a week ({WEEK_S})")
SHARE = expect(lambda value: 0 <= value < 1, "0 (off) to below 1")
SIZE = expect(lambda value: type(value) is int and value >= 1, "a whole number of 1 or more")
NUCLEUS = expect(lambda share: 0 < share <= 1, "above 0, at most 1 (off)")
TIES = 16  # candidates beyond top_k: an engine keeps all that tie with the last one, and BF16 logits often do
TEMPERATURE = need(lambda value: value > 0, "use a temperature above 0")


class IfExists(StrEnum):
    refuse = "refuse"
    archive = "archive"
    resume = "resume"  # go on from the newest whole checkpoint; start where there is nothing


class ModelInit(StrEnum):
    pretrained = "pretrained"
    random = "random"


class RolloutSource(StrEnum):
    sampler = "sampler"  # reinforcement learning: the policy answers
    dataset = "dataset"  # supervised warm start: the data set's own answers


class LongPrompts(StrEnum):
    error = "error"
    drop = "drop"


class Stale(StrEnum):
    wait = "wait"  # nothing is begun that would be too old when its turn comes
    drop = "drop"  # what turns out too old is drawn again


class InFlight(StrEnum):
    finish = "finish"  # answers that are begun end with the weights that they began with; the update waits
    # a Python keyword; its value is what recipes write
    continue_ = "continue"  # the update comes between two of their tokens


class Cache(StrEnum):
    rebuild = "rebuild"  # keys and values of what was written so far are computed again, with the new weights
    keep = "keep"  # they stay what the old weights made of them


class Format(StrEnum):
    none = "none"
    int8 = "int8"
    int4 = "int4"  # INT4 values in INT8's place, for experiments: what four bits do to a policy; no byte is saved
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


class Sleep(StrEnum):
    none = "none"
    offload = "offload"  # weights wait on the host
    discard = "discard"  # weights are given up: the next sync brings all of them


class Precision(StrEnum):
    bf16 = "bf16"
    fp32 = "fp32"


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
    name: str | None = field(default=None, metadata=FOLDER_NAME)  # null: the recipe file's stem
    root: str = "runs"
    seed: int = field(default=1, metadata=NOT_NEGATIVE)
    steps: int = field(default=100, metadata=NOT_NEGATIVE)
    if_exists: IfExists = IfExists.refuse
    resume_allow: list[str] = field(default_factory=list)  # keys that may have changed when a run goes on
    device: Device = Device.auto
    # seconds of silence that end the run, where nothing else has a limit (docs/survival.md)
    patience_s: float = field(default=600.0, metadata=SECONDS)
    stop: dict[str, float] | None = None  # end early, such as {eval/accuracy: 0.28}: once the metric reaches the value


@dataclass(frozen=True)
class ModelSection:
    # a Hugging Face folder (config.json, tokenizer, and weights where init is pretrained), or what
    # `tools/convert.py import` made of one
    path: str = ""
    init: ModelInit = ModelInit.pretrained
    # of the logits, in the learner and in the engines that a run starts; weights stay in BF16
    head_precision: Precision = Precision.bf16

    @property
    def folder(self) -> Path:
        """Of config.json and tokenizer."""
        kept = Path(self.path) / KEPT
        imported = not (Path(self.path) / "config.json").is_file() and (kept / "config.json").is_file()
        return kept if imported else Path(self.path)


def _is_source(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(path, str) and _is_weight(weight) for path, weight in value.items())
    return isinstance(value, str)


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


@dataclass(frozen=True)
class DataSection:
    # .jsonl, .parquet, or the folder of a Hugging Face data set (folder/split); or several with the share of prompts
    # that each gives, such as {data/math.parquet: 0.8, data/gsm8k.parquet: 0.2}
    train: Any = field(default="", metadata=need(_is_source, "name a file, or a mapping of files to weights above 0"))
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
    prompts_per_step: int = field(default=64, metadata=POSITIVE)
    samples_per_prompt: int = field(default=8, metadata=between(1, 65536))
    max_prompt_tokens: int = field(default=512, metadata=POSITIVE)
    max_response_tokens: int = field(default=512, metadata=POSITIVE)
    # vLLM samples at nothing below or above
    temperature: float = field(default=1.0, metadata=between(0.01, 2, "0.01 to 2 (greedy is for evaluation)"))
    # tokens are drawn among the k most likely ones, and of those among the first that hold a share top_p of their
    # probability; the learner renormalises over what was kept. null: among all
    top_k: int | None = field(default=None, metadata=between(1, 1024))
    top_p: float = field(default=1.0, metadata=NUCLEUS)
    dynamic_sampling: bool = True  # DAPO: groups without spread are replaced by new ones
    max_gen_batches: int = field(default=4, metadata=POSITIVE)  # generation calls per step at most
    # batches that the sampler is ahead of the learner, and so the most updates that a token is older than the policy
    # that it trains (docs/ahead.md); 0: they take turns
    ahead: int = field(default=0, metadata=between(0, 64))
    stale: Stale = Stale.wait
    in_flight: InFlight = InFlight.finish  # what an update does to answers that are being written
    in_flight_cache: Cache = Cache.rebuild

    @property
    def candidates(self) -> int:
        """Tokens whose logprobs an engine has to report at every position, beside the sampled one's; 0: none."""
        return 0 if self.top_k is None else self.top_k + TIES


@dataclass(frozen=True)
class FleetSection:
    """vLLM servers over HTTP in place of the embedded engine: those of this machine, and those elsewhere."""

    # servers that the run starts on this machine
    replicas: int = field(default=0, metadata=between(0, 1024, "0 (none, or only addresses) to 1024"))
    # servers on nodes of their own: how many; slurm/dapo_split.sbatch starts them, and gives their addresses
    servers: int = field(default=0, metadata=between(0, 1024))
    addresses: list[str] = field(default_factory=list)  # servers started elsewhere, such as http://node7:8000
    formats: list[Format] = field(
        default_factory=list
    )  # of each server, started ones first; empty: quantization.format


@dataclass(frozen=True)
class SamplerSection:
    tensor_parallel: int = field(default=1, metadata=RANKS)
    engines: int = field(default=1, metadata=RANKS)  # embedded ones on a host, each on its share of the cores
    # GPUs, counted among those this job sees: a text such as "4,5", for a fleet a list of one for each started server,
    # such as ["0,1", "2,3"]; null: all
    devices: Any | None = None
    start_timeout_s: float = field(default=600.0, metadata=SECONDS)
    request_timeout_s: float = field(default=600.0, metadata=SECONDS)
    sleep: Sleep = Sleep.none  # of an engine that shares its GPU with the learner, while the learner works
    fleet: FleetSection = field(default_factory=FleetSection)
    vllm: dict[str, Any] = field(  # handed to vLLM as is
        default_factory=dict,
        metadata=inside(
            max_num_seqs=SIZE,
            kv_cache_memory_bytes=SIZE,
            max_model_len=SIZE,
            max_num_batched_tokens=SIZE,
            gpu_memory_utilization=expect(lambda share: 0 < share <= 1, "a share of the memory, above 0 and at most 1"),
        ),
    )


@dataclass(frozen=True)
class QuantizationSection:
    format: Format = Format.none
    ignore: list[str] = field(  # names or re:patterns, as in checkpoints
        default_factory=lambda: ["lm_head"],
        metadata=need(
            lambda entries: all(is_pattern(entry[3:]) for entry in entries if entry.startswith("re:")),
            "what follows re: must be a regular expression, such as re:.*down_proj",
        ),
    )
    kv_cache: KvCache = KvCache.none  # fp8: scales measured on the learner's forward pass, sent with the weights
    # int8: how far outliers of the activations move into the weights, such as 0.5; null or 0: not at all
    smoothing: float | None = field(
        default=None, metadata=expect(lambda alpha: 0 <= alpha < 1, "0 < alpha < 1 such as 0.5, or null (off)")
    )


@dataclass(frozen=True)
class SyncSection:
    transport: Transport = Transport.file
    dir: str | None = None  # file: null is a private folder in shared memory; a shared filesystem across hosts
    # steps between updates of the sampler; above 1 it samples from an older policy
    every: int = field(default=1, metadata=POSITIVE)
    # file: every so many versions a whole one, in between patches of what changed; 1: always whole ones
    full_every: int = field(default=1, metadata=POSITIVE)
    # the logprob probe: after the first sync, then every so many; 0: the first only
    verify_every: int = field(default=10, metadata=NOT_NEGATIVE)
    # nats; auto (or null): so many times what one rounding does to this policy (weight_sync/probe_budget.py)
    probe_budget: Any | None = field(
        default=AUTO, metadata=need(lambda nats: nats == AUTO or _is_weight(nats), "use auto, or nats above 0")
    )
    # with the probe, both engines' values at every point of one answer's forward pass (docs/one_arithmetic.md)
    probe_layers: bool = False
    # ipc, nccl: hold an update beside the live weights until it is verified; false: verified in place, before the
    # next request, which takes no memory and cannot fall back on the version before
    staged: bool = True

    @property
    def budget(self) -> float | None:
        """In nats, where it is not measured."""
        return None if self.probe_budget in (None, AUTO) else float(self.probe_budget)


VERIFIERS = ("exact_match", "math_dapo", "math_verify", "reasoning_gym")


def _is_reward(value: Any) -> bool:
    """A name, or several with a weight each."""
    if isinstance(value, Mapping):
        return bool(value) and all(
            isinstance(name, str) and type(weight) in (int, float) and math.isfinite(weight)
            for name, weight in value.items()
        )
    return isinstance(value, str)


@dataclass(frozen=True)
class RewardSection:
    # one of VERIFIERS | package.module:function | path/file.py:function; or several with weights, the first of which
    # says what is right, such as {math_dapo: 1.0, "mine.py:brevity": 0.1}
    name: Any = field(
        default="exact_match",
        metadata=need(_is_reward, "use the name of a reward, or a mapping of names to weights, which are numbers"),
    )
    # the score of a wrong answer to a verifier; -1 as published for DAPO
    wrong: float = field(default=0.0, metadata=between(-1, 0, "-1 to 0"))
    workers: int = field(default=1, metadata=between(1, 1024))
    timeout_s: float = field(default=10.0, metadata=SECONDS)
    environment: list[str] = field(default_factory=list)  # variables that a reward sees, beside PATH and HOME
    overlong_buffer: int = 0  # DAPO: linear penalty inside the last so many response tokens
    overlong_penalty: float = field(
        default=1.0, metadata=need(lambda value: value >= 0, "it is subtracted; use 0 or more")
    )
    learner_estimate: bool = False  # log the mean reward under the learner; one more forward pass over all answers
    overlong_filter: bool = False  # DAPO: truncated answers leave the mask

    @property
    def weights(self) -> dict[str, float]:
        return dict(self.name) if isinstance(self.name, Mapping) else {self.name: 1.0}

    @property
    def needs_answer(self) -> bool:
        """Whether a row without an answer cannot be judged. Some tasks of reasoning-gym have many, and name none."""
        return any(name in VERIFIERS and name != "reasoning_gym" for name in self.weights)


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
    staleness = "staleness"  # updates between the policy that wrote the token and the learner's


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
    low: float | None = field(
        default=None,
        metadata=need(lambda low: low >= 0, "ratios are never negative; use 0 or more, or null for no lower bound"),
    )
    high: float | None = field(default=2.0, metadata=need(lambda cap: cap > 0, "a cap is above 0, or null for no cap"))
    target_ess: float | None = field(
        default=None,
        metadata=need(lambda share: 0 < share <= 1, "it is a share of the kept tokens, above 0 and at most 1"),
    )
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


if TYPE_CHECKING:
    LossName = str
else:
    LossName = StrEnum("LossName", list(LOSSES), module=__name__)


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


class KlOn(StrEnum):
    trained = "trained"
    counted = "counted"


@dataclass(frozen=True)
class LossConfig:
    name: LossName = "ppo"
    clip_low: float = field(default=0.2, metadata=COEFFICIENT)
    clip_high: float = field(default=0.28, metadata=COEFFICIENT)
    dual_clip: float | None = field(  # ppo family
        default=None, metadata=need(lambda clip: clip > 1, "it bounds the loss at dual_clip x |A|; use more than 1")
    )
    absolute: bool = False  # cispo: clip_high is a cap on the ratio itself, without a lower bound
    tau_positive: float = field(default=1.0, metadata=TEMPERATURE)  # sapo
    tau_negative: float = field(default=1.05, metadata=TEMPERATURE)
    trust_region: TrustRegion = TrustRegion.total_variation  # dppo
    # clip_cov, kl_cov: share of tokens that are selected
    cov_fraction: float = field(
        default=2e-4, metadata=need(lambda share: 0 < share <= 1, "it is a share of the tokens, above 0 and at most 1")
    )
    cov_low: float = 1.0  # clip_cov: band of covariances to draw from
    cov_high: float = 5.0
    cov_kl_coef: float = field(default=1.0, metadata=COEFFICIENT)  # kl_cov
    reduction: Reduction | None = None  # null: token_mean, and seq_mean_token_mean for gspo and gmpo
    kl_coef: float = field(default=0.0, metadata=COEFFICIENT)
    kl_estimator: Divergence = Divergence.k3
    entropy_coef: float = 0.0
    kl_on: KlOn = KlOn.trained  # tokens of KL and entropy: those trained on, or rejected ones that are counted too


@dataclass(frozen=True)
class OptimSection:
    lr: float = field(default=1e-6, metadata=ABOVE_0)
    min_lr: float = field(default=0.0, metadata=NOT_NEGATIVE)
    warmup_steps: int = field(default=10, metadata=NOT_NEGATIVE)
    decay: Decay = Decay.constant
    # fields of OptimizerConfig, and of DistributedDataParallelConfig, such as overlap_grad_reduce
    megatron: dict[str, Any] = field(
        default_factory=dict,
        metadata=inside(
            bucket_size=SIZE,
            clip_grad=at_least(0, "0 (off) or more"),
            weight_decay=NOT_NEGATIVE,
            adam_beta1=SHARE,
            adam_beta2=SHARE,
            adam_eps=above(0, "above 0, such as 1e-8"),
        ),
    )


class Forward(StrEnum):
    bf16 = "bf16"  # plain layers, in learner.precision
    as_sampler = "as_sampler"  # linear layers that the sampler holds quantized are computed as it computes them


@dataclass(frozen=True)
class LearnerSection:
    tensor_parallel: int = field(default=1, metadata=RANKS)
    pipeline_parallel: int = field(default=1, metadata=RANKS)
    expert_parallel: int = field(default=1, metadata=RANKS)
    data_parallel: int = field(default=1, metadata=between(1, 65536))
    precision: Precision = Precision.bf16
    forward: Forward = Forward.bf16
    tokens_per_microbatch: int = field(default=8192, metadata=POSITIVE)
    n_minibatches: int = field(default=1, metadata=POSITIVE)
    on_nonfinite: OnNonFinite = OnNonFinite.raise_
    # TransformerConfig fields, handed over as is, such as sequence_parallel, fp8, recompute_granularity
    megatron: dict[str, Any] = field(
        default_factory=dict,
        metadata=inside(
            virtual_pipeline_model_parallel_size=SIZE,
            expert_tensor_parallel_size=SIZE,
            num_layers_in_first_pipeline_stage=SIZE,
            num_layers_in_last_pipeline_stage=SIZE,
            hidden_dropout=SHARE,
            attention_dropout=SHARE,
        ),
    )


SAMPLES = between(1, 65536)
SAMPLING = between(0, 2, "0 (greedy) to 2")


@dataclass(frozen=True)
class EvalSet:
    """A set with a name; null: as the section has it."""

    # a file as in data.eval, or a preset of conf/data, whose `eval` it is; null: data.eval, measured in another way
    path: str | None = None
    max_prompts: int | None = field(default=None, metadata=POSITIVE)
    samples: int | None = field(default=None, metadata=SAMPLES)
    temperature: float | None = field(default=None, metadata=SAMPLING)
    top_p: float | None = field(default=None, metadata=NUCLEUS)
    max_response_tokens: int | None = field(default=None, metadata=POSITIVE)
    reward: Any | None = field(  # as reward.name; null: that
        default=None, metadata=need(lambda name: _is_reward(name), "use what reward.name can be, or null")
    )


@dataclass(frozen=True)
class EvalSection:
    """data.eval, and the sets that have a name: config/evaluation.py says what each comes to."""

    every: int = field(default=10, metadata=at_least(0, "0 (never) or more"))  # 0: never
    max_prompts: int = field(default=256, metadata=POSITIVE)
    samples: int = field(default=1, metadata=SAMPLES)  # of each prompt
    # null: 0 (greedy) for one sample, rollout.temperature for several
    temperature: float | None = field(default=None, metadata=SAMPLING)
    top_p: float = field(default=1.0, metadata=NUCLEUS)
    # null: as in rollout
    max_response_tokens: int | None = field(default=None, metadata=at_least(1, "1 or more, or null"))
    sets: dict[str, EvalSet] | None = field(  # such as {aime: {path: data/aime_2024.parquet, samples: 32}}
        default=None,
        metadata=need(
            lambda sets: all(SET_NAME.fullmatch(name) for name in sets),
            "a set's name is one of letters, digits, _ and -",
        ),
    )


@dataclass(frozen=True)
class CheckpointSection:
    """The whole state of a run, to go on from: run.if_exists=resume. It is kept at the end too, unless both are 0."""

    every: int = field(default=0, metadata=NOT_NEGATIVE)  # steps; 0: by time only
    minutes: float = field(default=30.0, metadata=NOT_NEGATIVE)  # 0: by steps only
    keep_last: int = field(default=2, metadata=POSITIVE)
    keep_every: int = field(default=0, metadata=NOT_NEGATIVE)  # steps whose checkpoints stay; 0: none
    # a metric, such as eval/accuracy: the checkpoint with the highest stays, and log.export leaves its model-best/
    best: str | None = None


@dataclass(frozen=True)
class LogSection:
    wandb: Wandb = Wandb.none
    record_every: int = field(default=10, metadata=NOT_NEGATIVE)  # rollouts with both logprobs, as parquet; 0: never
    export: bool = False  # the final policy as a Hugging Face folder, model/
    # of the run's directory: the oldest recorded rollouts, then dumps, make room; null: no limit
    disk_gib: float | None = field(default=None, metadata=ABOVE_0)
    # of docs/alarms.md, by name: off, warn, stop, a bound of its own, or {stop: bound}
    alarms: dict[str, Any] = field(default_factory=dict)


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
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
