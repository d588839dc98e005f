"""Typed `Config`, and its sections run, model, data, eval, checkpoint and log; re-exports the
others. Torch-free.

The comment above a key or on its lines says what it does, and `such as X` in it is an example:
docs/reference/config.md and `--explain` are made of both (`reference.py`). The bounds of a value stand in its
type; rules about two keys at once are in `rules.py`. Keys of the objective and the learner are in
`objective.py`, those of rollouts and engines in `sampling.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from megatron_rl.config.bounds import (  # isort: skip
    FOLDER_NAME,
    MINUTES,
    Count,
    Nucleus,
    Positive,
    Samples,
    Seconds,
    Temperature,
    are_set_names,
    is_interval,
    at_least,
    is_reward,
    is_source,
    need,
)
from megatron_rl.config.choices import (  # isort: skip  # noqa: F401  every key's choices are had from here
    TOP_STATS,
    Aggregate,
    Anchor,
    AnswerFormat,
    Center,
    Credit,
    Decay,
    Device,
    Divergence,
    Estimator,
    Format,
    Forward,
    IfExists,
    InFlight,
    KlOn,
    KlTo,
    KvCache,
    Level,
    LongPrompts,
    LossName,
    ModelInit,
    NonFinite,
    Offload,
    OnNonFinite,
    Outside,
    Precision,
    Recompute,
    Reduce,
    Reduction,
    RolloutSource,
    Router,
    Sleep,
    Stat,
    Transport,
    TrackerName,
    Wandb,
    When,
)
from megatron_rl.config.objective import (  # isort: skip  # noqa: F401
    ALL_LINEAR,
    AdvantageConfig,
    ConfidenceCap,
    CorrectionConfig,
    LearnerSection,
    LoraSection,
    LossConfig,
    LossParams,
    OptimSection,
    RejectRule,
    WeightConfig,
)
from megatron_rl.config.sampling import (  # isort: skip  # noqa: F401
    VERIFIERS,
    EnvironmentSection,
    QuantizationSection,
    RewardSection,
    RolloutSection,
    SamplerSection,
    SyncSection,
)
from megatron_rl.hub import local_folder

KEPT = "hf"  # what an imported checkpoint keeps of the Hugging Face folder that it came from
# estimators whose baseline is the other responses to the same prompt
GROUP_ESTIMATORS = frozenset({Estimator.grpo, Estimator.dr_grpo, Estimator.rloo, Estimator.maxrl})


def format_number(name: str) -> int:
    """Return a format's index in the enumeration; -1 if no engine made the response."""
    if name:
        return list(Format).index(Format(name))
    return -1


@dataclass(frozen=True)
class RunSection:
    # name of the run's folder, such as mine; null: the recipe file's stem
    name: Annotated[str | None, FOLDER_NAME] = None
    root: str = "runs"  # parent folder of all runs
    # seed of the prompt order, of sampling, and of the weights if model.init is random
    seed: Count = 1
    steps: Count = 100  # training steps, one batch each
    if_exists: IfExists = IfExists.refuse  # action if the run's folder exists already
    # keys that may differ when a run resumes, such as [data.train]
    resume_allow: list[str] = field(default_factory=list)
    device: Device = Device.auto  # device of learner and engines; auto: GPUs if there are any
    # seconds without progress after which the run is stopped, unless another timeout applies
    # (docs/guides/resume-and-failures.md)
    hang_timeout_s: Seconds = 1800.0
    # environment variables that rewards and environments see, beside PATH and HOME, such as
    # [JUDGE_URL]
    variables: list[str] = field(default_factory=list)
    # stop early, such as {eval/accuracy: 0.28}: once the metric reaches the value
    stop: dict[str, float] | None = None

    @property
    def folder(self) -> Path:
        """The run's directory."""
        return Path(self.root) / str(self.name)


@dataclass(frozen=True)
class ModelSection:
    # a Hugging Face folder (config.json, tokenizer, weights where init is pretrained), such as
    # models/mine, or what `convert.py import` made; or an id of the Hugging Face hub, such as
    # Qwen/Qwen3-8B or Qwen/Qwen3-8B@REVISION, downloaded before the start
    path: str = ""
    init: ModelInit = ModelInit.pretrained  # random: weights by run.seed
    # precision of the logits, in the learner and in the engines that a run starts; weights stay in
    # BF16
    head_precision: Precision = Precision.bf16

    @property
    def folder(self) -> Path:
        """The folder that holds config.json and the tokenizer."""
        path = self.weights
        kept = path / KEPT
        if (kept / "config.json").is_file() and not (path / "config.json").is_file():
            return kept  # folder of an imported checkpoint
        return path

    @property
    def weights(self) -> Path:
        """The folder that holds the weights."""
        return local_folder(self.path)


@dataclass(frozen=True)
class DataSection:
    # .jsonl, .parquet, the folder of a Hugging Face data set (folder/split), or one of the hub, such
    # as openai/gsm8k:main@REVISION[train]; or several with the share of prompts that each gives,
    # such as {data/math.parquet: 0.8, data/gsm8k.parquet: 0.2}
    train: Annotated[
        Any, need(is_source, "name a file, or a mapping of files to weights above 0")
    ] = ""
    eval: str | None = (
        # held-out rows, such as openai/gsm8k:main[test]; null: none; needs eval.sets, or eval.every: 0
        None
    )
    # column of the prompt, such as question: text, or a list of chat messages; dots name nested
    # fields, also in answer_key; null: detected from the columns
    prompt_key: str | None = None
    # column of the right answer, such as reward_model.ground_truth; null: detected from the columns
    answer_key: str | None = None
    # content of the answer column
    answer_format: AnswerFormat = AnswerFormat.text
    # text around each plain-text prompt, which {} stands for, such as "{} Give a number."; null: none
    instruction: Annotated[
        str | None, need(lambda text: text.count("{}") == 1, "write {} once, for the prompt")
    ] = None
    # system prompt for prompts without one, such as "Answer with one number."; null: none
    system_prompt: str | None = None
    # arguments of the model's chat template, such as {enable_thinking: false}; {}: a plain-text
    # prompt becomes a user message; null: it is passed to the model unchanged
    chat_template_kwargs: dict[str, Any] | None = None
    # action for prompts above rollout.max_prompt_tokens
    long_prompts: LongPrompts = LongPrompts.error

    def sources(self, key: str) -> dict[str, float]:
        """Path and weight of each file of `train` or `eval`."""
        named = getattr(self, key)
        if isinstance(named, Mapping):
            return dict(named)
        if named:
            return {named: 1.0}
        return {}


@dataclass(frozen=True)
class EvalSet:
    """A named evaluation set; null: the section's value."""

    # a file as in data.eval, or a preset of conf/data whose `eval` is used, such as math; null:
    # data.eval with other settings
    path: str | None = None
    max_prompts: Positive | None = None  # as eval.max_prompts, such as 500
    samples: Samples | None = None  # as eval.samples, such as 32
    temperature: Temperature | None = None  # as eval.temperature, such as 0.6
    top_p: Nucleus | None = None  # as eval.top_p, such as 0.7
    max_response_tokens: Positive | None = None  # as eval.max_response_tokens, such as 8192
    # as reward.name, such as math_verify; null: that
    reward: Annotated[Any | None, need(is_reward, "use what reward.name can be, or null")] = None


@dataclass(frozen=True)
class EvalSection:
    """Evaluation on data.eval and on named sets, which `evaluation.py` resolves."""

    every: Annotated[int, at_least(0, "0 (never) or more")] = 10  # steps between evaluations
    max_prompts: Positive = 256  # prompts evaluated per set, from its start
    samples: Samples = 1  # responses per prompt
    # sampling temperature, such as 1.0; null: 0 (greedy) for one sample, rollout.temperature for
    # several
    temperature: Temperature | None = None
    top_p: Nucleus = 1.0  # tokens are drawn among the first that hold this share of the probability
    # maximum tokens of a response, such as 8192; null: as in rollout
    max_response_tokens: Annotated[int | None, at_least(1, "1 or more, or null")] = None
    # more held-out sets by name, such as {aime: {path: data/aime_2024.parquet, samples: 32}}
    sets: Annotated[
        dict[str, EvalSet] | None,
        need(are_set_names, "a set's name is one of letters, digits, _ and -"),
    ] = None


@dataclass(frozen=True)
class CheckpointSection:
    """Checkpoints of the whole state of a run, to resume from (run.if_exists=resume). One is saved
    at the end too, unless `every` is 0.
    """

    # steps between checkpoints, or minutes, such as 100; 0: none
    every: Annotated[int | str, need(is_interval, "use steps (100), minutes (30min) or 0")] = (
        "30min"
    )
    keep_last: Positive = 2  # number of latest checkpoints to keep
    # metric whose best checkpoint is kept, such as eval/accuracy; checkpoint.export_hf writes it to
    # model-best/
    best: str | None = None
    export_hf: bool = False  # if true, write the final policy as a Hugging Face folder, model/

    @property
    def steps(self) -> int:
        """Steps between checkpoints; 0 where they come by time, or not at all."""
        if isinstance(self.every, int):
            return self.every
        return 0

    @property
    def minutes(self) -> float:
        """Minutes between checkpoints; 0 where they come by steps, or not at all."""
        if isinstance(self.every, int):
            return 0.0
        return float(self.every.removesuffix(MINUTES))


@dataclass(frozen=True)
class LogSection:
    # where metrics are logged besides metrics.jsonl (docs/guides/monitoring.md), such as
    # [wandb, tensorboard]
    trackers: list[TrackerName] = field(default_factory=list)
    wandb: Wandb = Wandb.none  # mode of W&B; with wandb in log.trackers, none is auto
    # fields of the W&B run: tags, group, job_type; true sends git_commit, system_metrics
    wandb_run: dict[str, Any] = field(default_factory=dict)
    record_every: Count = 10  # steps between rollout files (Parquet, with both logprobs); 0: never
    # steps in which torch.profiler traces the learner, such as [3], on one rank per pipeline stage
    profile_steps: Annotated[
        list[int],
        need(
            lambda steps: all(type(one) is int and one > 0 for one in steps),
            "use steps, such as [3]",
        ),
    ] = field(default_factory=list)
    # settings of the alarms in docs/guides/monitoring.md, by name: off, warn, stop, a bound, or {stop: bound};
    # such as {ess: stop}
    alarms: dict[str, Any] = field(default_factory=dict)

    @property
    def wandb_mode(self) -> Wandb:
        if self.wandb is Wandb.none and TrackerName.wandb in self.trackers:
            return Wandb.auto
        return self.wandb


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
