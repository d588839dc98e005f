"""Typed dataclasses of the recipe sections rollout, environment, sampler, quantization, sync and
reward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from megatron_rl.config.bounds import (  # isort: skip
    AUTO,
    VLLM,
    Count,
    Nucleus,
    Positive,
    Ranks,
    Samples,
    Seconds,
    are_modules,
    between,
    expect,
    is_reward,
    is_weight,
    need,
)
from megatron_rl.config.choices import (  # isort: skip
    Credit,
    Format,
    History,
    InFlight,
    KvCache,
    RolloutSource,
    Sleep,
    Transport,
)

# candidates beyond top_k: an engine keeps all tokens tied with the last one, and BF16 logits often
# tie
TIES = 16
VERIFIERS = ("exact_match", "math_dapo", "math_verify", "reasoning_gym")


@dataclass(frozen=True)
class TopLogprobsSection:
    """Logprobs of the sampler's most likely tokens at each sampled token."""

    # maximum number of top tokens, the sampler's most likely ones at a sampled token, that come with
    # their logprobs, such as 32; 0: none
    max: Annotated[int, between(0, 1024)] = 0
    # probability of the top tokens beyond which there are no more of them, such as 0.999
    mass: Annotated[float, expect(lambda share: 0 < share <= 1, "above 0, at most 1")] = 0.999


@dataclass(frozen=True)
class RolloutSection:
    source: RolloutSource = RolloutSource.sampler  # source of the responses
    prompts_per_step: Positive = 64  # prompts (groups) per batch
    samples_per_prompt: Samples = 8  # responses per prompt (a group)
    max_prompt_tokens: Positive = 512  # maximum tokens of a prompt; longer ones: data.long_prompts
    # maximum tokens of a response; with an environment: of one turn
    max_response_tokens: Positive = 512
    # maximum tokens of a whole conversation, such as 4096; null: the sum of the two above
    max_context_tokens: Positive | None = None
    # sampling temperature, in the range that vLLM supports
    temperature: Annotated[float, between(0.01, 2, "0.01 to 2 (greedy is for evaluation)")] = 1.0
    # top-k sampling, such as 50: only the k most likely tokens are sampled, and the learner
    # renormalises over them; null: off
    top_k: Annotated[int | None, between(1, 1024)] = None
    # top-p sampling within the top k: the smallest set of tokens with this share of the probability
    top_p: Nucleus = 1.0
    top_logprobs: TopLogprobsSection = field(default_factory=TopLogprobsSection)
    # DAPO: if true, groups without reward variance are replaced by new ones
    dynamic_sampling: bool = True
    max_gen_batches: Positive = 4  # maximum generation calls per step
    # batches that the sampler may run ahead of the learner, hence the maximum staleness of a token
    # in steps (docs/concepts/async-rollouts.md); 0: synchronous
    max_staleness: Annotated[int, between(0, 64)] = 0
    in_flight: InFlight = InFlight.drain  # handling of responses in flight at a sync

    @property
    def context_tokens(self) -> int:
        return self.max_context_tokens or self.max_prompt_tokens + self.max_response_tokens

    @property
    def supervised(self) -> bool:
        """True if the run trains on the data set's own answers."""
        return self.source == RolloutSource.dataset

    @property
    def candidates(self) -> int:
        """Number of top logprobs per position that an engine has to report beside the sampled
        token's; 0: none.
        """
        if self.top_k is None:
            return 0
        return self.top_k + TIES


@dataclass(frozen=True)
class EnvironmentSection:
    """Environment of multi-turn conversations (docs/guides/environments.md); none without a name."""

    # package.module:Class, or a coroutine function run(base_url, row), an agent; such as
    # path/file.py:Class
    name: str | None = None
    # arguments of the class, such as {digits: 3}
    settings: dict[str, Any] = field(default_factory=dict)
    max_turns: Positive = 8  # maximum turns of a conversation
    tool_timeout_s: Seconds = 10.0  # seconds after which a tool call, reset or step is stopped
    session_timeout_s: Seconds = 600.0  # seconds after which an agent's conversation is stopped
    max_observation_tokens: Positive = (
        512  # maximum tokens of an observation; longer ones are truncated and marked
    )
    # maximum concurrent conversations, one process each; evaluation uses the same limit
    max_concurrent: Annotated[int, between(1, 65536)] = 64
    history: History = History.template  # how a turn is appended to the turns before it
    # tool parser of vLLM, such as hermes; auto: detected from the chat template
    tool_parser: str = AUTO
    credit: Credit = Credit.outcome  # how a conversation's rewards are credited to its turns


@dataclass(frozen=True)
class SamplerSection:
    tensor_parallel: Ranks = 1  # GPUs of each engine
    # number of engines; those on this machine share sampler.devices, or the cores if there are no
    # GPUs
    engines: Ranks = 1
    # if true, the engines are servers on nodes of their own: slurm/dapo_split.sbatch starts them,
    # and sets sampler.addresses
    dedicated_nodes: bool = False
    # servers that are the engines, one for each, such as [http://node7:8000]; empty: the run starts
    # its engines, on this machine
    addresses: list[str] = field(default_factory=list)
    # weight format of each engine, such as [none, int8]; empty: quantization.format
    formats: list[Format] = field(default_factory=list)
    # GPUs of all engines among those that this job sees, such as "4,5"; null: all,
    # for one engine
    devices: Any | None = None
    start_timeout_s: Seconds = 600.0  # seconds after which the start of an engine fails
    # seconds without progress after which a request to an engine fails
    request_timeout_s: Seconds = 600.0
    # state of a colocated engine while the learner uses the GPU
    sleep: Sleep = Sleep.none
    # arguments passed to vLLM unchanged, such as {max_num_seqs: 512, gpu_memory_utilization: 0.8}
    vllm: Annotated[dict[str, Any], VLLM] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantizationSection:
    format: Format = Format.none  # format of the weights in the sampler
    # modules that stay in BF16, by name or re:pattern, such as [lm_head, "re:.*down_proj"]
    ignore: Annotated[
        list[str],
        need(are_modules, "what follows re: must be a regular expression, such as re:.*down_proj"),
    ] = field(default_factory=lambda: ["lm_head"])
    kv_cache: KvCache = KvCache.none  # format of the KV cache in the sampler
    # int8: SmoothQuant strength, such as 0.5: the share of activation outliers moved into the
    # weights; null or 0: off
    smoothing: Annotated[
        float | None, expect(lambda a: 0 <= a < 1, "0 < alpha < 1 such as 0.5, or null (off)")
    ] = None


@dataclass(frozen=True)
class SyncSection:
    transport: Transport = Transport.file  # transport of weights from learner to engines
    # file: folder of the weight files, such as /shared/sync if servers are on other machines; null:
    # a private folder in shared memory
    dir: str | None = None
    # steps between weight syncs; above 1 the sampler uses an older policy
    every: Positive = 1
    # file: versions between full weight files, with patches in between; 1: always full
    full_every: Positive = 1
    # syncs between logprob probes, after one at the first sync; 0: the first only
    probe_every: Count = 10
    # tolerance of the probe in nats; auto (or null): a multiple of the measured effect of one
    # rounding (weight_sync/probe_budget.py)
    probe_budget: Annotated[
        Any | None, need(lambda nats: nats == AUTO or is_weight(nats), "use auto, or nats above 0")
    ] = AUTO

    @property
    def budget(self) -> float | None:
        """The probe's budget in nats; None if it is unset or measured (`auto`)."""
        if self.probe_budget in (None, AUTO):
            return None
        return float(self.probe_budget)


@dataclass(frozen=True)
class RewardSection:
    # a verifier (exact_match, math_dapo, math_verify, reasoning_gym), package.module:function or
    # path/file.py:function; or several with weights, the first of which decides correctness, such
    # as {math_dapo: 1.0, "mine.py:brevity": 0.1}
    name: Annotated[
        Any,
        need(
            is_reward,
            "use the name of a reward, or a mapping of names to weights, which are numbers",
        ),
    ] = "exact_match"
    # reward of a wrong response under a verifier; -1 as published for DAPO
    wrong: Annotated[float, between(-1, 0, "-1 to 0")] = 0.0
    workers: Annotated[int, between(1, 1024)] = 1  # number of scoring processes
    timeout_s: Seconds = 10.0  # seconds after which the scoring of a response fails
    # DAPO: the reward falls by up to 1 over the last so many response tokens
    overlong_buffer: int = 0
    # if true, log the estimated mean reward of the learner; costs a forward pass over all responses
    learner_estimate: bool = False
    overlong_filter: bool = False  # DAPO: if true, truncated responses are masked

    @property
    def weights(self) -> dict[str, float]:
        if isinstance(self.name, Mapping):
            return dict(self.name)
        return {self.name: 1.0}

    @property
    def needs_answer(self) -> bool:
        """True if the reward needs an answer in every row. Some tasks of reasoning-gym have many
        right answers, and list none.
        """
        return any(name in VERIFIERS and name != "reasoning_gym" for name in self.weights)
