"""What a folder of weights is: its kind, model, precision, who has quantized it, and what can be done with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.torch_dist import index as torch_dist_index
from megatron_rl.checkpoint.torch_dist.index import read_index
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import KEPT
from megatron_rl.files import read_json
from megatron_rl.models import weight_files
from megatron_rl.models.mapping import parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import DTYPES
from megatron_rl.models.weight_files import PARITY
from megatron_rl.workshop.conversion.outcome import mapping_version
from megatron_rl.workshop.conversion.progress import Progress
from megatron_rl.workshop.conversion.sources import Source, find
from megatron_rl.workshop.conversion.weights import Weights, content_digest, digest
from megatron_rl.workshop.conversion.work import JOURNAL

_TOOL = "python tools/convert.py"


@dataclass(frozen=True)
class Inspection:
    rows: list[tuple[str, str]]
    problems: list[str]
    next: str  # a command


def inspect(given: str, hf: Path | None = None, checksum: bool = False) -> Inspection:
    """ConfigError and ValueError where it holds no weights that are read."""
    path = Path(given)
    if (path / JOURNAL).is_file():
        raise ConfigError(f"{path} is unfinished: the command that began it goes on with it when it is given again")
    source = find(given, hf)
    weights, quantization = source.weights, source.quantization
    rows = [("kind", kind(source)), ("weights", str(source.path))]
    if source.folder != source.path:
        rows.append(("config.json", str(source.folder)))
    shape, why = _shape(source.hf_config)
    rows += list(_model(shape, source.hf_config)) if shape else [("model", why)]
    rows += [
        ("precision", precision(weights)),
        ("quantization", "none" if quantization is None else describe(quantization, source.folder)),
        ("size", f"{weights.nbytes / 1e9:.3g} GB in {len(weights.specs)} tensors"),
    ]
    if shape and not source.is_folder:
        rows.append(("vocabulary stored", _stored_vocabulary(source, shape)))
    rows.append(("checksum", _checksum(source, weights, checksum)))
    problems = list(_misfits(source, shape)) if shape and quantization is None else []
    return Inspection(rows, problems, _next(given, source, shape))


def kind(source: Source) -> str:
    if source.is_folder:
        return "Hugging Face folder" + (" of a run" if source.run else "")
    if source.path.name == checkpoints.POLICY and source.run:
        found = checkpoints.read(source.path.parent)
        layout = " ".join(f"{name}={size}" for name, size in found.layout.items() if size and size != 1)
        return f"checkpoint of step {found.step} of the run {source.run.name}, saved under {layout or 'one rank'}"
    imported = (source.path / KEPT).is_dir()
    return "torch_dist checkpoint, " + ("an import: any layout loads it" if imported else "of megatron-core")


def precision(weights: Weights) -> str:
    """Share of the bytes by dtype, the largest first."""
    held: dict[str, int] = {}
    for spec in weights.specs.values():
        held[spec.dtype] = held.get(spec.dtype, 0) + spec.nbytes
    total = max(sum(held.values()), 1)
    ranked = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{DTYPES[dtype][0]} {nbytes / total:.1%}" for dtype, nbytes in ranked)


def describe(config: Mapping[str, Any], folder: Path) -> str:
    """How, and by whom, as far as config.json says."""
    method = str(config.get("quant_method", "unknown"))
    if method == "compressed-tensors":
        makers = {PARITY: "this project", "recipe.yaml": "llm-compressor"}
        by = next((maker for file, maker in makers.items() if (folder / file).is_file()), "an unknown tool")
        groups = config.get("config_groups")
        layers = list(groups.values()) if isinstance(groups, Mapping) else []
        weights = (layers[0].get("weights") or {}) if layers else {}
        how = f"{weights.get('type', '?')}{weights.get('num_bits', '')} per {weights.get('strategy', '?')}"
        return f"{config.get('format', 'compressed-tensors')}: {how}, by {by}"
    if method == "fp8":
        block = config.get("weight_block_size")
        return f"fp8 in blocks of {block[0]}x{block[1]}, as DeepSeek's" if block else "fp8 per tensor"
    if method.startswith("modelopt"):
        return f"{config.get('quant_algo', method)}, by modelopt"
    return method


def _shape(hf_config: Mapping[str, Any]) -> tuple[ModelShape | None, str]:
    try:
        return ModelShape.from_hf(hf_config), ""
    except ValueError as error:
        return None, str(error)


def _model(shape: ModelShape, hf_config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "family", f"{shape.family}, {parameters(shape) / 1e9:.3g} billion parameters"
    heads = f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} for keys and values"
    yield "sizes", f"{shape.layers} layers, hidden {shape.hidden}, {heads}, intermediate {shape.ffn}"
    if shape.experts:
        yield "experts", f"{shape.experts} in each layer, of width {shape.expert_ffn}"
    yield "vocabulary", f"{shape.vocab}, embeddings {'tied' if shape.tied else 'not tied'}"


def _stored_vocabulary(source: Source, shape: ModelShape) -> str:
    tensors = read_index(source.path)
    name = f"{torch_dist_index.prefix(tensors)}embedding.word_embeddings.weight"
    rows = tensors[name].size[0] if name in tensors else shape.vocab
    return f"{rows} rows" + (f", {rows - shape.vocab} of them padding" if rows > shape.vocab else ", no padding")


def _checksum(source: Source, weights: Weights, wanted: bool) -> str:
    if wanted:
        digests = {}
        with Progress("read", weights.nbytes) as progress:
            for name, tensor in weights.each():
                digests[name] = digest(tensor)
                progress.add(tensor.nbytes)
        return content_digest(digests)
    if not (source.path / PARITY).is_file():
        return "not read (--checksum)"
    said = read_json(source.path / PARITY)
    output = said.get("output")
    other = "" if said.get("mapping") == mapping_version() else ", with another version of the mapping table"
    return f"{output.get('content') if isinstance(output, dict) else '?'} when it was written{other} (--checksum reads)"


def _misfits(source: Source, shape: ModelShape) -> Iterator[str]:
    room = weight_files if source.is_folder else torch_dist_index
    return room.misfits(source.path, shape)


def _next(given: str, source: Source, shape: ModelShape | None) -> str:
    if source.quantization is not None:
        return f"{_TOOL} dequantize {given} PLAIN_FOLDER"
    if not source.is_folder:
        return f"{_TOOL} export {given} HF_FOLDER"
    return f"{_TOOL} import {given} CHECKPOINT" if shape else f"{_TOOL} verify {given} OTHER_FOLDER"
