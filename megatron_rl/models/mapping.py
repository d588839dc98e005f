"""Parameters of a model by models/table.py, adapters too: Megatron and Hugging Face names, slices.

Pure integers. Megatron names are global here (`global_name`): layer and expert numbers count over
the whole model.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import prod

from megatron_rl.config.bounds import did_you_mean
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.shape import ADAPTER_KEY, ModelShape
from megatron_rl.models.table import TABLE, Row, Split
from megatron_rl.models.tensors import Shape

_WRAPPED = re.compile(r"^(?:module\.)+")  # by DDP, Float16Module
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)")
_EXPERT = re.compile(
    r"(\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|lora\.[AB])(?=\d+$))(\d+)"
)


@dataclass(frozen=True)
class Span:
    """`length` rows (or columns) of a local shard, and where they lie in the full tensor."""

    full: int
    local: int
    length: int


Spans = tuple[Span, ...]


@dataclass(frozen=True)
class HfSlice:
    """The part of one Hugging Face tensor that one rank's shard of a megatron parameter holds.

    Its spans ascend in the full tensor; none at all means that this rank holds nothing of it.
    """

    name: str
    shape: Shape  # of the full tensor
    dim: int  # along which it is split
    spans: Spans

    @property
    def length(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def local_shape(self) -> Shape:
        return (
            *self.shape[: self.dim],
            self.length,
            *self.shape[self.dim + 1 :],
        )


@dataclass(frozen=True)
class Param:
    """A megatron parameter of a model, before it is split."""

    row: Row
    layer: int | None
    expert: int | None
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]

    @property
    def sizes(self) -> dict[str, Shape]:
        """Shapes by Hugging Face's names."""
        return dict(zip(self.hf, self.shapes, strict=True))

    @property
    def megatron(self) -> str:
        return self.row.megatron[0].format(L=self.layer, E=self.expert)

    def tensor_parallel(self, layout: Layout, place: Place) -> tuple[int, int]:
        """(group size, place in it) of the group that shares this parameter."""
        if self.row.expert:
            return (layout.expert_tp, place.etp)
        return (layout.tp, place.tp)

    def local_shape(self, layout: Layout) -> Shape:
        size = layout.expert_tp if self.row.expert else layout.tp
        split = self.row.split
        first = self.shapes[0]
        if split is Split.replicated:
            return (sum(shape[0] for shape in self.shapes), *first[1:])
        if split is Split.row:
            return (first[0], _share(first[1], size, self.hf[0]))
        if split is Split.vocab:
            return (layout.padded_vocab(first[0]) // size, *first[1:])
        return (
            _share(
                sum(shape[0] for shape in self.shapes),
                size,
                self.megatron,
            ),
            *first[1:],
        )

    def slices(self, shape: ModelShape, layout: Layout, place: Place) -> tuple[HfSlice, ...]:
        """The parts of this parameter's Hugging Face tensors that the rank at `place` holds."""
        size, rank = self.tensor_parallel(layout, place)
        split = self.row.split
        if split is Split.qkv:
            query = shape.size("q")
            key = shape.size("kv")
            spans = self._as_stored(_qkv_spans(shape, size, rank), (query, key, key))
        elif split is Split.gate_up:
            width = sum(stored[0] for stored in self.shapes) // 2
            each = _share(width, size, self.hf[0])
            spans = self._as_stored(
                [(Span(rank * each, i * each, each),) for i in range(2)], (width, width)
            )
        elif split is Split.vocab:
            each = layout.padded_vocab(self.shapes[0][0]) // size
            length = min(each, self.shapes[0][0] - rank * each)
            spans = [(Span(rank * each, 0, length),) if length > 0 else ()]
        elif split is Split.replicated:
            lengths = [stored[0] for stored in self.shapes]
            spans = [
                (Span(0, at, n),)
                for at, n in zip(accumulate(lengths, initial=0), lengths, strict=False)
            ]
        else:
            each = _share(self.shapes[0][split is Split.row], size, self.hf[0])
            spans = [(Span(rank * each, 0, each),)]
        dim = int(split is Split.row)
        return tuple(
            HfSlice(n, s, dim, p) for n, s, p in zip(self.hf, self.shapes, spans, strict=True)
        )

    def kinds(self, shape: ModelShape, stored: int) -> tuple[int, ...]:
        """Lengths, along the split, of the parts stacked in Hugging Face tensor number `stored`."""
        split, whole = self.row.split, self.shapes[stored][self.row.split is Split.row]
        if split is Split.qkv and len(self.hf) == 1:
            return (shape.size("q"), shape.size("kv"), shape.size("kv"))
        if split is Split.gate_up and len(self.hf) == 1:
            return (whole // 2, whole // 2)
        return (whole,)

    def _as_stored(self, spans: list[Spans], lengths: tuple[int, ...]) -> list[Spans]:
        """Spans in each Hugging Face tensor; where one tensor holds all the kinds, they follow on
        each other in it.
        """
        if len(self.hf) == len(spans):
            return spans
        starts = accumulate(lengths, initial=0)
        return [
            tuple(
                replace(s, full=start + s.full)
                for start, kind in zip(starts, spans, strict=False)
                for s in kind
            )
        ]


def _share(total: int, size: int, name: str) -> int:
    if total % size:
        raise ValueError(f"{name}: {total} does not divide over {size} tensor-parallel ranks")
    return total // size


def _qkv_spans(shape: ModelShape, size: int, rank: int) -> list[Spans]:
    """Spans of a rank in a stack of [queries of the group, key, value], group after group.

    With more ranks than groups a share is a part of one group: it may hold queries only.
    """
    per_group = shape.heads // shape.kv_heads
    lengths = (per_group * shape.head_dim, shape.head_dim, shape.head_dim)
    share = _share(shape.kv_heads * sum(lengths), size, "fused query, key, value")
    low = rank * share
    high = (rank + 1) * share
    spans: list[list[Span]] = [[], [], []]
    for group in range(low // sum(lengths), -(-high // sum(lengths))):
        start = group * sum(lengths)
        for kind, length in enumerate(lengths):
            a = max(start, low)
            b = min(start + length, high)
            if a < b:
                spans[kind].append(Span(group * length + a - start, a - low, b - a))
            start += length
    return [tuple(kind) for kind in spans]


def params(shape: ModelShape) -> Iterator[Param]:
    """Every parameter of the model: embedding, layers in turn, final norm, output layer."""
    embedding, *rest = _params_in(None, shape)
    yield embedding
    for layer in range(shape.layers):
        yield from _params_in(layer, shape, range(shape.experts))
    yield from rest


def stored_params(shape: ModelShape) -> Iterator[Param]:
    """Every parameter but second copies, which are loaded and never stored."""
    return (param for param in params(shape) if not param.row.copy)


@cache
def parameters(shape: ModelShape) -> int:
    """Count the model's parameters."""
    return sum(prod(size) for param in stored_params(shape) for size in param.shapes)


@cache
def trained(shape: ModelShape) -> int:
    """Count the parameters that a learner trains: all, or its adapters instead."""
    if shape.lora is None:
        return parameters(shape)
    return sum(
        prod(size)
        for param in params(shape)
        for one in adapters(param, shape)
        for size in one.shapes
    )


def stage_params(shape: ModelShape, layout: Layout, place: Place) -> Iterator[Param]:
    """The parameters that the rank at `place` holds a shard of."""
    embedding, *rest = _params_in(None, shape)
    if place.pp == 0:
        yield embedding
    experts = layout.local_experts(shape.experts, place.ep)
    for layer in layout.own_layers(shape.layers, place.pp):
        yield from _params_in(layer, shape, experts)
    if place.pp == layout.pp - 1:
        # with a single stage the output layer reads the tied embedding itself
        yield from (param for param in rest if not (param.row.copy and layout.pp == 1))


def _params_in(layer: int | None, shape: ModelShape, experts: range = range(0)) -> Iterator[Param]:
    """Those of a layer; None: those outside of all layers."""
    for row in TABLE:
        if ("{L}" in row.megatron[0]) is (layer is not None) and (
            not row.needs or shape.has(row.needs, layer)
        ):
            for expert in experts if row.expert else (None,):
                yield _param(row, shape, layer, expert)


def find(name: str, shape: ModelShape) -> Param:
    """The parameter behind a global megatron name, in any of its spellings."""
    plain = _WRAPPED.sub("", name)
    if adapter := re.fullmatch(r"(.+)\.lora\.([AB])(\d*)", plain):
        of = adapters(find(f"{adapter[1]}.weight{adapter[3]}", shape), shape)
        if not of:
            raise KeyError(f"learner.lora adapts no layer of the name {adapter[1]!r}")
        return of["AB".index(adapter[2])]
    for row, pattern in _patterns():
        match = pattern.fullmatch(plain)
        if match is None:
            continue
        layer, expert = (int(v) if (v := match.groupdict().get(kind)) else None for kind in "LE")
        if row.needs and not shape.has(row.needs, layer):
            continue
        if (layer or 0) >= shape.layers or (expert or 0) >= max(shape.experts, 1):
            continue
        return _param(row, shape, layer, expert)
    known = [param.megatron for param in params(shape)]
    hint = did_you_mean(plain, known, "; the nearest known name is {}")
    raise KeyError(
        f"no row of the mapping table fits the megatron parameter {name!r} of a {shape.family} "
        f"model{hint}"
    )


def global_name(name: str, first_layer: int, first_expert: int = 0) -> str:
    """Make the stage-local layer and rank-local expert numbers of a module's name global."""

    def raised(by: int) -> Callable[[re.Match[str]], str]:
        return lambda m: f"{m[1]}{int(m[2]) + by}"

    name = _LAYER.sub(raised(first_layer), _WRAPPED.sub("", name), count=1)
    return _EXPERT.sub(raised(first_expert), name, count=1)


def adapters(param: Param, shape: ModelShape) -> tuple[Param, ...]:
    """A and B of a weight, stored for each of its Hugging Face tensors; empty if there are none.

    B's rows are split as the weight's, A's columns too. A holds those of the targets alone, one
    after the other.
    """
    lora = shape.lora
    row = param.row
    if (
        lora is None
        or param.layer is None
        or row.split is Split.replicated
        or len(param.shapes[0]) == 1
    ):
        return ()
    read = {hf: size for hf, size in param.sizes.items() if lora.adapts(hf)}
    if not read:
        return ()
    whole = Split.replicated
    of_a, of_b = (Split.row, whole) if row.split is Split.row else (whole, row.split)
    a = [(lora.rank, inputs) for _, inputs in read.values()]
    b = [(outputs, lora.rank) for outputs, _ in param.shapes]
    return _adapter(param, "A", of_a, tuple(read), a), _adapter(param, "B", of_b, param.hf, b)


def _adapter(
    param: Param, letter: str, split: Split, hf: tuple[str, ...], shapes: list[tuple[int, int]]
) -> Param:
    spellings = tuple(
        re.sub(r"\.weight", f"{ADAPTER_KEY}{letter}", spelling) for spelling in param.row.megatron
    )
    names = tuple(f"{name.removesuffix('weight')}lora_{letter}.weight" for name in hf)
    return Param(
        Row(spellings, param.row.hf, (), split), param.layer, param.expert, names, tuple(shapes)
    )


def adapted_rows(param: Param, shape: ModelShape, layout: Layout, place: Place) -> list[Spans]:
    """The rows of a rank's shard that belong to each of its weight's targets, in the order of A."""
    assert shape.lora is not None
    if param.row.split is Split.row:
        return [(Span(0, 0, param.shapes[0][0]),)]
    return [
        piece.spans for piece in param.slices(shape, layout, place) if shape.lora.adapts(piece.name)
    ]


def _param(row: Row, shape: ModelShape, layer: int | None, expert: int | None) -> Param:
    return Param(
        row=row,
        layer=layer,
        expert=expert,
        hf=tuple(name.format(L=layer, E=expert) for name in row.hf),
        shapes=tuple(tuple(shape.size(dim) for dim in dims) for dims in row.dims),
    )


@cache
def _patterns() -> list[tuple[Row, re.Pattern[str]]]:
    def pattern(spelling: str) -> re.Pattern[str]:
        text = re.escape(spelling).replace(r"\{L\}", r"(?P<L>\d+)")
        return re.compile(text.replace(r"\{E\}", r"(?P<E>\d+)"))

    return [(row, pattern(spelling)) for row in TABLE for spelling in row.megatron]
