"""`tools/convert.py inspect`: kind, model and precision of stored weights, and the next command."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from megatron_rl.apps.conversion.sources import Source, find
from megatron_rl.apps.evaluation.adapters import is_peft
from megatron_rl.checkpoint import checkpoints
from megatron_rl.models.mapping import parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import DTYPES

Rows = list[tuple[str, str]]


class Inspection(NamedTuple):
    rows: Rows
    problems: list[str]
    next: str  # a command


def inspect(given: str, hf: Path | None = None) -> Inspection:
    """ConfigError and ValueError where it holds no weights that are read."""
    source = find(given, hf)
    weights = source.weights
    rows = [("kind", _kind(source)), ("weights", str(source.path))]
    if source.folder != source.path:
        rows.append(("config.json", str(source.folder)))
    problems = []
    step = f"import {given} CHECKPOINT"
    if not source.is_folder:
        step = f"export {given} HF_FOLDER"
    try:
        rows += _model(source.shape)
        if source.quantization is None:
            problems = source.weight_errors
    except ValueError as error:
        rows.append(("model", str(error)))
        step = f"verify {given} OTHER_FOLDER"
    if source.quantization is not None:
        step = f"dequantize {given} PLAIN_FOLDER"
    sizes = Counter[str]()
    for spec in weights.specs.values():
        sizes[DTYPES[spec.dtype][0]] += spec.nbytes
    shares = [f"{dtype} {size / max(weights.nbytes, 1):.1%}" for dtype, size in sizes.most_common()]
    rows += [
        ("precision", ", ".join(shares)),
        ("quantization", _quantization(source)),
        ("size", f"{weights.nbytes / 1e9:.3g} GB in {len(weights.specs)} tensors"),
    ]
    return Inspection(rows, problems, f"python tools/convert.py {step}")


def _kind(source: Source) -> str:
    if source.is_folder:
        return "Hugging Face folder" + (" of a run" if source.run else "")
    if is_peft(source.path):
        return f"PEFT's adapters, of the model {source.folder}"
    if source.path.name == checkpoints.POLICY and source.run:
        found = checkpoints.read(source.path.parent)
        sizes = found.layout.items()
        layout = " ".join(f"{name}={size}" for name, size in sizes if size and size != 1)
        step = f"checkpoint of step {found.step} of the run {source.run.name}"
        return f"{step}, saved under {layout or 'one rank'}"
    return "torch_dist checkpoint"


def _model(shape: ModelShape) -> Rows:
    sizes = (
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads of {shape.head_dim}, "
        f"{shape.kv_heads} for keys and values, intermediate {shape.ffn}"
    )
    if shape.experts:
        sizes += f", {shape.experts} experts of width {shape.expert_ffn}"
    vocabulary = f"{shape.vocab}, embeddings {'tied' if shape.tied else 'not tied'}"
    return [
        ("family", f"{shape.family}, {parameters(shape) / 1e9:.3g} billion parameters"),
        ("sizes", sizes),
        ("vocabulary", vocabulary),
    ]


def _quantization(source: Source) -> str:
    config = source.quantization
    if config is None:
        return "none"
    method = str(config.get("quant_method", "unknown"))
    form = config.get("format") or config.get("quant_algo") or config.get("weight_block_size")
    return f"{method} ({form})" if form else method
