"""Whether the parts of a model's folder belong together: config.json, weights, tokenizer. Headers only; torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.checkpoint.torch_dist import index as torch_dist_index
from megatron_rl.config.schema import LogSection, ModelInit, ModelSection
from megatron_rl.files import read_json
from megatron_rl.models import weight_files
from megatron_rl.models.shape import ModelShape

LARGEST_TOKENIZER = 256 << 20


class _Token(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]  # Unigram: pieces in the order of their ids


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Token] = []


def weights(model: ModelSection, shape: ModelShape) -> Iterator[str]:
    folder = Path(model.path)
    if model.init == ModelInit.pretrained and list(folder.glob("*.safetensors")):
        yield from (f"model.path: {each}" for each in weight_files.misfits(folder, shape))
    elif model.init == ModelInit.pretrained and weight_files.is_checkpoint(folder):
        yield from (f"model.path: {each}" for each in torch_dist_index.misfits(folder, shape))


def vocabulary(model: ModelSection, shape: ModelShape) -> Iterator[str]:
    """Tokens that the embedding has no row for."""
    file = model.folder / "tokenizer.json"
    if not file.is_file():  # said where the data is read
        return
    try:
        if file.stat().st_size > LARGEST_TOKENIZER:
            raise ValueError(f"it has more than {LARGEST_TOKENIZER} bytes")
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    except (OSError, ValueError, RecursionError) as error:
        yield f"model.path: {file} is not a readable tokenizer ({error})"
        return
    vocab = tokenizer.model.vocab
    ids = {str(piece): number for number, piece in enumerate(vocab)} if isinstance(vocab, list) else vocab
    ids = ids | {token.content: token.id for token in tokenizer.added_tokens}
    beyond = {name: number for name, number in ids.items() if not 0 <= number < shape.vocab}
    if beyond:
        name, number = min(beyond.items(), key=lambda item: item[1])
        more = f" and {len(beyond) - 1} more tokens" if len(beyond) > 1 else ""
        yield (
            f"model.path: vocab_size of config.json is {shape.vocab}, but {file} has {name!r} (id {number}){more} "
            "beyond it; name the tokenizer of this model, or a model with rows for them"
        )


def end_of_text(model: ModelSection, shape: ModelShape, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Ids that end an answer. An answer that never ends costs rollout.max_response_tokens each time."""
    found = {"config.json": hf_config}
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (model.folder / name).is_file():
            try:
                found[name] = read_json(model.folder / name)
            except ValueError as error:
                yield f"model.path: {error}"
    for name, content in found.items():
        given = content.get("eos_token_id") if name != "tokenizer_config.json" else None
        ids = given if isinstance(given, list) else [] if given is None else [given]
        wrong = [number for number in ids if not (type(number) is int and 0 <= number < shape.vocab)]
        if wrong or given == []:
            yield (
                f"model.path: eos_token_id of {model.folder / name} is {given!r}, expected ids from 0 to "
                f"{shape.vocab - 1}; take it from the model's authors"
            )


def exported(model: ModelSection, log: LogSection) -> Iterator[str]:
    """What an export at the end of the run would copy."""
    if log.export and model.folder.is_dir():
        try:
            weight_files.companions(model.folder)
        except ValueError as error:
            yield f"log.export: {error}"


RULES = (weights, vocabulary, end_of_text, exported)
