"""Workload of a step from a recipe and assumptions (mean lengths, efficiencies): sequences, tokens, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import Config, LearnerSection, RolloutSection
from megatron_rl.models.model import Model
from megatron_rl.weight_sync.probe_budget import PROBE_PROMPTS, PROBE_TOKENS
from megatron_rl.workshop.planner.activations import Pack

WAITING_TOKEN = 13  # bytes: id, logprob, mask, text
WAITING_ANSWER = 4096  # bytes: objects, and what a reward measured


@dataclass(frozen=True)
class Assumptions:
    """What no recipe says. Lengths are shares of rollout.max_*; efficiencies are of the maker's peak."""

    response: float = 0.4  # mean length of an answer
    prompt: float = 0.25
    longest: float = 1.0  # of a step's answers: the longest
    turns: float = 3.0  # of a session, at most environment.turns
    observation: float = 0.25  # mean length of what a turn adds
    tool_s: float = 0.5  # until it is there
    batches: float = 1.0  # generation batches until enough groups have spread
    dense: float = 0.40  # of the learner's matrix products
    experts: float = 0.15
    attention: float = 0.5
    halved: float = 0.05  # of that, lost with each doubling of the ranks that share a matrix
    sampling: float = 0.35  # of an engine's products, prompts included
    reading: float = 0.75  # of memory bandwidth, while an engine decodes
    reading_experts: float = 0.4
    quantizing: float = 0.1  # of memory bandwidth, while the learner quantizes its shards
    link: float = 0.6
    host_ms: float = 4.0  # of an engine, for every token of its sequences
    rounding_us: float = 5.0  # of an engine, for each layer of a step whose matrices are quantized: activations
    hop_us: float = 15.0  # of an all-reduce between ranks of an engine
    far_hop_us: float = 50.0  # the same, between nodes
    file_gbs: float = 2.0  # weights through files: written, checked, read
    loading: float = 3.0  # times that weights pass through a GPU's memory while an engine loads them from there
    host_gbs: float = 25.0  # from the host's memory into a GPU's, pages as they are
    keep_gbs: float = 10.0  # a rank's state into the host's memory


@dataclass(frozen=True)
class Workload:
    """The work of one step."""

    sequences: int
    prompt: float  # tokens of a prompt
    response: float  # and of its answer, on average: of a session everything behind the prompt
    longest: int  # a prompt and an answer at their limits
    updates: int
    turns: float = 1.0  # of a session
    sampled: float = 0.0  # tokens of an answer, or of all answers of a session
    sessions: int = 0  # open at once; 0: there is no environment

    @property
    def read(self) -> float:
        """Tokens that a session's turns add."""
        return self.response - self.sampled

    @property
    def open(self) -> int:
        """Sequences that may be under way at once."""
        return min(self.sessions or self.sequences, self.sequences)

    def open_of(self, engines: int) -> int:
        return -(-self.open // engines)

    def held(self, engines: int) -> int:
        """Tokens that what is open of an engine has come to, on average."""
        return int(self.open_of(engines) * self.halfway)

    @property
    def halfway(self) -> float:
        """Tokens of a sequence that is under way, on average."""
        return self.prompt + self.response / 2

    def prefilled(self, kept: bool) -> float:
        """Tokens that engines prefill for a session behind its prompt; without kept prefixes all for each turn anew."""
        more = self.turns - 1
        return self.read if kept else more * self.prompt + (self.response * more + self.read) / 2

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def tokens(self) -> float:
        return self.sequences * self.length

    @classmethod
    def of(cls, config: Config, learner: LearnerSection, assumed: Assumptions) -> Workload:
        rollout = config.rollout
        prompt = max(assumed.prompt * rollout.max_prompt_tokens, 1)
        turns, sampled, read = 1.0, max(assumed.response * rollout.max_response_tokens, 1), 0.0
        sessions = 0
        if config.environment.name is not None:
            sessions, turns = config.environment.sessions, min(assumed.turns, config.environment.turns)
            sampled, read = sampled * turns, assumed.observation * config.environment.observation_tokens * (turns - 1)
            fits = min(1.0, (rollout.context_tokens - prompt) / (sampled + read))
            sampled, read = sampled * fits, read * fits
        return cls(
            sequences=rollout.prompts_per_step * rollout.samples_per_prompt,
            prompt=prompt,
            response=sampled + read,
            longest=rollout.context_tokens,
            updates=learner.n_minibatches,
            turns=turns,
            sampled=sampled,
            sessions=sessions,
        )

    def waiting_bytes(self, ahead: int) -> float:
        """Bytes of the driver's host that batches take while they wait for the learner."""
        return ahead * self.sequences * (self.response * WAITING_TOKEN + WAITING_ANSWER)

    def packs(self, learner: LearnerSection, model: Model) -> int:
        """Micro-batches of an update on one replica."""
        layout = model.layout
        of_replica = self.tokens / self.updates / layout.dp
        count = max(-(-int(of_replica) // max(learner.tokens_per_microbatch, int(self.length))), 1)
        return max(count, min(2 * layout.pp, max(self.sequences // self.updates // layout.dp, 1)))

    def worst_pack(self, learner: LearnerSection, model: Model) -> Pack:
        """The fullest that can come: answers at their limit, or as many rows as the budget takes."""
        rows = -(-self.sequences // self.updates // model.layout.dp)
        tokens = max(self.longest, min(learner.tokens_per_microbatch, rows * self.longest))
        share = 1 - self.prompt / max(self.longest, 1)  # prompts may be short
        return Pack(tokens, max(tokens * share, 1), self.longest)


def probe_pack(rollout: RolloutSection, learner: LearnerSection, model: Model) -> Pack:
    """The fullest of a probe's forward pass: short answers, to prompts of any length."""
    response = min(PROBE_TOKENS, rollout.max_response_tokens)
    longest, rows = rollout.max_prompt_tokens + response, -(-PROBE_PROMPTS // model.layout.dp)
    tokens = max(longest, min(learner.tokens_per_microbatch, rows * longest))
    return Pack(tokens, min(tokens, rows * response), longest)
