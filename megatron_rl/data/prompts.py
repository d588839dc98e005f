"""Data set rows to prompts, in a resumable order.

Rows come from .jsonl or .parquet. A prompt is text, encoded as it stands, or a list of chat messages,
rendered with the tokenizer's chat template. The order of an epoch is a permutation drawn from
(seed, epoch): the position alone says what comes next.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import (
    DataSection,
    LongPrompts,
    ModelSection,
    RewardSection,
    RolloutSection,
    RolloutSource,
)
from megatron_rl.data.rows import field, read_rows
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.types import Prompt

EARLY_SAMPLE = 1000  # prompts of a data set that are encoded before a run is started

_Found = tuple[int, str, str | list[dict[str, Any]]]  # number of the row, the prompt as text, the prompt


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


def load_dataset(
    key: str,
    config: DataSection,
    tokenizer: FolderTokenizer,
    max_prompt_tokens: int,
    *,
    needs_answer: bool = False,
    sample: int | None = None,
) -> Dataset:
    """The data set that `data.<key>` names. `sample`: every row is looked at, but only so many prompts are encoded."""
    path = Path(getattr(config, key) or "")
    rows = read_rows(f"data.{key}", path)
    distinct = _distinct(rows, config, path, needs_answer)
    found = distinct if sample is None else _telling(distinct, sample)
    texts = []
    for index, _, prompt in found:
        try:
            texts.append(tokenizer.text(prompt))
        except ConfigError as error:
            raise ConfigError(f"{error} (row {index} of {path})") from None
    encoded = tokenizer.encode_texts(texts, max_prompt_tokens)
    empty = next((index for (index, _, _), ids in zip(found, encoded, strict=True) if not ids), None)
    if empty is not None:
        raise ConfigError(f"data.{key}: row {empty} of {path} has an empty prompt; remove it")
    longest = max(map(len, encoded), default=0)
    too_long = sum(len(ids) > max_prompt_tokens for ids in encoded)
    if too_long and config.long_prompts == LongPrompts.error:
        raise ConfigError(
            f"rollout.max_prompt_tokens: {max_prompt_tokens}, but {too_long} prompts of {path} are longer (the longest "
            f"has {longest} tokens{' or more' if longest > 2 * max_prompt_tokens else ''}); raise it, or set "
            "data.long_prompts=drop"
        )
    prompts = tuple(
        Prompt(id=index, token_ids=tuple(ids), text=text, row=rows[index])
        for (index, text, _), ids in zip(found, encoded, strict=True)
        if len(ids) <= max_prompt_tokens
    )
    if not prompts:
        raise ConfigError(f"data.{key}: {path} leaves no prompts ({len(rows)} rows, {too_long} too long)")
    return Dataset(prompts, len(rows), len(rows) - len(distinct), too_long)


def _distinct(rows: list[dict[str, Any]], config: DataSection, path: Path, needs_answer: bool) -> list[_Found]:
    found: list[_Found] = []
    seen: set[str] = set()
    for index, row in enumerate(rows):
        where = f"row {index} of {path}"
        prompt = _prompt(row, config.prompt_key, where)
        _take_answer(row, config.answer_key, where, needs_answer)
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        if text not in seen:
            seen.add(text)
            found.append((index, text, prompt))
    return found


def _telling(found: list[_Found], count: int) -> list[_Found]:
    """The longest, which may be too long, the shortest, and one of each kind of conversation, for the template."""
    ranked = sorted(found, key=lambda each: len(each[1]), reverse=True)
    chosen = {each[0]: each for each in (*ranked[:count], *ranked[-1:])}
    kinds = {_kind(each[2]): each for each in found}
    return list((chosen | {each[0]: each for each in kinds.values()}).values())


def _kind(prompt: str | list[dict[str, Any]]) -> Any:
    if isinstance(prompt, str):
        return None
    return tuple((each["role"], type(each.get("content")), *each) for each in prompt)


def _prompt(row: Mapping[str, Any], name: str, where: str) -> str | list[dict[str, Any]]:
    prompt = _value(row, name, "data.prompt_key", where)
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ConfigError(
            f"data.prompt_key: {name!r} of {where} is {type(prompt).__name__}, expected text or a list of messages"
        )
    if not prompt or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in prompt):
        raise ConfigError(
            f"data.prompt_key: {name!r} of {where} is a list, but not one of messages such as "
            '{"role": "user", "content": "..."}'
        )
    return prompt


def _take_answer(row: dict[str, Any], name: str, where: str, needed: bool) -> None:
    """Where the answer lies inside a column, the row gets a column of the dotted name: everyone reads row[name]."""
    try:
        answer = row[name] = field(row, name)
    except LookupError as error:
        if needed:
            raise _missing("data.answer_key", name, where, error) from None
        return
    if needed and (answer is None or isinstance(answer, (list, dict))):
        kind = "null" if answer is None else type(answer).__name__
        raise ConfigError(f"data.answer_key: {name!r} of {where} is {kind}, expected text or a number; remove the row")


def _value(row: Mapping[str, Any], name: str, key: str, where: str) -> Any:
    try:
        return field(row, name)
    except LookupError as error:
        raise _missing(key, name, where, error) from None


def _missing(key: str, name: str, where: str, error: LookupError) -> ConfigError:
    return ConfigError(f"{key}: {name!r} is not in {where}: {error}")


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
    tokenizer = FolderTokenizer(model.folder)
    needs_answer = reward.name == "exact_match" or rollout.source == RolloutSource.dataset
    for key in ("train", "eval") if data.eval else ("train",):
        found = load_dataset(
            key, data, tokenizer, rollout.max_prompt_tokens, needs_answer=needs_answer, sample=EARLY_SAMPLE
        )
        left = found.rows - found.duplicates - found.too_long
        if key == "train" and left < rollout.prompts_per_step:
            raise ConfigError(
                f"rollout.prompts_per_step: {rollout.prompts_per_step}, but {data.train} has {left} prompts: "
                "a step would draw some twice; lower it"
            )
