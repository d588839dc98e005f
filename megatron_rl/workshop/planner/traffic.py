"""Bytes of a weight sync by kind of link, beside a lower bound, as text or numbers: a part of
`megatron-rl plan`.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_rl.config.schema import Config, Transport
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.preflight.sync_plan import SyncPlan, plan_sync, size_problems
from megatron_rl.runs.console import table
from megatron_rl.workshop.planner.case import Assumptions

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
END = (
    "  busiest end: everything that goes through the most loaded rank, which its network card has "
    "to carry; engines on one host read the `file` transport's bytes from one shared copy"
)
MEMORY_TBS = 3.35  # of an H100


@dataclass(frozen=True)
class Request:
    """What the command line asks of it."""

    replicas: int = 1  # sampler engines
    link_gbs: float | None = None  # GB/s of every link, to turn bytes into seconds
    rows: int = 5  # writers and tensors to name


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


def problems(config: Config, hf_config: Mapping[str, Any], request: Request) -> list[str]:
    """Every reason at once where the sizes do not go together."""
    try:
        model = Model.of(hf_config, Layout.from_config(config.learner))
    except ValueError as error:
        return [f"model.path={config.model.path}: {error}"]
    found = size_problems(model, config.sampler, config.quantization)
    if request.replicas < 1:
        found.append(f"--replicas {request.replicas}: expected 1 or more")
    if request.link_gbs is not None and not 0 < request.link_gbs < math.inf:
        found.append(f"--link-gbs {request.link_gbs:g}: expected GB/s above 0")
    return found


def numbers(config: Config, hf_config: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """A sync's traffic as numbers, for programs."""
    model, sampler, plan = _planned(config, hf_config, request)
    found = links(plan, sampler, config.sync.transport)
    return {
        "bytes": plan.nbytes,
        "tensors": len(plan.transfers),
        "writers": len(plan.writers),
        "links": [asdict(one) for one in found],
        "lower_bound": asdict(lower_bound(plan, model, sampler)),
    }


def describe(config: Config, hf_config: Mapping[str, Any], request: Request) -> str:
    model, sampler, plan = _planned(config, hf_config, request)
    shape = model.shape
    layout = model.layout
    axes = [
        ("TP", layout.tp),
        ("PP", layout.pp),
        ("VP", layout.chunks),
        ("CP", layout.cp),
        ("EP", layout.ep),
    ]
    axes += [("expert TP", layout.expert_tp if shape.experts else 1), ("DP", layout.dp)]
    sizes = " ".join(f"{name}{size}" for name, size in axes if size > 1) or "one rank"
    who = [
        f"model     {config.model.path}: {shape.family}, {plan.plain_bytes / 2e6:,.1f} M "
        "parameters",
        f"learner   {layout.world:,} ranks ({sizes}), of which {len(plan.writers):,} write",
        f"sampler   {sampler.world:,} ranks (TP{sampler.tp} x {sampler.replicas:,} engines)",
        f"sync      quantization.format={config.quantization.format}, "
        f"sync.transport={config.sync.transport}, every {config.sync.every} step(s)",
    ]
    found = links(plan, sampler, config.sync.transport)
    bound = lower_bound(plan, model, sampler)
    sections = [
        who,
        _what(plan),
        _links(found, request.link_gbs),
        _bound(found, bound, request.link_gbs),
    ]
    sections += (
        [_writers(plan, request.rows), _largest(plan, request.rows)] if request.rows > 0 else []
    )
    return "\n\n".join("\n".join(section) for section in sections)


def _planned(
    config: Config, hf_config: Mapping[str, Any], request: Request
) -> tuple[Model, SamplerLayout, SyncPlan]:
    model = Model.of(hf_config, Layout.from_config(config.learner))
    plan = plan_sync(model, config.quantization.format, config.quantization.ignore)
    return model, SamplerLayout(config.sampler.tensor_parallel, request.replicas), plan


def links(plan: SyncPlan, sampler: SamplerLayout, transport: Transport) -> list[Links]:
    """Every kind of link that carries bytes, with its numbers."""
    found = []
    for weights, rank in (
        ("dense weights", "a tensor-parallel"),
        ("experts", "an expert-tensor-parallel"),
    ):
        groups = [
            sent
            for (_, expert), sent in plan.gathers.items()
            if (expert is None) == (weights != "experts")
        ]
        sent = [nbytes for of_ranks in groups for nbytes in of_ranks if nbytes]
        end = max(map(sum, groups), default=0)
        meaning = f"{rank} rank -> the writer of its group"
        found.append(_kind(f"learner: gather of {weights}", sent, end, meaning))
    rings = [(len(plan.gathers[group]) + 1, nbytes) for group, nbytes in plan.maxima.items()]
    # an all-reduce around a ring passes nearly twice its bytes over each of its links
    each = [passed for size, nbytes in rings for passed in [2 * (size - 1) * nbytes // size] * size]
    around = "around a tensor-parallel group, so that shards of one row get one scale"
    found.append(_kind("learner: row maxima", each, max(each, default=0), around))
    writers = [*plan.writers.values()]
    if transport == Transport.file:
        found.append(
            _kind(
                "learner -> files",
                writers,
                max(writers),
                "a writer's tensors, once for all engines",
            )
        )
        own = plan.loaded_bytes(sampler.tp) + plan.uncut_bytes - plan.uncut_bytes // sampler.tp
        reads = "what a sampler rank loads, and scales that are too small to be cut"
        found.append(_kind("files -> sampler", [own] * sampler.world, own, reads))
    else:
        to_all = [nbytes for nbytes in writers for _ in range(sampler.world)]
        whole = "a writer's tensors -> one sampler rank, whole: vLLM's own transports cut nothing"
        found.append(_kind("learner -> sampler", to_all, plan.nbytes, whole))
    return [one for one in found if one.count]


def _kind(kind: str, each: list[int], end: int, meaning: str) -> Links:
    return Links(kind, len(each), max(each, default=0), sum(each), end, meaning)


def lower_bound(plan: SyncPlan, model: Model, sampler: SamplerLayout) -> LowerBound:
    """Every byte leaves the learner once and each sampler rank receives its shard; samplers may
    pass bytes on.
    """
    stages: dict[int, int] = {}
    for (stage, _), nbytes in plan.writers.items():
        stages[stage] = stages.get(stage, 0) + nbytes
    # the ranks of a stage share what it holds, at best evenly: experts are split evenly as it is
    layout = model.layout
    out = max(stages.values(), default=0) // (layout.tp * layout.cp * layout.dp)
    shard = plan.loaded_bytes(sampler.tp)
    return LowerBound(out, shard, shard * sampler.world)


def _what(plan: SyncPlan) -> list[str]:
    kinds: dict[str, tuple[int, int]] = {}
    for transfer in plan.transfers:
        scale = transfer.tensor.name.endswith(".weight_scale")
        if scale:
            kind = f"{transfer.tensor.dtype} scales"
        else:
            kind = transfer.tensor.dtype
        count, nbytes = kinds.get(kind, (0, 0))
        kinds[kind] = (count + 1, nbytes + transfer.tensor.nbytes)
    rows = [(kind, f"{count:,}", _size(nbytes)) for kind, (count, nbytes) in sorted(kinds.items())]
    rows.append(("together", f"{len(plan.transfers):,}", _size(plan.nbytes)))
    rows.append(("(as BF16)", "", _size(plan.plain_bytes)))
    return table(("what moves", "tensors", "bytes"), rows)


def _links(found: list[Links], link_gbs: float | None) -> list[str]:
    head = ["links of one sync", "count", "busiest link", "all links", "busiest end"]
    rows = [
        [each.kind, f"{each.count:,}", *map(_size, (each.busiest, each.total, each.end))]
        for each in found
    ]
    if link_gbs is not None:
        head.append(f"at {link_gbs:g} GB/s")
        rows = [[*row, _seconds(each.end, link_gbs)] for row, each in zip(rows, found, strict=True)]
    return [*table(head, rows), *(f"  {each.kind}: {each.meaning}" for each in found), END]


def _bound(found: list[Links], bound: LowerBound, link_gbs: float | None) -> list[str]:
    rows = [
        [
            "out of a learner rank",
            _size(bound.out),
            "each weight leaves once, all its holders share the work",
        ],
        ["into a sampler rank", _size(bound.into), "its own shard"],
        ["into all sampler ranks", _size(bound.total), "what must move at least"],
    ]
    built = max(one.end for one in found)
    tail = [
        f"  as built, the busiest end carries {built / max(bound.busiest, 1):.1f}x of the least "
        "that it could"
    ]
    if link_gbs is not None:
        tail[0] += (
            f": {_seconds(built, link_gbs)} against {_seconds(bound.busiest, link_gbs)} at "
            f"{link_gbs:g} GB/s"
        )
        assumed = Assumptions()
        sync = sum(one.end for one in found) / link_gbs
        near = assumed.loading * bound.into / MEMORY_TBS / 1e3
        tail.append(
            f"  engines stand still while they load what they have checked: {near / 1e9:.3g} s "
            f"from device memory at {MEMORY_TBS:g} TB/s, {near / (sync + near):.1%} of the sync; "
            f"{_seconds(bound.into, assumed.host_gbs)} at {assumed.host_gbs:g} GB/s from the "
            "host's, where the device has no room beside its cache"
        )
    return [*table(("lower bound", "bytes", ""), rows), *tail]


def _writers(plan: SyncPlan, shown: int) -> list[str]:
    ranked = sorted(plan.writers.items(), key=lambda item: (-item[1], item[0]))
    rows = [
        (f"stage {stage}, expert rank {expert}", _size(n)) for (stage, expert), n in ranked[:shown]
    ]
    if rest := ranked[shown:]:
        rows.append((f"{len(rest):,} more, down to", _size(rest[-1][1])))
    return table(("writer", "bytes of a version"), rows)


def _largest(plan: SyncPlan, count: int) -> list[str]:
    ranked = sorted(plan.transfers, key=lambda one: (-one.tensor.nbytes, one.tensor.name))[:count]
    pairs = [(one.tensor, one.shards) for one in ranked]
    rows = [
        (t.name, "x".join(map(str, t.shape)), t.dtype, f"{shards}", _size(t.nbytes))
        for t, shards in pairs
    ]
    return table(("largest tensors", "shape", "dtype", "shards", "bytes"), rows)


def _size(nbytes: float) -> str:
    power = next(
        (power for power in range(len(UNITS)) if nbytes < 1024 ** (power + 1)), len(UNITS) - 1
    )
    if power == 0:
        return f"{nbytes:,.0f} B"
    return f"{nbytes / 1024**power:,.1f} {UNITS[power]}"


def _seconds(nbytes: int, link_gbs: float) -> str:
    return f"{nbytes / (link_gbs * 1e9):.3g} s"
