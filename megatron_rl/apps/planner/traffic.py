"""Bytes of a weight sync by kind of link, beside a lower bound: a part of `megatron-rl plan`.
Reckoned from shapes and layouts; no sync reads it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_rl.apps.planner.memory.engine import PLAIN, EngineWeights, engine_weights
from megatron_rl.apps.planner.memory.learner import BF16
from megatron_rl.apps.planner.summary import axes
from megatron_rl.config.schema import Config, Format, Transport
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import Param, parameters, stored_params
from megatron_rl.models.model import Model
from megatron_rl.models.table import Row, Split
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.quantization.formats import Output, is_quantized, outputs, scale_name
from megatron_rl.tracking.console import table
from megatron_rl.weight_sync.engine_shards import SMALL

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
END = (
    "  busiest end: all bytes through the most loaded rank; engines on one node read the `file` "
    "transport's bytes from one shared copy"
)

# a tensor-parallel group that gathers: (stage, expert-parallel rank; None: the dense weights'
# group)
GroupKey = tuple[int, int | None]


@dataclass(frozen=True)
class SyncPlan:
    """Tensors of one sync, and the bytes that each rank of the learner sends."""

    weights: EngineWeights
    tensors: tuple[TensorSpec, ...]
    writers: Mapping[tuple[int, int], int]  # (stage, expert-parallel rank) -> bytes it writes
    # bytes that each rank but the first sends to the first
    gathers: Mapping[GroupKey, tuple[int, ...]]
    uncut_bytes: int  # split, but left whole by the file transport because they are small

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes


@dataclass(frozen=True)
class _Kind:
    """Output of one kind of weight: equal for all layers and experts, so computed once."""

    tensor: TensorSpec  # of the first of its kind
    split: bool  # true if the ranks of a group hold different parts of it
    sent: tuple[int, ...]  # by every rank of the group but the first


def plan_sync(model: Model, format: Format, ignore: Sequence[str] = ()) -> SyncPlan:
    """Follow every weight from the ranks that hold it to the rank that writes it."""
    shape = model.shape
    layout = model.layout
    stage_of = {
        layer: pp for pp in range(layout.pp) for layer in layout.own_layers(shape.layers, pp)
    }
    per_rank = max(shape.experts // layout.ep, 1)
    kinds: dict[tuple[Row, tuple[bool, ...]], list[list[_Kind]]] = {}
    tensors: list[TensorSpec] = []
    writers = Counter[tuple[int, int]]()
    sent: dict[GroupKey, list[int]] = {}
    uncut = 0
    for param in stored_params(shape):
        if param.layer is not None:
            stage = stage_of[param.layer]
        elif param.row.megatron[0].startswith("embedding."):
            stage = 0
        else:
            stage = layout.pp - 1
        expert_rank = None
        if param.expert is not None:
            expert_rank = param.expert // per_rank
        quantized = tuple(is_quantized(name, format, ignore) for name in param.hf)
        key = (param.row, quantized)
        if key not in kinds:
            kinds[key] = _kinds(param, model, format, ignore)
        writer = (stage, expert_rank or 0)
        size = layout.expert_tp if param.row.expert else layout.tp
        from_ranks = sent.setdefault((stage, expert_rank), [0] * (size - 1))
        for name, made in zip(param.hf, kinds[key], strict=True):
            for out_name, kind in zip((name, scale_name(name)), made, strict=False):
                tensor = replace(kind.tensor, name=out_name)
                tensors.append(tensor)
                writers[writer] += tensor.nbytes
                if kind.split and tensor.nbytes < SMALL:
                    uncut += tensor.nbytes
                for rank, nbytes in enumerate(kind.sent):
                    from_ranks[rank] += nbytes
    gathers = {group: tuple(of_ranks) for group, of_ranks in sent.items() if of_ranks}
    weights = engine_weights(shape, format, tuple(ignore))
    return SyncPlan(weights, tuple(tensors), writers, gathers, uncut)


def _kinds(param: Param, model: Model, format: Format, ignore: Sequence[str]) -> list[list[_Kind]]:
    """The outputs of each Hugging Face tensor behind a parameter."""
    shape = model.shape
    layout = model.layout
    size = layout.expert_tp if param.row.expert else layout.tp
    split = param.row.split is not Split.replicated
    of_ranks = [param.slices(shape, layout, Place(tp=rank, etp=rank)) for rank in range(size)]
    kinds = []
    for pieces in zip(*of_ranks, strict=True):
        made = [outputs(piece, format, ignore, PLAIN, split) for piece in pieces]
        kinds.append([_kind(*of_rank) for of_rank in zip(*made, strict=True)])
    return kinds


def _kind(first: Output, *rest: Output) -> _Kind:
    if first.dim is None:
        return _Kind(first.tensor, False, ())
    return _Kind(first.tensor, True, tuple(out.part.nbytes for out in rest))


@dataclass(frozen=True)
class SamplerLayout:
    """Engines of a sync: ranks of each, and how many."""

    tp: int = 1
    replicas: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.replicas


@dataclass(frozen=True)
class Links:
    """Links of one kind."""

    kind: str
    count: int
    total: int  # bytes on all of them
    end: int  # bytes through the busiest end, which its network card has to carry


@dataclass(frozen=True)
class LowerBound:
    """Bytes that no way of moving these weights, in this format, can undercut."""

    out: int  # leave the busiest learner rank, if all holders of a weight share the work
    into: int  # enter the busiest sampler rank: its own shard
    total: int  # enter all sampler ranks

    @property
    def busiest(self) -> int:
        return max(self.out, self.into)


class Traffic:
    """A sync between a learner and engines of these sizes."""

    def __init__(self, config: Config, hf_config: Mapping[str, Any], replicas: int) -> None:
        self._config = config
        self.model = Model.of(hf_config, Layout.from_config(config.learner))
        self.sampler = SamplerLayout(config.sampler.tensor_parallel, replicas)
        quantization = config.quantization
        self.plan = plan_sync(self.model, quantization.format, quantization.ignore)
        self.links = links(self.plan, self.sampler, config.sync.transport)
        self.bound = lower_bound(self.plan, self.model, self.sampler)

    def numbers(self) -> dict[str, Any]:
        """The JSON of a plan's `sync`."""
        return {
            "bytes": self.plan.nbytes,
            "tensors": len(self.plan.tensors),
            "writers": len(self.plan.writers),
            "links": [asdict(one) for one in self.links],
            "lower_bound": asdict(self.bound),
        }

    def describe(self, link_gbs: float | None) -> str:
        """Text with tables of tensors, links and the lower bound."""
        config = self._config
        plan = self.plan
        layout = self.model.layout
        who = [
            f"model     {config.model.path}: {self.model.shape.family}, "
            f"{parameters(self.model.shape) / 1e6:,.1f} M parameters",
            f"learner   {layout.world:,} ranks ({axes(layout)}), of which "
            f"{len(plan.writers):,} write",
            f"sampler   {self.sampler.world:,} ranks (TP{self.sampler.tp} x "
            f"{self.sampler.replicas:,} engines)",
            f"sync      quantization.format={config.quantization.format}, "
            f"sync.transport={config.sync.transport}, every {config.sync.every} step(s)",
        ]
        sections = [who, self._tensors(), _links(self.links, link_gbs), self._bound(link_gbs)]
        return "\n\n".join("\n".join(section) for section in sections)

    def _tensors(self) -> list[str]:
        counts = Counter[str]()
        sizes = Counter[str]()
        for tensor in self.plan.tensors:
            kind = tensor.dtype
            if tensor.name.endswith(".weight_scale"):
                kind = f"{kind} scales"
            counts[kind] += 1
            sizes[kind] += tensor.nbytes
        rows = [(kind, f"{counts[kind]:,}", _size(sizes[kind])) for kind in sorted(counts)]
        rows.append(("together", f"{len(self.plan.tensors):,}", _size(self.plan.nbytes)))
        rows.append(("(as BF16)", "", _size(BF16 * parameters(self.model.shape))))
        return table(("what moves", "tensors", "bytes"), rows)

    def _bound(self, link_gbs: float | None) -> list[str]:
        bound = self.bound
        rows = [
            ("out of a learner rank", _size(bound.out), "all holders of a weight share the work"),
            ("into a sampler rank", _size(bound.into), "its own shard"),
            ("into all sampler ranks", _size(bound.total), ""),
        ]
        built = max(one.end for one in self.links)
        tail = f"  the busiest end carries {built / max(bound.busiest, 1):.1f}x of the least"
        if link_gbs is not None:
            least = _seconds(bound.busiest, link_gbs)
            tail += f": {_seconds(built, link_gbs)} against {least} at {link_gbs:g} GB/s"
        return [*table(("lower bound", "bytes", ""), rows), tail]


def links(plan: SyncPlan, sampler: SamplerLayout, transport: Transport) -> list[Links]:
    """Every kind of link that carries bytes."""
    dense = [sent for (_, expert), sent in plan.gathers.items() if expert is None]
    experts = [sent for (_, expert), sent in plan.gathers.items() if expert is not None]
    found = []
    for weights, groups in (("dense weights", dense), ("experts", experts)):
        sent = [nbytes for of_ranks in groups for nbytes in of_ranks if nbytes]
        end = max(map(sum, groups), default=0)
        found.append(Links(f"learner: gather of {weights}", len(sent), sum(sent), end))
    writers = list(plan.writers.values())
    if transport == Transport.file:
        found.append(Links("learner -> files", len(writers), sum(writers), max(writers)))
        # scales too small to be cut are read whole
        read = plan.weights.of_rank(sampler.tp) + plan.uncut_bytes - plan.uncut_bytes // sampler.tp
        found.append(Links("files -> sampler", sampler.world, read * sampler.world, read))
    else:  # vLLM's own transports hand whole tensors to every rank
        count = len(writers) * sampler.world
        total = plan.nbytes * sampler.world
        found.append(Links("learner -> sampler", count, total, plan.nbytes))
    return [one for one in found if one.count]


def lower_bound(plan: SyncPlan, model: Model, sampler: SamplerLayout) -> LowerBound:
    """Every byte leaves the learner once, and each sampler rank receives its shard; samplers may
    pass bytes on.
    """
    stages = Counter[int]()
    for (stage, _), nbytes in plan.writers.items():
        stages[stage] += nbytes
    # the ranks of a stage share what it holds, at best evenly: experts are split evenly as it is
    layout = model.layout
    out = max(stages.values()) // (layout.tp * layout.cp * layout.dp)
    shard = plan.weights.of_rank(sampler.tp)
    return LowerBound(out, shard, shard * sampler.world)


def _links(found: list[Links], link_gbs: float | None) -> list[str]:
    head = ["links of one sync", "count", "all links", "busiest end"]
    rows = [[one.kind, f"{one.count:,}", _size(one.total), _size(one.end)] for one in found]
    if link_gbs is not None:
        head.append(f"at {link_gbs:g} GB/s")
        for row, one in zip(rows, found, strict=True):
            row.append(_seconds(one.end, link_gbs))
    return [*table(head, rows), END]


def _size(nbytes: float) -> str:
    power = 0
    while nbytes >= 1024 and power < len(UNITS) - 1:
        nbytes /= 1024
        power += 1
    digits = 1 if power else 0
    return f"{nbytes:,.{digits}f} {UNITS[power]}"


def _seconds(nbytes: int, link_gbs: float) -> str:
    return f"{nbytes / (link_gbs * 1e9):.3g} s"
