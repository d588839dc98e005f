"""What a weight sync will move, link by link: a part of `megatron-rl plan`.

Pure arithmetic on names and shapes, for sizes that nobody owns the machines of yet, too: no process group, no weights,
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.config.schema import Config, QuantizationSection, SyncSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.preflight.sync_plan import SyncPlan, plan_sync, size_problems
from megatron_rl.runs.console import table

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    replicas: int = 1  # sampler engines
    link_gbs: float | None = None  # GB/s of every link, to turn bytes into seconds
    rows: int = 5  # writers and tensors to name


def problems(config: Config, hf_config: Mapping[str, Any], request: Request) -> list[str]:
    """Every reason at once where the sizes do not go together."""
    try:
        model = Model.of(hf_config, Layout.from_config(config.learner))
    except ValueError as error:
        return [f"model.path={config.model.path}: {error}"]
    found = size_problems(model, config.sampler, config.quantization)
    if request.replicas < 1:
        found.append(f"--replicas {request.replicas}: expected 1 or more")
    if request.link_gbs is not None and request.link_gbs <= 0:
        found.append(f"--link-gbs {request.link_gbs:g}: expected GB/s above 0")
    return found


def describe(config: Config, hf_config: Mapping[str, Any], request: Request) -> str:
    """The report."""
    model, sampler, plan = _planned(config, hf_config, request)
    bound = lower_bound(plan, model, sampler)
    sections = [
        _who(config.model.path, config.quantization, config.sync, model, sampler, plan),
        _what(plan),
        _links(plan, sampler, request.link_gbs),
        _bound(plan, bound, request.link_gbs),
        _writers(plan, request.rows),
        _largest(plan, request.rows),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def numbers(config: Config, hf_config: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """A sync's traffic as numbers, for programs."""
    model, sampler, plan = _planned(config, hf_config, request)
    return {
        "bytes": plan.nbytes,
        "tensors": len(plan.transfers),
        "writers": len(plan.writers),
        "links": [asdict(one) for one in links(plan, sampler)],
        "lower_bound": asdict(lower_bound(plan, model, sampler)),
    }


def _planned(config: Config, hf_config: Mapping[str, Any], request: Request) -> tuple[Model, SamplerLayout, SyncPlan]:
    model = Model.of(hf_config, Layout.from_config(config.learner))
    plan = plan_sync(model, config.quantization.format, config.quantization.ignore)
    return model, SamplerLayout(config.sampler.tensor_parallel, request.replicas), plan


def _who(
    path: str,
    quantization: QuantizationSection,
    sync: SyncSection,
    model: Model,
    sampler: SamplerLayout,
    plan: SyncPlan,
) -> list[str]:
    shape, layout = model.shape, model.layout
    axes = [("TP", layout.tp), ("PP", layout.pp), ("VP", layout.chunks), ("CP", layout.cp), ("EP", layout.ep)]
    axes += [("expert TP", layout.expert_tp if shape.experts else 1), ("DP", layout.dp)]
    sizes = " ".join(f"{name}{size}" for name, size in axes if size > 1) or "one rank"
    return [
        f"model     {path}: {shape.family}, {plan.plain_bytes / 2e6:,.1f} M parameters",
        f"learner   {layout.world:,} ranks ({sizes}), of which {len(plan.writers):,} write",
        f"sampler   {sampler.world:,} ranks (TP{sampler.tp} x {sampler.replicas:,} engines)",
        f"sync      quantization.format={quantization.format}, sync.transport={sync.transport}, "
        f"every {sync.every} step(s)",
    ]


def _what(plan: SyncPlan) -> list[str]:
    kinds: dict[str, tuple[int, int]] = {}
    for transfer in plan.transfers:
        scale = transfer.tensor.name.endswith(".weight_scale")
        kind = f"{transfer.tensor.dtype} scales" if scale else transfer.tensor.dtype
        count, nbytes = kinds.get(kind, (0, 0))
        kinds[kind] = (count + 1, nbytes + transfer.tensor.nbytes)
    rows = [(kind, f"{count:,}", _size(nbytes)) for kind, (count, nbytes) in sorted(kinds.items())]
    rows.append(("together", f"{len(plan.transfers):,}", _size(plan.nbytes)))
    rows.append(("(as BF16)", "", _size(plan.plain_bytes)))
    return table(("what moves", "tensors", "bytes"), rows)


def _links(plan: SyncPlan, sampler: SamplerLayout, link_gbs: float | None) -> list[str]:
    found = links(plan, sampler)
    head = ["links of one sync", "count", "busiest link", "all links", "busiest end"]
    rows = [[each.kind, f"{each.count:,}", _size(each.busiest), _size(each.total), _size(each.end)] for each in found]
    if link_gbs is not None:
        head.append(f"at {link_gbs:g} GB/s")
        for row, each in zip(rows, found, strict=True):
            row.append(_seconds(each.end, link_gbs))
    notes = [f"  {each.kind}: {each.meaning}" for each in found]
    return [
        *table(head, rows),
        *notes,
        "  busiest end: everything that goes through the most loaded rank, which its network card has to carry;"
        " replicas on one host read the `file` transport's bytes from one shared copy",
    ]


def _bound(plan: SyncPlan, bound: LowerBound, link_gbs: float | None) -> list[str]:
    rows = [
        ["out of a learner rank", _size(bound.out), "each weight leaves once, all its holders share the work"],
        ["into a sampler rank", _size(bound.into), "its own shard"],
        ["into all sampler ranks", _size(bound.total), "what must move at least"],
    ]
    ratio = plan.nbytes / max(bound.busiest, 1)
    tail = f"  as built, the busiest end carries {ratio:.1f}x of the least that it could"
    if link_gbs is not None:
        tail += f": {_seconds(plan.nbytes, link_gbs)} against {_seconds(bound.busiest, link_gbs)} at {link_gbs:g} GB/s"
    return [*table(("lower bound", "bytes", ""), rows), tail]


def _writers(plan: SyncPlan, shown: int) -> list[str]:
    ranked = sorted(plan.writers.items(), key=lambda item: (-item[1], item[0]))
    rows = [(f"stage {stage}, expert rank {expert}", _size(n)) for (stage, expert), n in ranked[:shown]]
    rest = ranked[shown:]
    if rest:
        rows.append((f"{len(rest):,} more, down to", _size(rest[-1][1])))
    if shown < 1:
        return []
    return table(("writer", "bytes to each sampler rank"), rows)


def _largest(plan: SyncPlan, count: int) -> list[str]:
    ranked = sorted(plan.transfers, key=lambda one: (-one.tensor.nbytes, one.tensor.name))[:count] if count > 0 else []
    pairs = [(one.tensor, one.shards) for one in ranked]
    rows = [(t.name, "x".join(map(str, t.shape)), t.dtype, f"{shards}", _size(t.nbytes)) for t, shards in pairs]
    return table(("largest tensors", "shape", "dtype", "shards", "bytes"), rows) if rows else []


def _size(nbytes: float) -> str:
    for unit in UNITS:
        if nbytes < 1024 or unit == UNITS[-1]:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def _seconds(nbytes: int, link_gbs: float) -> str:
    return f"{nbytes / (link_gbs * 1e9):.3g} s"


@dataclass(frozen=True)
class SamplerLayout:
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
    busiest: int  # bytes on one link
    total: int  # bytes on all of them
    end: int  # bytes through the busiest end: what one network card sees
    meaning: str


@dataclass(frozen=True)
class LowerBound:
    """What no way of moving these weights, in this format, can undercut."""

    out: int  # bytes that leave the busiest learner rank, if all holders of a weight share the work
    into: int  # bytes that enter the busiest sampler rank: its own shard
    total: int  # bytes that enter all sampler ranks

    @property
    def busiest(self) -> int:
        return max(self.out, self.into)


def links(plan: SyncPlan, sampler: SamplerLayout) -> list[Links]:
    """Every kind of link that carries bytes, with its numbers."""
    dense = [sent for (_, expert_rank), sent in plan.gathers.items() if expert_rank is None]
    expert = [sent for (_, expert_rank), sent in plan.gathers.items() if expert_rank is not None]
    found = [
        _gathers("learner: gather of dense weights", dense, "a tensor-parallel rank -> the writer of its group"),
        _gathers("learner: gather of experts", expert, "an expert-tensor-parallel rank -> the writer of its group"),
    ]
    found.append(_maxima(plan))
    receivers = sampler.world
    found.append(
        Links(
            "learner -> sampler",
            len(plan.writers) * receivers,
            max(plan.writers.values(), default=0),
            plan.nbytes * receivers,
            plan.nbytes,
            "a writer's tensors -> one sampler rank, which takes whole tensors and cuts its own shard",
        )
    )
    return [each for each in found if each.count]


def lower_bound(plan: SyncPlan, model: Model, sampler: SamplerLayout) -> LowerBound:
    """Every byte leaves the learner once and each sampler rank receives its shard; samplers may pass bytes on."""
    stages: dict[int, int] = {}
    for (stage, _), nbytes in plan.writers.items():
        stages[stage] = stages.get(stage, 0) + nbytes
    # the ranks of a stage share what it holds, at best evenly: experts are split evenly as it is
    layout = model.layout
    out = max(stages.values(), default=0) // (layout.tp * layout.cp * layout.dp)
    shard = plan.whole_bytes + plan.split_bytes // sampler.tp
    shard += plan.key_value_bytes // min(sampler.tp, model.shape.kv_heads)
    return LowerBound(out, shard, shard * sampler.world)


def _gathers(kind: str, groups: list[tuple[int, ...]], meaning: str) -> Links:
    sent = [nbytes for of_ranks in groups for nbytes in of_ranks if nbytes]
    return Links(kind, len(sent), max(sent, default=0), sum(sent), max(map(sum, groups), default=0), meaning)


def _maxima(plan: SyncPlan) -> Links:
    """An all-reduce around a ring passes nearly twice its bytes over each of its links."""
    rings = [(len(plan.gathers[group]) + 1, nbytes) for group, nbytes in plan.maxima.items()]
    each = [2 * (size - 1) * nbytes // size for size, nbytes in rings]
    return Links(
        "learner: row maxima",
        sum(size for size, _ in rings),
        max(each, default=0),
        sum(size * nbytes for (size, _), nbytes in zip(rings, each, strict=True)),
        max(each, default=0),
        "around a tensor-parallel group, so that shards of one row get one scale",
    )
