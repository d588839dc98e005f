"""Case of a plan: recipe, config.json, machine, assumptions; a step's workload, roles and memory
computed from them.
"""

from dataclasses import dataclass
from functools import cached_property

from megatron_rl.apps.planner.memory import engine as engines
from megatron_rl.apps.planner.memory.activations import Pack, Training
from megatron_rl.apps.planner.memory.learner import LearnerMemory, of_stage
from megatron_rl.config.evaluation import longest_sequence
from megatron_rl.config.fleet import distinct_formats
from megatron_rl.config.schema import Config, Device, SamplerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.models.shape import HfConfig, Lora
from megatron_rl.preflight.machine import Gpu, Machine
from megatron_rl.preflight.notes import top_bytes
from megatron_rl.preflight.roles import Roles, roles
from megatron_rl.weight_sync.probe_budget import PROBE_PROMPTS, PROBE_TOKENS

USABLE = 0.99  # of the memory that a GPU is sold with
WAITING_TOKEN = 13  # bytes: id, logprob, mask, text
WAITING_ANSWER = 4096  # bytes: objects, and what a reward measured


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate. Lengths are fractions of the recipe's limits; efficiencies are
    fractions of the vendor's peak.
    """

    response: float = 0.4  # mean response length
    prompt: float = 0.25
    longest: float = 1.0  # longest response of a step, as a fraction
    turns: float = 3.0  # of a session, at most environment.max_turns
    observation: float = 0.25  # mean length of what a turn adds
    tool_s: float = 0.5  # until it is there
    batches: float = 1.0  # generation batches until enough groups have spread
    dense: float = 0.65  # of the learner's matrix products, before their bytes
    experts: float = 0.15
    attention: float = 0.5
    launch_us: float = 10.0  # of the learner's process, for every kernel
    sampling: float = 0.35  # of an engine's products, prompts included
    reading: float = 0.75  # of memory bandwidth: a learner's kernels, and an engine that decodes
    reading_experts: float = 0.4
    quantizing: float = 0.1  # of memory bandwidth, while the learner quantizes its shards
    link: float = 0.6
    host_ms: float = 4.0  # of an engine, for every token of its sequences
    # of an engine, for each layer of a step whose matrices are quantized: activations
    rounding_us: float = 5.0
    hop_us: float = 15.0  # of an all-reduce between ranks of an engine
    far_hop_us: float = 50.0  # the same, between nodes
    file_gbs: float = 2.0  # weights through files: written, checked, read
    # times that weights pass through a GPU's memory while an engine loads them from there
    loading: float = 3.0
    host_gbs: float = 25.0  # from CPU memory to a GPU, pageable
    keep_gbs: float = 10.0  # a rank's state to CPU memory


@dataclass(frozen=True)
class Workload:
    """The work of one step."""

    sequences: int
    prompt: float  # tokens of a prompt
    response: float  # mean response; in a conversation, everything after the prompt
    longest: int  # prompt and response at their limits
    updates: int
    turns: float = 1.0  # of a session
    sampled: float = 0.0  # tokens of a response, or of all responses of a conversation
    sessions: int = 0  # open at once; 0: there is no environment
    top_bytes: int = 0  # of a sampled token's top logprobs, at most

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

    @property
    def halfway(self) -> float:
        """Tokens of a sequence that is under way, on average."""
        return self.prompt + self.response / 2

    def prefilled(self, kept: bool) -> float:
        """Tokens that engines prefill for a session behind its prompt; without kept prefixes all
        for each turn anew.
        """
        more = self.turns - 1
        if kept:
            return self.read
        return more * self.prompt + (self.response * more + self.read) / 2

    @property
    def length(self) -> float:
        return self.prompt + self.response

    @property
    def tokens(self) -> float:
        return self.sequences * self.length

    @classmethod
    def of(cls, config: Config, assumed: Assumptions) -> "Workload":
        rollout = config.rollout
        prompt = max(assumed.prompt * rollout.max_prompt_tokens, 1)
        turns = 1.0
        sampled = max(assumed.response * rollout.max_response_tokens, 1)
        read = 0.0
        sessions = 0
        if config.environment.name is not None:
            sessions = config.environment.max_concurrent
            turns = min(assumed.turns, config.environment.max_turns)
            sampled = sampled * turns
            read = assumed.observation * config.environment.max_observation_tokens * (turns - 1)
            fits = min(1.0, (rollout.context_tokens - prompt) / (sampled + read))
            sampled = sampled * fits
            read = read * fits
        return cls(
            sequences=rollout.prompts_per_step * rollout.samples_per_prompt,
            prompt=prompt,
            response=sampled + read,
            longest=rollout.context_tokens,
            updates=config.learner.n_minibatches,
            turns=turns,
            sampled=sampled,
            sessions=sessions,
            top_bytes=top_bytes(rollout),
        )

    @property
    def top_logprobs(self) -> float:
        """Bytes of a step's top logprobs, at most: what engines send, and a batch holds."""
        return self.sequences * self.sampled * self.top_bytes

    def waiting_bytes(self, ahead: int) -> float:
        """CPU memory in bytes on the driver's node for batches that wait for the learner."""
        other = self.sequences * (self.response * WAITING_TOKEN + WAITING_ANSWER)
        return ahead * (other + self.top_logprobs)


def keeps_prefixes(section: SamplerSection) -> bool:
    return bool(section.vllm.get("enable_prefix_caching", True))


@dataclass(frozen=True)
class Case:
    """Recipe, model and machine of a plan; all else is computed from them once."""

    config: Config
    hf_config: HfConfig
    machine: Machine
    assumed: Assumptions = Assumptions()

    @cached_property
    def model(self) -> Model:
        learner = self.config.learner
        layout = Layout.from_config(learner)
        head = self.config.model.head_precision
        return Model.of(self.hf_config, layout, head, Lora.of(learner.lora))

    @cached_property
    def roles(self) -> Roles:
        return roles(self.model.layout, self.config.sampler, self.machine.gpus)

    @cached_property
    def work(self) -> Workload:
        return Workload.of(self.config, self.assumed)

    @cached_property
    def training(self) -> Training:
        return Training.of(self.config.learner, self.host)

    @property
    def chunk_layers(self) -> int:
        """Layers that follow one another on a rank, at most."""
        layout = self.model.layout
        return max(layout.stage_layers(self.model.shape.layers)) // layout.chunks

    @property
    def recomputed(self) -> float:
        """The share of the layers that backward computes again."""
        return self.training.recomputed(self.chunk_layers)

    @property
    def packs(self) -> int:
        """Micro-batches of an update, of one replica."""
        work = self.work
        layout = self.model.layout
        of_replica = work.tokens / work.updates / layout.dp
        tokens = max(self.config.learner.tokens_per_microbatch, int(work.length))
        rows = work.sequences // work.updates // layout.dp
        return max(-(-int(of_replica) // tokens), min(2 * layout.pp, max(rows, 1)))

    @property
    def host(self) -> bool:
        return self.machine.kind == Device.cpu

    @property
    def gpu(self) -> Gpu:
        assert self.machine.gpu is not None, "time is planned for GPUs of a known kind"
        return self.machine.gpu

    @property
    def limit(self) -> float | None:
        """Bytes of a GPU; None: not known."""
        if self.machine.gib:
            return self.machine.gib * engines.GIB * USABLE
        return None

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its response that an engine reserves."""
        return longest_sequence(self.config.rollout, self.config.eval)

    @cached_property
    def weights(self) -> engines.EngineWeights:
        format = distinct_formats(self.config.sampler, self.config.quantization)[0]
        return engines.engine_weights(
            self.model.shape, format, tuple(self.config.quantization.ignore)
        )

    @cached_property
    def engine(self) -> engines.EngineMemory:
        sampler = self.config.sampler
        quantization = self.config.quantization
        return engines.of_engine(
            self.model, sampler, quantization, self.weights, self.longest, self.limit, self.host
        )

    def _stages(self, pack: Pack, packs: int) -> list[LearnerMemory]:
        """The learner's memory by pipeline stage."""
        reference = bool(self.config.loss.kl_coef) and self.model.shape.lora is None
        return [
            of_stage(self.model, self.training, stage, pack, packs, reference)
            for stage in range(self.model.layout.pp)
        ]

    def _fullest(self, rows: int, longest: int) -> int:
        """Tokens of a micro-batch: a row at its limit, or as many as the budget takes."""
        rows = -(-rows // self.model.layout.dp)
        return max(longest, min(self.config.learner.tokens_per_microbatch, rows * longest))

    @cached_property
    def heaviest(self) -> LearnerMemory:
        """The pipeline stage that needs the most, with the fullest micro-batch that can come."""
        work = self.work
        tokens = self._fullest(-(-work.sequences // work.updates), work.longest)
        share = 1 - work.prompt / max(work.longest, 1)  # prompts may be short
        stages = self._stages(Pack(tokens, max(tokens * share, 1), work.longest), self.packs)
        return max(stages, key=lambda one: one.needed)

    @property
    def probe(self) -> float:
        """Bytes that come and go in the fullest forward pass of a probe: short answers, to prompts
        of any length.
        """
        response = min(PROBE_TOKENS, self.config.rollout.max_response_tokens)
        longest = self.config.rollout.max_prompt_tokens + response
        tokens = self._fullest(PROBE_PROMPTS, longest)
        rows = -(-PROBE_PROMPTS // self.model.layout.dp)
        return max(
            one.forward
            for one in self._stages(Pack(tokens, min(tokens, rows * response), longest), 1)
        )
