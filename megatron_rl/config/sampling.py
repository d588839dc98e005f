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

# candidates beyond top_k: an engine keeps all that tie with the last one, and BF16 logits often do
TIES = 16
VERIFIERS = ("exact_match", "math_dapo", "math_verify", "reasoning_gym")


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
    # tokens are drawn among so many most likely ones, such as 50; the learner renormalises over
    # them. null: among all
    top_k: Annotated[int | None, between(1, 1024)] = None
    # of those, they are drawn among the first that hold this share of the probability
    top_p: Nucleus = 1.0
    dynamic_sampling: bool = True  # DAPO: groups without spread are replaced by new ones
    max_gen_batches: Positive = 4  # generation calls per step at most
    # batches that the sampler is ahead of the learner, and so the most updates that a token is
    # older than the policy that it trains (docs/ahead.md); 0: they take turns
    max_staleness: Annotated[int, between(0, 64)] = 0
    in_flight: InFlight = InFlight.drain  # what an update does to answers that are being written

    @property
    def context_tokens(self) -> int:
        return self.max_context_tokens or self.max_prompt_tokens + self.max_response_tokens

    @property
    def supervised(self) -> bool:
        """Whether the data set's own answers are trained on."""
        return self.source == RolloutSource.dataset

    @property
    def candidates(self) -> int:
        """Tokens whose logprobs an engine has to report at every position, beside the sampled
        one's; 0: none.
        """
        if self.top_k is None:
            return 0
        return self.top_k + TIES


@dataclass(frozen=True)
class EnvironmentSection:
    """Who answers the policy, for several turns (docs/environments.md). Without a name nobody
    does.
    """

    # package.module:Class, or a coroutine function run(base_url, row), an agent; such as
    # path/file.py:Class
    name: str | None = None
    # what the class is given, such as {digits: 3}
    settings: dict[str, Any] = field(default_factory=dict)
    max_turns: Positive = 8  # answers at most
    tool_timeout_s: Seconds = 10.0  # of a tool, a reset or a step; then it is stopped
    session_timeout_s: Seconds = 600.0  # of an agent's session
    max_observation_tokens: Positive = (
        512  # of what is answered to a turn: more is cut, and says so
    )
    # open at once, a process each; an evaluation has as many
    max_concurrent: Annotated[int, between(1, 65536)] = 64
    history: History = History.template  # how a turn is written behind those before it
    tool_parser: str = AUTO  # one of vLLM's, such as hermes; auto: told from the chat template
    credit: Credit = Credit.outcome  # how a session's rewards become its turns'


@dataclass(frozen=True)
class SamplerSection:
    tensor_parallel: Ranks = 1  # GPUs of each engine
    # how many; those of this machine share sampler.devices, or the cores where there are no GPUs
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
    start_timeout_s: Seconds = 600.0  # of an engine's start
    request_timeout_s: Seconds = 600.0  # of an engine's silence in a request
    # of an engine that shares its GPU with the learner, while the learner works
    sleep: Sleep = Sleep.none
    # handed to vLLM as is, such as {max_num_seqs: 512, gpu_memory_utilization: 0.8}
    vllm: Annotated[dict[str, Any], VLLM] = field(default_factory=dict)


@dataclass(frozen=True)
class QuantizationSection:
    format: Format = Format.none  # of the weights in the sampler
    # modules that stay in BF16, by name or re:pattern, such as [lm_head, "re:.*down_proj"]
    ignore: Annotated[
        list[str],
        need(are_modules, "what follows re: must be a regular expression, such as re:.*down_proj"),
    ] = field(default_factory=lambda: ["lm_head"])
    kv_cache: KvCache = KvCache.none  # of keys and values in the sampler
    # int8: how far outliers of the activations move into the weights, such as 0.5; null or 0: not
    # at all
    smoothing: Annotated[
        float | None, expect(lambda a: 0 <= a < 1, "0 < alpha < 1 such as 0.5, or null (off)")
    ] = None


@dataclass(frozen=True)
class SyncSection:
    transport: Transport = Transport.file  # how weights travel
    # file: where they lie, such as /shared/sync where servers are on other hosts; null: a private
    # folder in shared memory
    dir: str | None = None
    # steps between updates of the sampler; above 1 it samples from an older policy
    every: Positive = 1
    # file: every so many versions a whole one, in between patches of what changed; 1: always whole
    # ones
    full_every: Positive = 1
    # the logprob probe: after the first sync, then every so many; 0: the first only
    probe_every: Count = 10
    # nats; auto (or null): so many times what one rounding does to this policy
    # (weight_sync/probe_budget.py)
    probe_budget: Annotated[
        Any | None, need(lambda nats: nats == AUTO or is_weight(nats), "use auto, or nats above 0")
    ] = AUTO

    @property
    def budget(self) -> float | None:
        """The probe's budget in nats; None where it is unset or measured (`auto`)."""
        if self.probe_budget in (None, AUTO):
            return None
        return float(self.probe_budget)


@dataclass(frozen=True)
class RewardSection:
    # a verifier (exact_match, math_dapo, math_verify, reasoning_gym), package.module:function or
    # path/file.py:function; or several with weights, the first of which says what is right, such as
    # {math_dapo: 1.0, "mine.py:brevity": 0.1}
    name: Annotated[
        Any,
        need(
            is_reward,
            "use the name of a reward, or a mapping of names to weights, which are numbers",
        ),
    ] = "exact_match"
    # the score of a wrong answer to a verifier; -1 as published for DAPO
    wrong: Annotated[float, between(-1, 0, "-1 to 0")] = 0.0
    workers: Annotated[int, between(1, 1024)] = 1  # processes that score
    timeout_s: Seconds = 10.0  # of an answer's score
    # DAPO: the reward falls by up to 1 over the last so many response tokens
    overlong_buffer: int = 0
    # log the mean reward under the learner; one more forward pass over all answers
    learner_estimate: bool = False
    overlong_filter: bool = False  # DAPO: truncated answers leave the mask

    @property
    def weights(self) -> dict[str, float]:
        if isinstance(self.name, Mapping):
            return dict(self.name)
        return {self.name: 1.0}

    @property
    def needs_answer(self) -> bool:
        """Whether a row without an answer cannot be judged. Some tasks of reasoning-gym have many,
        and name none.
        """
        return any(name in VERIFIERS and name != "reasoning_gym" for name in self.weights)
