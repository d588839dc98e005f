"""Bytes of a weight sync by writer and gathering group, for the planner; and, for preflight,
parallel sizes of learner and engine over which their model does not divide. Reckoned from shapes
and layouts; no sync reads it. Torch-free.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain

from megatron_rl.config.fleet import distinct_formats
from megatron_rl.config.schema import Format, QuantizationSection, SamplerSection
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import Param, params
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Row, Split
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.quantization.formats import BLOCK, is_quantized, outputs, scale_name
from megatron_rl.weight_sync.engine_shards import SMALL

LARGEST = 4096  # where the search for a valid parallel size ends
PLAIN = "bfloat16"  # what is not quantized
# on a size, and what is said of one that does not meet it
Condition = tuple[Callable[[int], bool], str]


@dataclass(frozen=True)
class Transfer:
    """One Hugging Face tensor on its way: who writes it, out of how many shards."""

    tensor: TensorSpec
    stage: int  # pipeline stage
    expert_rank: int | None  # expert-parallel rank of the writer; None: a dense parameter
    shards: int  # ranks it is gathered from


# a tensor-parallel group that gathers: (stage, expert-parallel rank; None: the dense weights'
# group)
GroupKey = tuple[int, int | None]


@dataclass(frozen=True)
class SyncPlan:
    transfers: tuple[Transfer, ...]
    # (stage, expert rank) -> bytes it writes
    writers: dict[tuple[int, int], int] = field(default_factory=dict)
    # what every rank of a group but the first sends to the first
    gathers: dict[GroupKey, tuple[int, ...]] = field(default_factory=dict)
    # bytes of row maxima that a group agrees on
    maxima: dict[GroupKey, int] = field(default_factory=dict)
    plain_bytes: int = 0  # the same weights in BF16
    # bytes by how a tensor-parallel sampler holds them: whole, split over its ranks, split over
    # key-value heads
    whole_bytes: int = 0
    split_bytes: int = 0
    key_value_bytes: int = 0
    # of the latter two, what the file transport leaves whole because it is small
    uncut_bytes: int = 0
    kv_heads: int = 1

    @property
    def nbytes(self) -> int:
        return self.whole_bytes + self.split_bytes + self.key_value_bytes

    def loaded_bytes(self, sampler_tp: int) -> int:
        """What one of so many tensor-parallel ranks of an engine loads."""
        heads = min(sampler_tp, self.kv_heads)
        return self.whole_bytes + self.split_bytes // sampler_tp + self.key_value_bytes // heads

    @property
    def gathered(self) -> int:
        """Bytes that cross a link inside a tensor-parallel group."""
        return sum(sum(sent) for sent in self.gathers.values())


@dataclass(frozen=True)
class _Kind:
    """One output of one kind of weight: the same for every layer and expert, so worked out once."""

    tensor: TensorSpec  # of the first of its kind
    split: bool  # whether the ranks of a group hold different parts of it
    sent: tuple[int, ...]  # by every rank of the group but the first


def plan_sync(model: Model, format: Format, ignore: Sequence[str] = ()) -> SyncPlan:
    shape = model.shape
    layout = model.layout
    stage_of = {
        layer: pp for pp in range(layout.pp) for layer in layout.own_layers(shape.layers, pp)
    }
    per_rank = max(shape.experts // layout.ep, 1)
    kinds: dict[tuple[Row, tuple[bool, ...]], list[list[_Kind]]] = {}
    transfers: list[Transfer] = []
    writers: dict[tuple[int, int], int] = {}
    sent: dict[GroupKey, list[int]] = {}
    maxima: dict[GroupKey, int] = {}
    plain = uncut = 0
    held = dict.fromkeys(("whole", "split", "key_value"), 0)
    # the key-value heads' part
    joined = Fraction(2 * shape.kv_heads, shape.heads + 2 * shape.kv_heads)
    of_heads = {"k_proj": Fraction(1), "v_proj": Fraction(1), "qkv_proj": joined}
    for param in params(shape):
        if param.row.copy:
            continue
        if param.layer is not None:
            stage = stage_of[param.layer]
        elif param.row.megatron[0].startswith("embedding."):
            stage = 0
        else:
            stage = layout.pp - 1
        if param.expert is None:
            expert_rank = None
        else:
            expert_rank = param.expert // per_rank
        quantized = tuple(is_quantized(name, format, ignore) for name in param.hf)
        key = (param.row, quantized)
        if key not in kinds:
            kinds[key] = _kinds(param, model, format, ignore)
        group = (stage, expert_rank)
        writer = (stage, expert_rank or 0)
        size = layout.expert_tp if param.row.expert else layout.tp
        from_ranks = sent.setdefault(group, [0] * (size - 1))
        for name, made in zip(param.hf, kinds[key], strict=True):
            for out_name, kind in zip((name, scale_name(name)), made, strict=False):
                tensor = TensorSpec(out_name, kind.tensor.dtype, kind.tensor.shape)
                transfers.append(
                    Transfer(tensor, stage, expert_rank, shards=size if kind.split else 1)
                )
                writers[writer] = writers.get(writer, 0) + tensor.nbytes
                if kind.split:
                    key_value = int(tensor.nbytes * of_heads.get(name.rsplit(".", 2)[-2], 0))
                else:
                    key_value = 0
                held["key_value"] += key_value
                held["split" if kind.split else "whole"] += tensor.nbytes - key_value
                uncut += tensor.nbytes * (kind.split and tensor.nbytes < SMALL)
                for rank, nbytes in enumerate(kind.sent):
                    from_ranks[rank] += nbytes
            if size > 1 and len(made) == 2 and param.row.split is Split.row and not made[1].split:
                maxima[group] = maxima.get(group, 0) + made[1].tensor.nbytes
        plain += sum(TensorSpec(name, PLAIN, s).nbytes for name, s in param.sizes.items())
    gathers = {group: tuple(of_ranks) for group, of_ranks in sent.items() if of_ranks}
    kept = (held["whole"], held["split"], held["key_value"])
    return SyncPlan(tuple(transfers), writers, gathers, maxima, plain, *kept, uncut, shape.kv_heads)


def _kinds(param: Param, model: Model, format: Format, ignore: Sequence[str]) -> list[list[_Kind]]:
    """The outputs of each Hugging Face tensor behind a parameter."""
    shape = model.shape
    layout = model.layout
    size = layout.expert_tp if param.row.expert else layout.tp
    split = param.row.split is not Split.replicated
    of_ranks = [
        [
            outputs(piece, format, ignore, PLAIN, split)
            for piece in param.slices(shape, layout, Place(tp=r, etp=r))
        ]
        for r in range(size)
    ]
    return [
        [
            _Kind(
                first.tensor,
                first.dim is not None,
                tuple(out.part.nbytes * (out.dim is not None) for out in rest),
            )
            for first, *rest in zip(*pieces, strict=True)
        ]
        for pieces in zip(*of_ranks, strict=True)
    ]


def problems(
    model: Model, sampler_tp: int, format: Format, ignore: Sequence[str] = ()
) -> list[str]:
    """Every reason why these sizes do not go together; empty when they do."""
    shape = model.shape
    layout = model.layout
    tp = "learner.tensor_parallel"
    expert_tp = "learner.megatron.expert_tensor_parallel_size"
    blocks = [*_block_shares(shape, format, ignore, expert=False)]
    if shape.experts:
        expert_blocks = [*_block_shares(shape, format, ignore, expert=True)]
    else:
        expert_blocks = []
    dense = any(shape.has("dense_mlp", layer) for layer in range(shape.layers))
    widths = ({shape.ffn} if dense else set()) | ({shape.expert_ffn} if shape.experts else set())
    heads: list[Condition] = [
        _divides(shape.heads, f"{shape.heads} attention heads"),
        (
            lambda tp: shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0,
            f"neither divides {shape.kv_heads} key-value heads nor is a multiple of them",
        ),
    ]
    if dense:
        width = [_divides(shape.ffn, f"the intermediate size {shape.ffn}")]
    else:
        width = []
    found = _report(tp, layout.tp, shape.heads, [*heads, *width, *_whole_blocks(blocks, layout.tp)])
    if shape.experts:
        expert_width = [_divides(shape.expert_ffn, f"the experts' width {shape.expert_ffn}")]
    else:
        expert_width = []
    conditions = [*expert_width, *_whole_blocks(expert_blocks, layout.expert_tp)]
    key = tp if layout.etp is None else expert_tp
    found += _report(key, layout.expert_tp, max(shape.expert_ffn, 1), conditions)
    sizes = [_divides(width, f"the intermediate size {width}") for width in sorted(widths)]
    # heads beyond the number of key-value heads hold copies of them
    copied = dict.fromkeys(("k_proj", "v_proj"), shape.kv_heads)
    conditions = [*heads, *sizes, *_whole_blocks([*blocks, *expert_blocks], sampler_tp, copied)]
    found += _report("sampler.tensor_parallel", sampler_tp, shape.heads, conditions)
    if shape.experts:
        divides = _divides(shape.experts, f"{shape.experts} experts")
        found += _report("learner.expert_parallel", layout.ep, shape.experts, [divides])
    elif layout.ep > 1:
        found.append(
            f"learner.expert_parallel={layout.ep}: a {shape.family} model has no experts; take 1"
        )
    if layout.tp * layout.cp * layout.dp % (layout.expert_tp * layout.ep):
        found.append(
            f"learner.expert_parallel={layout.ep} x expert tensor parallel {layout.expert_tp} does "
            f"not divide the {layout.tp * layout.cp * layout.dp} ranks of a pipeline stage: raise "
            "learner.data_parallel, or set learner.megatron.expert_tensor_parallel_size"
        )
    return found + _pipeline(shape, layout)


def size_problems(
    policy: Model, sampler: SamplerSection, quantization: QuantizationSection
) -> list[str]:
    """`problems` of a run's sections."""
    formats = distinct_formats(sampler, quantization)
    found = [
        problems(policy, sampler.tensor_parallel, format, quantization.ignore) for format in formats
    ]
    return list(dict.fromkeys(chain(*found)))  # formats share most of their problems


def _report(key: str, value: int, largest: int, conditions: Sequence[Condition]) -> list[str]:
    """Conditions on one key that do not hold, and the nearest values that would do."""
    wrong = [complaint for holds, complaint in conditions if not holds(value)]
    if not wrong:
        return []
    good = [each for each in range(1, largest + 1) if all(holds(each) for holds, _ in conditions)]
    near = (
        max((each for each in good if each < value), default=0),
        next((each for each in good if each > value), 0),
    )
    values = " or ".join(map(str, filter(None, near)))
    if values:
        advice = f"nearest valid: {values}"
    else:
        advice = "no value is valid with the other settings"
    return [f"{key}={value} {complaint} ({advice})" for complaint in wrong]


def _divides(total: int, what: str) -> Condition:
    return lambda shares: total % shares == 0, f"does not divide {what}"


def _whole_blocks(
    blocks: Iterable[tuple[str, int]], value: int, most: Mapping[str, int] = {}
) -> Iterator[Condition]:
    for name, total in blocks:
        problem = f"cuts 128x128 blocks of {name}: {total} / {value} is not a multiple of {BLOCK}"
        yield partial(_is_whole, total, most.get(name, LARGEST)), problem


def _is_whole(total: int, most: int, shares: int) -> bool:
    shares = min(shares, most)
    return shares == 1 or (total % shares == 0 and (total // shares) % BLOCK == 0)


def _block_shares(
    shape: ModelShape, format: Format, ignore: Sequence[str], expert: bool
) -> Iterator[tuple[str, int]]:
    """(module, length along its split) of every kind of weight that is cut into 128-blocks and
    shards.
    """
    if format != Format.fp8_block:
        return
    found: dict[str, int] = {}
    kinds = ("dense_mlp", "moe")
    layers = [
        next((layer for layer in range(shape.layers) if shape.has(kind, layer)), None)
        for kind in kinds
    ]
    for param in params(shape):
        if param.layer not in {*layers} - {None} or param.expert or param.row.expert is not expert:
            continue
        for name, size in param.sizes.items() if param.row.split is not Split.replicated else ():
            if is_quantized(name, format, ignore):
                found[name.rsplit(".", 2)[-2]] = size[param.row.split is Split.row]
    yield from found.items()


def _pipeline(shape: ModelShape, layout: Layout) -> list[str]:
    try:
        layout.stage_layers(shape.layers)
        return []
    except ValueError as error:
        if layout.first_layers is not None or layout.last_layers is not None:
            return [f"learner.megatron.num_layers_in_first/last_pipeline_stage: {error}"]
    if shape.layers % layout.pp:
        divides = _divides(shape.layers, f"{shape.layers} layers")
        return _report("learner.pipeline_parallel", layout.pp, shape.layers, [divides])
    each = shape.layers // layout.pp
    divides = _divides(each, f"the {each} layers of a pipeline stage")
    return _report(
        "learner.megatron.virtual_pipeline_model_parallel_size",
        layout.chunks,
        shape.layers,
        [divides],
    )
