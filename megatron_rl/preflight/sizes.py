"""Parallel sizes of learner and engine over which their model does not divide. Torch-free."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from megatron_rl.config.fleet import distinct_formats
from megatron_rl.config.schema import Format, QuantizationSection, SamplerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Split
from megatron_rl.quantization.formats import BLOCK, is_quantized

LARGEST = 4096  # where the search for a valid parallel size ends
# on a size, and the complaint about one that does not meet it
Condition = tuple[Callable[[int], bool], str]


def problems(
    model: Model, sampler_tp: int, format: Format, ignore: Sequence[str] = ()
) -> list[str]:
    """Every reason why these sizes do not go together; empty when they do."""
    shape = model.shape
    layout = model.layout
    blocks = [*_block_shares(shape, format, ignore, expert=False)]
    expert_blocks = [*_block_shares(shape, format, ignore, expert=True)]
    heads: list[Condition] = [
        _divides(shape.heads, f"{shape.heads} attention heads"),
        (
            lambda tp: shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0,
            f"neither divides {shape.kv_heads} key-value heads nor is a multiple of them",
        ),
    ]
    widths: list[int] = []
    conditions = list(heads)
    if any(shape.has("dense_mlp", layer) for layer in range(shape.layers)):
        widths.append(shape.ffn)
        conditions.append(_divides(shape.ffn, f"the intermediate size {shape.ffn}"))
    conditions += _whole_blocks(blocks, layout.tp)
    found = _report("learner.tensor_parallel", layout.tp, shape.heads, conditions)
    if shape.experts:
        widths.append(shape.expert_ffn)
        width = _divides(shape.expert_ffn, f"the experts' width {shape.expert_ffn}")
        key = "learner.tensor_parallel"
        if layout.etp is not None:
            key = "learner.megatron.expert_tensor_parallel_size"
        conditions = [width, *_whole_blocks(expert_blocks, layout.expert_tp)]
        found += _report(key, layout.expert_tp, shape.expert_ffn, conditions)
    sizes = [_divides(width, f"the intermediate size {width}") for width in sorted(set(widths))]
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
    advice = "no value is valid with the other settings"
    if values:
        advice = f"nearest valid: {values}"
    return [f"{key}={value} {complaint} ({advice})" for complaint in wrong]


def _divides(total: int, what: str) -> Condition:
    return lambda shares: total % shares == 0, f"does not divide {what}"


def _whole_blocks(
    blocks: Iterable[tuple[str, int]], value: int, most: Mapping[str, int] = {}
) -> Iterator[Condition]:
    """Conditions that shares of these weights hold whole blocks of scales."""
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
    for param in params(shape):
        if param.expert or param.row.expert is not expert or param.row.split is Split.replicated:
            continue
        for name, size in param.sizes.items():
            if is_quantized(name, format, ignore):
                found[name.rsplit(".", 2)[-2]] = size[param.row.split is Split.row]
    yield from found.items()


def _pipeline(shape: ModelShape, layout: Layout) -> list[str]:
    """Layers that do not divide over stages, or over the chunks of a stage."""
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
