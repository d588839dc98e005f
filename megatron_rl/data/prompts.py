"""Data set rows to prompts, in a resumable order.

Rows come from .jsonl or .parquet. A prompt is text, encoded as it stands, or a list of chat messages,
rendered with the tokenizer's chat template. The order of an epoch is a permutation drawn from
(seed, epoch): the position alone says what comes next.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import (
    DataSection,
    LongPrompts,
    ModelSection,
    RewardSection,
    RolloutSection,
    RolloutSource,
)
from megatron_rl.types import Prompt


class Tokenizer(Protocol):
    stop_token_ids: tuple[int, ...]

    def encode(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]: ...

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]: ...


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder. Transformers is imported only for chat templates."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model.path: {folder} holds no tokenizer.json; save one there with the model")
        self._folder = folder
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"model.path: {path} is not a readable tokenizer ({error})") from None
        self._chat: Any = None
        self.stop_token_ids = _stop_tokens(folder, self._backend)

    def encode(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return self._backend.encode(prompt, add_special_tokens=False).ids
        try:
            return self._encode_chat(list(prompt))
        except Exception as error:  # transformers and jinja raise families of their own
            first = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"model.path: the chat template of {self._folder} does not take a prompt that is a list of messages "
                f"({type(error).__name__}: {first}); add a template, or make data.prompt_key a column of plain text"
            ) from None

    def _encode_chat(self, messages: list[Mapping[str, str]]) -> list[int]:
        if self._chat is None:
            from transformers import AutoTokenizer

            self._chat = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        return list(
            self._chat.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        return self._backend.decode_batch([list(row) for row in token_ids], skip_special_tokens=True)


def _stop_tokens(folder: Path, backend: Any) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json knows best, then config.json, then the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        eos = _read_json(path).get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (int(eos),)
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(token) if token else None
    if found is None:
        raise ConfigError(f"model.path: no eos_token_id in {folder}/config.json or generation_config.json; add one")
    return (found,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is not valid JSON ({error})") from None


@dataclass(frozen=True)
class Dataset:
    """Prompts of one file, with what was left out on the way."""

    prompts: tuple[Prompt, ...]
    rows: int
    duplicates: int
    too_long: int

    def __len__(self) -> int:
        return len(self.prompts)

    def describe(self) -> str:
        left_out = [f"{n} {what}" for n, what in ((self.duplicates, "duplicates"), (self.too_long, "too long")) if n]
        return f"{len(self)} prompts of {self.rows} rows" + (f" ({', '.join(left_out)} left out)" if left_out else "")


def load_dataset(key: str, config: DataSection, tokenizer: Tokenizer, max_prompt_tokens: int) -> Dataset:
    """The data set that `data.<key>` names."""
    path = Path(getattr(config, key) or "")
    rows = read_rows(f"data.{key}", path)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    duplicates = too_long = longest = 0
    for index, row in enumerate(rows):
        prompt = _field(row, config.prompt_key, "data.prompt_key", path, index)
        if not isinstance(prompt, (str, list)):
            raise ConfigError(
                f"data.prompt_key: {config.prompt_key!r} of row {index} of {path} is {type(prompt).__name__}, expected "
                "text or a list of messages"
            )
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        if text in seen:
            duplicates += 1
            continue
        seen.add(text)
        token_ids = tokenizer.encode(prompt)
        if not token_ids:
            raise ConfigError(f"data.{key}: row {index} of {path} has an empty prompt; remove it")
        longest = max(longest, len(token_ids))
        if len(token_ids) > max_prompt_tokens:
            too_long += 1
            continue
        prompts.append(Prompt(id=index, token_ids=tuple(token_ids), text=text, row=row))
    if too_long and config.long_prompts == LongPrompts.error:
        raise ConfigError(
            f"rollout.max_prompt_tokens: {max_prompt_tokens}, but {too_long} prompts of {path} are longer "
            f"(the longest has {longest} tokens); raise it, or set data.long_prompts=drop"
        )
    if not prompts:
        raise ConfigError(f"data.{key}: {path} leaves no prompts ({len(rows)} rows, {too_long} too long)")
    return Dataset(tuple(prompts), len(rows), duplicates, too_long)


def read_rows(key: str, path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{key}: no file {str(path)!r}; `megatron-rl toy` makes the toy's data, or name your own")
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{key}: {path} is not a readable parquet file ({error})") from None
    if path.suffix == ".jsonl":
        return _json_lines(key, path)
    raise ConfigError(f"{key}: {path} ends in {path.suffix!r}; .jsonl and .parquet are read")


def _json_lines(key: str, path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{key}: {path}, line {number} is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{key}: {path}, line {number} holds {type(row).__name__}, expected an object")
            rows.append(row)
    return rows


def _field(row: Mapping[str, Any], name: str, key: str, path: Path, index: int) -> Any:
    if name not in row:
        raise ConfigError(f"{key}: {name!r} is not a column of {path} (row {index} has {', '.join(row)})")
    return row[name]


class PromptOrder:
    """Endless, shuffled per epoch. `position` counts prompts handed out and is the whole state."""

    def __init__(self, dataset: Dataset, seed: int, shuffle: bool, position: int = 0) -> None:
        self._prompts = dataset.prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []
        self.position = position

    def take(self, count: int) -> list[Prompt]:
        return [prompt for _, prompt in zip(range(count), self._stream(), strict=False)]

    def _stream(self) -> Iterator[Prompt]:
        while True:
            epoch, offset = divmod(self.position, len(self._prompts))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, list(range(len(self._prompts)))
                if self._shuffle:
                    random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self.position += 1
            yield self._prompts[self._order[offset]]


def check_datasets(model: ModelSection, data: DataSection, rollout: RolloutSection, reward: RewardSection) -> None:
    """Raises what loading the data would raise, before anything is started."""
    tokenizer = FolderTokenizer(Path(model.path))
    needs_answer = reward.name == "exact_match" or rollout.source == RolloutSource.dataset
    for key in ("train", "eval") if data.eval else ("train",):
        dataset = load_dataset(key, data, tokenizer, rollout.max_prompt_tokens)
        if key == "train" and len(dataset) < rollout.prompts_per_step:
            raise ConfigError(
                f"rollout.prompts_per_step: {rollout.prompts_per_step}, but {data.train} has {len(dataset)} prompts: "
                "a step would draw some twice; lower it"
            )
        for prompt in dataset.prompts if needs_answer else ():
            _field(prompt.row, data.answer_key, "data.answer_key", Path(getattr(data, key)), prompt.id)
