"""Layout of a learner's ranks (TP, CP, PP, EP, DP): each rank's place, layers and experts.
Torch-free, pure integers.

The rules are those of megatron-core, restated to work without process groups; `learner/parallel.py`
compares the two at the start of every run.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.config.schema import LearnerSection


@dataclass(frozen=True)
class Place:
    """Coordinates of a rank in the parallel layout."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0  # place in the tensor-parallel group of the experts
    dp: int = 0  # data and context parallel replicas of the dense weights
    edp: int = 0  # replicas of the expert weights
    cp: int = 0  # place among the ranks that share sequences
    replica: int = 0  # whose rows it has: ranks that share sequences have the same


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    vp: int | None = None  # chunks per stage; None: one
    ep: int = 1
    etp: int | None = None  # None: as tp
    cp: int = 1
    dp: int = 1
    first_layers: int | None = None  # uneven pipelines: layers of the first and last stage
    last_layers: int | None = None
    vocab_multiple: int = 1  # each rank's share of the vocabulary is a multiple of this

    @classmethod
    def from_config(cls, learner: LearnerSection) -> "Layout":
        given = learner.megatron
        return cls(
            tp=learner.tensor_parallel,
            pp=learner.pipeline_parallel,
            vp=given.get("virtual_pipeline_model_parallel_size"),
            ep=learner.expert_parallel,
            etp=given.get("expert_tensor_parallel_size"),
            cp=learner.context_parallel,
            dp=learner.data_parallel,
            first_layers=given.get("num_layers_in_first_pipeline_stage"),
            last_layers=given.get("num_layers_in_last_pipeline_stage"),
        )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def chunks(self) -> int:
        return self.vp or 1

    def padded_vocab(self, vocab: int) -> int:
        unit = self.tp * self.vocab_multiple
        return -(-vocab // unit) * unit

    def stage_layers(self, layers: int) -> list[int]:
        """Number of layers of every pipeline stage, over all of its chunks."""
        counts: list[int | None] = [None] * self.pp
        if self.pp > 1:
            counts[0] = self.first_layers
            counts[-1] = self.last_layers
        rest = layers - sum(count or 0 for count in counts)
        open_stages = sum(count is None for count in counts)
        if rest < 0 or (open_stages == 0 and rest) or (open_stages and rest % open_stages):
            raise ValueError(
                f"{layers} layers do not divide over {self.pp} pipeline stages (first "
                f"{self.first_layers}, last {self.last_layers}): {rest} left for {open_stages} "
                "equal stages"
            )
        filled = [rest // open_stages if count is None else count for count in counts]
        bad = [count for count in filled if count % self.chunks]
        if bad:
            raise ValueError(
                f"{bad[0]} layers of a pipeline stage do not divide into {self.chunks} chunks"
            )
        return filled

    def layers(self, layers: int, pp: int, chunk: int = 0) -> range:
        """Global numbers of the layers in one chunk of one stage."""
        per_chunk = [count // self.chunks for count in self.stage_layers(layers)]
        start = chunk * sum(per_chunk) + sum(per_chunk[:pp])
        return range(start, start + per_chunk[pp])

    def own_layers(self, layers: int, pp: int) -> list[int]:
        """Layers of all chunks of a stage, in the order of the chunks."""
        return [layer for chunk in range(self.chunks) for layer in self.layers(layers, pp, chunk)]

    def local_experts(self, experts: int, ep: int) -> range:
        if experts % self.ep:
            raise ValueError(f"{experts} experts do not divide over expert_parallel {self.ep}")
        each = experts // self.ep
        return range(ep * each, (ep + 1) * each)

    def place(self, rank: int) -> Place:
        """Tensor parallel fastest, then context and data, then pipeline."""
        per_stage = self.tp * self.cp * self.dp
        inner = rank % per_stage
        return Place(
            tp=inner % self.tp,
            pp=rank // per_stage,
            ep=inner // self.expert_tp % self.ep,
            etp=inner % self.expert_tp,
            dp=inner // self.tp,
            edp=inner // (self.expert_tp * self.ep),
            cp=inner // self.tp % self.cp,
            replica=inner // (self.tp * self.cp),
        )

    def places(self) -> Iterator[Place]:
        """Every rank's, in order."""
        return (self.place(rank) for rank in range(self.world))
