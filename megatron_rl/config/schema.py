"""Every configuration key, typed: the dataclasses that recipes fill in. Torch-free.

The comment above a key or on its lines says what it does, and `such as X` in it is an example: docs/config.md and
`--explain` are made of both (`reference.py`). The bounds of a value stand in its type; rules about two keys at once are
in `rules.py`; keys of evaluation in `evaluation_sets.py`, those of correction, advantage and loss in `objective.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from megatron_rl.config.bounds import (  # isort: skip
    AUTO, FOLDER_NAME, OPTIMIZER, TRANSFORMER, VLLM, Count, Nucleus, Positive, Ranks, Samples, Seconds,
    above, are_modules, at_least, between, expect, is_reward, is_source, is_weight, need,
)  # fmt: skip
from megatron_rl.config.choices import (  # isort: skip  # noqa: F401  every key's choices are had from here
    Aggregate, Anchor, Cache, Credit, Decay, Device, Divergence, Estimator, Format, Forward, History, IfExists,
    InFlight, KlOn, KlTo, KvCache, Level, LongPrompts, LossName, ModelInit, NonFinite, Offload, OnNonFinite, Outside,
    Precision, Reduce, Reduction, RolloutSource, Router, Sleep, Stale, Stat, TargetBy, Transport, TrustRegion, Wandb,
    When,
)  # fmt: skip
from megatron_rl.config.objective import (  # isort: skip  # noqa: F401
    AdvantageConfig, CorrectionConfig, LossConfig, RejectRule, WeightConfig,
)  # fmt: skip

from megatron_rl.config.evaluation_sets import EvalSection  # isort: skip

KEPT = "hf"  # what an imported checkpoint keeps of the Hugging Face folder that it came from
TIES = 16  # candidates beyond top_k: an engine keeps all that tie with the last one, and BF16 logits often do
ALL_LINEAR = "all-linear"
VERIFIERS = ("exact_match", "math_dapo", "math_verify", "reasoning_gym")
# estimators whose baseline is the other answers to the same prompt
GROUP_ESTIMATORS = frozenset({Estimator.grpo, Estimator.dr_grpo, Estimator.rloo, Estimator.maxrl})


def format_number(name: str) -> int:
    """A format's place in the enumeration, for tensors; -1 where an answer came from no engine."""
    return list(Format).index(Format(name)) if name else -1


@dataclass(frozen=True)
class RunSection:
    name: Annotated[str | None, FOLDER_NAME] = None  # of the run's folder, such as mine; null: the recipe file's stem
    root: str = "runs"  # folder of the runs' folders
    seed: Count = 1  # of the prompts' order, of sampling, of weights where model.init is random
    steps: Count = 100  # batches to train on
    if_exists: IfExists = IfExists.refuse  # what happens where the run's folder is there already
    # keys that may have changed when a run goes on, such as [data.train]
    resume_allow: list[str] = field(default_factory=list)
    device: Device = Device.auto  # of learner and engines; auto: GPUs where there are some
    patience_s: Seconds = (
        600.0  # seconds of silence that end the run, where nothing else has a limit (docs/survival.md)
    )
    stop: dict[str, float] | None = None  # end early, such as {eval/accuracy: 0.28}: once the metric reaches the value


@dataclass(frozen=True)
class ModelSection:
    # a Hugging Face folder (config.json, tokenizer, weights where init is pretrained) or what `convert.py import` made,
    # such as models/Qwen3-8B
    path: str = ""
    init: ModelInit = ModelInit.pretrained  # random: weights by run.seed
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
    eval: str | None = None  # held-out rows, such as data/aime_2024.parquet; null: none, unless eval.sets names some
    # column of the prompt, such as question: text, or a list of chat messages; dots reach into a column, also in
    # answer_key; null: recognised by the columns
    prompt_key: str | None = None
    # column of the right answer, such as reward_model.ground_truth; null: recognised by the columns
    answer_key: str | None = None
    # before the prompts that have none of their own, such as "Answer with one number."; null: none
    system_prompt: str | None = None
    # of the model's chat template, such as {enable_thinking: false}; with {} too, a prompt that is text is what a user
    # says; null: it is read as it stands
    template: dict[str, Any] | None = None
    shuffle: bool = True  # prompts in an order by run.seed, another in each pass
    long_prompts: LongPrompts = LongPrompts.error  # what happens to prompts above rollout.max_prompt_tokens

    def sources(self, key: str) -> dict[str, float]:
        """Path and weight of each file of `train` or `eval`."""
        named = getattr(self, key)
        return dict(named) if isinstance(named, Mapping) else {named: 1.0} if named else {}


@dataclass(frozen=True)
class RolloutSection:
    source: RolloutSource = RolloutSource.sampler  # who answers
    prompts_per_step: Positive = 64  # groups of a batch
    samples_per_prompt: Samples = 8  # answers to each prompt: a group
    max_prompt_tokens: Positive = 512  # longer ones: data.long_prompts
    max_response_tokens: Positive = 512  # where an answer is cut; with an environment: one turn's
    # of a whole conversation, such as 4096; null: the sum of the two above
    max_context_tokens: Positive | None = None
    # of sampling; vLLM samples at nothing below or above
    temperature: Annotated[float, between(0.01, 2, "0.01 to 2 (greedy is for evaluation)")] = 1.0
    # tokens are drawn among so many most likely ones, such as 50; the learner renormalises over them. null: among all
    top_k: Annotated[int | None, between(1, 1024)] = None
    top_p: Nucleus = 1.0  # of those, they are drawn among the first that hold this share of the probability
    dynamic_sampling: bool = True  # DAPO: groups without spread are replaced by new ones
    max_gen_batches: Positive = 4  # generation calls per step at most
    # batches that the sampler is ahead of the learner, and so the most updates that a token is older than the policy
    # that it trains (docs/ahead.md); 0: they take turns
    ahead: Annotated[int, between(0, 64)] = 0
    stale: Stale = Stale.wait  # what keeps answers of rollout.ahead from being older
    in_flight: InFlight = InFlight.finish  # what an update does to answers that are being written
    in_flight_cache: Cache = Cache.rebuild  # what it does to their keys and values, with in_flight: continue

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

    # package.module:Class, or a coroutine function run(base_url, row), an agent; such as path/file.py:Class
    name: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # what the class is given, such as {digits: 3}
    turns: Positive = 8  # answers at most
    tool_timeout_s: Seconds = 10.0  # of a tool, a reset or a step; then it is stopped
    session_timeout_s: Seconds = 600.0  # of an agent's session
    observation_tokens: Positive = 512  # of what is answered to a turn: more is cut, and says so
    sessions: Annotated[int, between(1, 65536)] = 64  # open at once, each with a process of its own
    history: History = History.template  # how a turn is written behind those before it
    tool_parser: str = AUTO  # one of vLLM's, such as hermes; auto: told from the chat template
    credit: Credit = Credit.outcome  # how a session's rewards become its turns'
    discount: Annotated[float, between(0, 1)] = 1.0  # of later turns' rewards, with credit: turns
    # of the process's environment, beside PATH and HOME, such as [SEARCH_URL]
    variables: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FleetSection:
    """Servers in place of the embedded engine: those of this machine, and those elsewhere."""

    # servers that the run starts on this machine
    replicas: Annotated[int, between(0, 1024, "0 (none, or only addresses) to 1024")] = 0
    # servers on nodes of their own: how many; slurm/dapo_split.sbatch starts them, and gives their addresses
    servers: Annotated[int, between(0, 1024)] = 0
    addresses: list[str] = field(default_factory=list)  # servers started elsewhere, such as [http://node7:8000]
    # of each server, started ones first, such as [none, int8]; empty: quantization.format
    formats: list[Format] = field(default_factory=list)


@dataclass(frozen=True)
class SamplerSection:
    tensor_parallel: Ranks = 1  # GPUs of each engine
    engines: Ranks = 1  # embedded ones, each on its share of sampler.devices, or of a host's cores
    # GPUs among those this job sees, such as "4,5"; for a fleet a list such as ["0,1", "2,3"]; null: all
    devices: Any | None = None
    start_timeout_s: Seconds = 600.0  # of an engine's start
    request_timeout_s: Seconds = 600.0  # of an engine's silence in a request
    sleep: Sleep = Sleep.none  # of an engine that shares its GPU with the learner, while the learner works
    routed_experts: bool = False  # answers come with the experts of every token read: learner.router
    fleet: FleetSection = field(default_factory=FleetSection)
    # handed to vLLM as is, such as {max_num_seqs: 512, gpu_memory_utilization: 0.8}
    vllm: Annotated[dict[str, Any], VLLM] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantizationSection:
    format: Format = Format.none  # of the weights in the sampler
    ignore: Annotated[  # modules that stay in BF16, by name or re:pattern, such as [lm_head, "re:.*down_proj"]
        list[str], need(are_modules, "what follows re: must be a regular expression, such as re:.*down_proj")
    ] = field(default_factory=lambda: ["lm_head"])
    kv_cache: KvCache = KvCache.none  # of keys and values in the sampler
    # int8: how far outliers of the activations move into the weights, such as 0.5; null or 0: not at all
    smoothing: Annotated[float | None, expect(lambda a: 0 <= a < 1, "0 < alpha < 1 such as 0.5, or null (off)")] = None


@dataclass(frozen=True)
class SyncSection:
    transport: Transport = Transport.file  # how weights travel
    # file: where they lie, such as /shared/sync where servers are on other hosts; null: a private folder in shared
    # memory
    dir: str | None = None
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
    # a verifier (exact_match, math_dapo, math_verify, reasoning_gym), package.module:function or path/file.py:function;
    # or several with weights, the first of which says what is right, such as {math_dapo: 1.0, "mine.py:brevity": 0.1}
    name: Annotated[
        Any, need(is_reward, "use the name of a reward, or a mapping of names to weights, which are numbers")
    ] = "exact_match"
    # the score of a wrong answer to a verifier; -1 as published for DAPO
    wrong: Annotated[float, between(-1, 0, "-1 to 0")] = 0.0
    workers: Annotated[int, between(1, 1024)] = 1  # processes that score
    timeout_s: Seconds = 10.0  # of an answer's score
    # variables that a reward sees, beside PATH and HOME, such as [JUDGE_URL]
    environment: list[str] = field(default_factory=list)
    overlong_buffer: int = 0  # DAPO: linear penalty inside the last so many response tokens
    # what is subtracted at its end
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
class OptimSection:
    lr: Annotated[float, above(0)] = 1e-6  # the highest learning rate
    min_lr: Annotated[float, at_least(0)] = 0.0  # where a decay ends, at run.steps
    warmup_steps: Count = 10  # updates until lr is reached
    decay: Decay = Decay.constant  # the learning rate's way down from there
    # fields of megatron-core's OptimizerConfig and DistributedDataParallelConfig, such as {weight_decay: 0.1}
    megatron: Annotated[dict[str, Any], OPTIMIZER] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateCheckSection:
    """Whether an update makes the quantized sampler better, too (docs/corrections.md)."""

    rows: Count = 0  # of the batch, passed again after each step's updates, by the learner and as the sampler; 0: none
    # steps are taken back where the sampler's gain is so many standard errors below 0, the learner's above; null: none
    refuse: Annotated[float | None, above(0)] = None


@dataclass(frozen=True)
class LoraSection:
    """Adapters that are trained in place of the model, and merged into it at every sync (docs/lora.md)."""

    rank: Annotated[int, between(0, 1024)] = 0  # of each adapter; 0: there are none, the whole model is trained
    alpha: Annotated[float, above(0)] = 32.0  # what an adapter adds is multiplied by alpha / rank
    # linear layers as config.json's family names them, such as [q_proj, v_proj]; all-linear: all but router and head
    targets: list[str] = field(default_factory=lambda: [ALL_LINEAR])


@dataclass(frozen=True)
class LearnerSection:
    tensor_parallel: Ranks = 1  # ranks that share each layer
    pipeline_parallel: Ranks = 1  # stages of layers
    expert_parallel: Ranks = 1  # ranks that share the experts
    context_parallel: Ranks = 1  # ranks that share each sequence, for answers longer than one can hold
    data_parallel: Annotated[int, between(1, 65536)] = 1  # replicas of the learner
    precision: Precision = Precision.bf16  # of weights, and of what layers compute
    forward: Forward = Forward.bf16  # how linear layers are computed
    router: Router = Router.own  # who chooses the experts of a token: docs/one_arithmetic.md
    tokens_per_microbatch: Positive = 8192  # answers are packed up to so many; fewer take less memory
    n_minibatches: Positive = 1  # updates for each batch
    # what a loss or a gradient that is no number does (docs/survival.md)
    on_nonfinite: OnNonFinite = OnNonFinite.raise_
    update_check: UpdateCheckSection = field(default_factory=UpdateCheckSection)
    lora: LoraSection = field(default_factory=LoraSection)
    offload: Offload = Offload.none  # to the host's memory, while an engine that sleeps meanwhile samples on the GPUs
    # fields of megatron-core's TransformerConfig, handed over as is, such as {sequence_parallel: true}
    megatron: Annotated[dict[str, Any], TRANSFORMER] = field(default_factory=dict)

    @property
    def virtual_pipeline(self) -> int | None:
        """Chunks of layers per stage; None: one."""
        return self.megatron.get("virtual_pipeline_model_parallel_size")


@dataclass(frozen=True)
class CheckpointSection:
    """The whole state of a run, to go on from: run.if_exists=resume. It is kept at the end too, unless both are 0."""

    every: Count = 0  # steps between checkpoints; 0: by time only
    minutes: Annotated[float, at_least(0)] = 30.0  # minutes between checkpoints; 0: by steps only
    keep_last: Positive = 2  # how many stay
    keep_every: Count = 0  # steps whose checkpoints stay; 0: none
    # a metric, such as eval/accuracy: the checkpoint with the highest stays, and log.export leaves its model-best/
    best: str | None = None


@dataclass(frozen=True)
class LogSection:
    wandb: Wandb = Wandb.none  # whether the run is at W&B too (docs/wandb.md)
    record_every: Count = 10  # rollouts with both logprobs, as parquet; 0: never
    record_experts: bool = False  # with them, the experts that the sampler has told (sampler.routed_experts)
    export: bool = False  # the final policy as a Hugging Face folder, model/
    # torch.profiler's traces of the learner in these steps, such as [3]; of one rank of each pipeline stage
    profile_steps: Annotated[
        list[int], need(lambda steps: all(type(one) is int and one > 0 for one in steps), "use steps, such as [3]")
    ] = field(default_factory=list)
    # GPUs: record who allocates what, so that a snapshot of it is left where memory runs out (docs/gpu.md)
    memory_history: bool = False
    # of the run's directory, such as 50: the oldest recorded rollouts, then dumps, make room; null: no limit
    disk_gib: Annotated[float | None, above(0)] = None
    # of docs/alarms.md, by name: off, warn, stop, a bound of its own, or {stop: bound}; such as {ess: stop}
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
