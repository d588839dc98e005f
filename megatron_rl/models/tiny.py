"""A tiny model without weights for a task of one's own: a tokenizer with a chat template, of a
folder or made of the task's rows, and config.json of any family. `megatron-rl toy FOLDER
--tokenizer TOKENIZER` writes both.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.data import toy
from megatron_rl.data.layouts import SUFFIXES
from megatron_rl.data.rows import read_rows
from megatron_rl.data.tokenizer import FolderTokenizer, has_template
from megatron_rl.files import write_json
from megatron_rl.models.mapping import parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.weight_files import companions

ROLES = ("system", "user", "assistant")
CONTEXT = 2048
ROUND = 64  # rows of the embedding come in such steps, as in published models


def write_own(folder: Path, tokenizer: Path, like: Mapping[str, Any] | None = None) -> str:
    """Write `model/` without weights and describe it. `like`: config.json of its family."""
    model = folder / "model"
    if model.exists():
        raise ConfigError(
            f"{model}: is there already; remove it, or name another folder than {folder}"
        )
    if like:
        config = toy.shrunk(like)
    else:
        config = toy.hf_config() | {"num_hidden_layers": 4}
    try:
        ModelShape.from_hf(config)
    except ValueError as error:
        raise ConfigError(f"--like: {error}") from None
    if tokenizer.is_dir():
        _copy_tokenizer(tokenizer, model)
    elif tokenizer.is_file() and tokenizer.suffix in SUFFIXES:
        write_characters(model, read_rows("--tokenizer", tokenizer))
    else:
        raise ConfigError(
            f"--tokenizer: {str(tokenizer)!r} is neither a folder with a tokenizer.json nor a file "
            f"of rows ({', '.join(SUFFIXES)}); name one of them"
        )
    config |= _of_the_tokenizer(model) | {"max_position_embeddings": CONTEXT}
    write_json(model / "config.json", config)
    millions = parameters(ModelShape.from_hf(config)) / 1e6
    return f"{model}: {config['model_type']} of {millions:.1f} million parameters, {config['vocab_size']} tokens"


def _copy_tokenizer(source: Path, target: Path) -> None:
    """All that is no weight: also what a family's own tokenizer reads beside tokenizer.json."""
    try:
        tokenizer = FolderTokenizer(source)
        if has_template(source):
            tokenizer.text([{"role": "user", "content": "?"}])
        names = companions(source)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"--tokenizer: {str(error).removeprefix('model.path: ')}") from None
    if not has_template(source):
        raise ConfigError(
            f"--tokenizer: {source} has no chat template; save one there as chat_template.jinja, "
            "or name a file of rows: the tokenizer that is made of it has one"
        )
    target.mkdir(parents=True)
    for name in names:
        shutil.copyfile(source / name, target / name)


def _of_the_tokenizer(model: Path) -> dict[str, Any]:
    """Fields of config.json that follow from the tokenizer."""
    from tokenizers import Tokenizer

    stops = FolderTokenizer(model).stop_token_ids
    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab().values()
    return {
        "vocab_size": -(-(max(tokens) + 1) // ROUND) * ROUND,
        "bos_token_id": None,
        "eos_token_id": list(stops) if len(stops) > 1 else stops[0],
        "pad_token_id": stops[-1],
    }


def write_characters(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A tokenizer with a chat template and a token for each byte, which is a character of ASCII;
    what the rows have of other characters is merged to a token each. It is of the kind that every
    family's own class reads.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = (toy.TEXT_END, toy.TURN_START, toy.TURN_END)
    seen = {
        character for row in rows for character in json.dumps(row, ensure_ascii=False, default=str)
    }
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = dict.fromkeys([*special, *ROLES, *sorted(as_bytes.alphabet())])
    merges = dict[tuple[str, str], None]()
    for character in sorted(seen):
        ((spelled, _),) = as_bytes.pre_tokenize_str(character)
        merges |= {(spelled[:end], spelled[end]): None for end in range(1, len(spelled))}
    tokens |= dict.fromkeys(one + other for one, other in merges)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = as_bytes
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in special]
    )
    tokenizer.add_tokens([AddedToken(one, single_word=True, normalized=False) for one in ROLES])
    settings = {
        "pad_token": toy.TEXT_END,
        "eos_token": toy.TURN_END,
        "chat_template": toy.CHAT_TEMPLATE,
    }
    toy.save_tokenizer(tokenizer, folder, **settings)
