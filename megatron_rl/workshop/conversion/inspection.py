"""`tools/convert.py inspect`: kind, model, precision, quantization of stored weights, misfits, and
the next command.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.torch_dist.index import prefix, read_index
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import KEPT
from megatron_rl.files import read_json
from megatron_rl.models.mapping import parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import DTYPES
from megatron_rl.models.weight_files import PARITY
from megatron_rl.workshop.conversion.sources import Source, content_digest, digest, find
from megatron_rl.workshop.conversion.work import LOCK
from megatron_rl.workshop.evaluation.adapters import is_peft

Rows = list[tuple[str, str]]


class Inspection(NamedTuple):
    rows: Rows
    problems: list[str]
    next: str  # a command


def inspect(given: str, hf: Path | None = None, checksum: bool = False) -> Inspection:
    """ConfigError and ValueError where it holds no weights that are read."""
    if (Path(given) / LOCK).is_file():
        raise ConfigError(f"{given} is incomplete; give the command that began it again")
    source = find(given, hf)
    weights = source.weights
    quantized = source.quantization is not None
    rows = [("kind", _kind(source)), ("weights", str(source.path))]
    if source.folder != source.path:
        rows.append(("config.json", str(source.folder)))
    known = True
    try:
        rows += _model(source, source.shape)
    except ValueError as error:
        known = False
        rows.append(("model", str(error)))
    sizes = Counter[str]()
    for spec in weights.specs.values():
        sizes[DTYPES[spec.dtype][0]] += spec.nbytes
    shares = (
        f"{dtype} {nbytes / max(weights.nbytes, 1):.1%}" for dtype, nbytes in sizes.most_common()
    )
    rows += [
        ("precision", ", ".join(shares)),
        ("quantization", _quantization(source)),
        ("size", f"{weights.nbytes / 1e9:.3g} GB in {len(weights.specs)} tensors"),
        ("checksum", _checksum(source, checksum)),
    ]
    if known:
        step = f"import {given} CHECKPOINT"
    else:
        step = f"verify {given} OTHER_FOLDER"
    if quantized:
        step = f"dequantize {given} PLAIN_FOLDER"
    elif not source.is_folder:
        step = f"export {given} HF_FOLDER"
    return Inspection(
        rows, source.misfits if known and not quantized else [], f"python tools/convert.py {step}"
    )


def _kind(source: Source) -> str:
    if source.is_folder:
        return "Hugging Face folder" + (" of a run" if source.run else "")
    if is_peft(source.path):
        return f"PEFT's adapters, of the model {source.folder}"
    if source.path.name == checkpoints.POLICY and source.run:
        found = checkpoints.read(source.path.parent)
        layout = " ".join(
            f"{name}={size}" for name, size in found.layout.items() if size and size != 1
        )
        return f"checkpoint of step {found.step} of the run {source.run.name}, saved under {layout or 'one rank'}"
    imported = (source.path / KEPT).is_dir()
    return "torch_dist checkpoint, " + (
        "an import: any layout loads it" if imported else "of megatron-core"
    )


def _model(source: Source, shape: ModelShape) -> Rows:
    heads = f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} for keys and values"
    if shape.experts:
        experts = f", {shape.experts} experts of width {shape.expert_ffn}"
    else:
        experts = ""
    vocabulary = f"{shape.vocab}, embeddings {'tied' if shape.tied else 'not tied'}"
    if not source.is_folder and source.adapters is None:
        tensors = read_index(source.path)
        name = f"{prefix(tensors)}embedding.word_embeddings.weight"
        vocabulary += (
            f", stored in {tensors[name].size[0] if name in tensors else shape.vocab} rows"
        )
    return [
        ("family", f"{shape.family}, {parameters(shape) / 1e9:.3g} billion parameters"),
        (
            "sizes",
            f"{shape.layers} layers, hidden {shape.hidden}, {heads}, intermediate "
            f"{shape.ffn}{experts}",
        ),
        ("vocabulary", vocabulary),
    ]


def _quantization(source: Source) -> str:
    """Form and maker, as far as config.json says."""
    if (config := source.quantization) is None:
        return "none"
    method = str(config.get("quant_method", "unknown"))
    if method == "compressed-tensors":
        makers = {PARITY: "this project", "recipe.yaml": "llm-compressor"}
        by = next(
            (maker for file, maker in makers.items() if (source.folder / file).is_file()),
            "an unknown tool",
        )
        return f"{config.get('format', method)}, by {by}"
    if method == "fp8":
        block = str(config.get("weight_block_size") or "").strip("[]").replace(", ", "x")
        if block:
            return f"fp8 in blocks of {block}, as DeepSeek's"
        return "fp8 per tensor"
    if method.startswith("modelopt"):
        return f"{config.get('quant_algo', method)}, by modelopt"
    return method


def _checksum(source: Source, wanted: bool) -> str:
    if wanted:
        get = source.weights.open()
        return content_digest({name: digest(get(name)) for name in source.weights.specs})
    if not (source.path / PARITY).is_file():
        return "not read (--checksum)"
    output = read_json(source.path / PARITY).get("output")
    return f"{output.get('content') if isinstance(output, dict) else '?'} when it was written (--checksum reads)"
