"""Prompts of one file: rendered, tokenized, without duplicates and contradictory rows; prompts that
are too long are left out or refused.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import AnswerFormat, DataSection, LongPrompts
from megatron_rl.data.answers import Unusable, final_answer
from megatron_rl.data.layouts import Layout, Rows, field, has, recognised, split
from megatron_rl.data.rows import read_rows
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.types import Prompt

# prompts: of a larger data set only those are encoded at the start that may be too long
AT_ONCE = 50_000
_KINDS = 10_000  # rows in which kinds of conversation are looked for, of a large data set

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Dataset:
    """Prompts of a data set, with counts of the rows left out."""

    prompts: Sequence[Prompt]
    rows: int
    duplicates: int
    too_long: int
    conflicts: int = 0
    # of several files: how many prompts, which are neighbours; the weight
    shares: tuple[tuple[int, float], ...] = ()
    columns: str = ""  # how they were recognised, if no key names them
    checksum: str = ""  # of all rows' prompts and answers, in their order

    def __len__(self) -> int:
        return len(self.prompts)

    def describe(self) -> str:
        counts = {
            "duplicates": self.duplicates,
            "with two answers": self.conflicts,
            "too long": self.too_long,
        }
        left_out = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        notes = [f"{left_out} left out" if left_out else "", self.columns]
        about = "; ".join(filter(None, notes))
        return f"{len(self)} prompts of {self.rows} rows" + (f" ({about})" if about else "")


class Source(Sequence[Prompt]):
    """Distinct prompts of one file, rendered and tokenized on access."""

    def __init__(
        self,
        key: str,
        path: Path,
        config: DataSection,
        tokenizer: FolderTokenizer,
        needs_answer: bool,
        first_id: int = 0,
    ) -> None:
        self._key = key
        self._path = path
        self._config = config
        self._tokenizer = tokenizer
        self._extracts = config.answer_format == AnswerFormat.solution
        self._needs_answer = needs_answer or self._extracts
        self._first_id = first_id
        self._extract: Callable[[str], str] | None = None  # decided by the first row
        self._most = 0  # tokens that a prompt may have
        self._rows: Rows = read_rows(key, path)
        self._layout = Layout("prompt", "answer")
        if self._rows:
            self._layout = recognised(
                self._rows[0], config.prompt_key, config.answer_key, self._rows.place(0)
            )
        self._sizes = array("L")  # bytes of each row's prompt
        self._found = distinct(self._pairs())
        self._kept = self._found.rows

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return self._made(place, self._tokenizer.encode_texts([self._text(place)], self._most)[0])

    def load(self, max_tokens: int, sample: int | None) -> Dataset:
        """`sample`: only so many prompts are encoded, of which the others are like."""
        self._most = max_tokens
        chosen = self._to_encode(max_tokens, sample)
        ids = self._tokenizer.encode_texts([self._text(each) for each in chosen], max_tokens)
        encoded = dict(zip(chosen, ids, strict=True))
        too_long = [each for each, ids in encoded.items() if len(ids) > max_tokens]
        self._check(encoded, too_long)
        prompts: Sequence[Prompt] = self
        if len(encoded) == len(self) and sample is None:
            prompts = tuple(
                self._made(each, ids) for each, ids in encoded.items() if len(ids) <= max_tokens
            )
        else:
            self._kept = np.delete(self._kept, too_long)
        return Dataset(
            prompts,
            len(self._rows),
            self._found.duplicates,
            len(too_long),
            self._found.conflicts,
            columns=self._recognised(),
            checksum=self._found.checksum,
        )

    def _check(self, encoded: Mapping[int, Sequence[int]], too_long: Sequence[int]) -> None:
        for each, ids in encoded.items():
            if not ids:
                raise ConfigError(
                    f"{self._key}: {self._rows.place(int(self._kept[each]))} has an empty prompt; "
                    "remove it"
                )
        if too_long and self._config.long_prompts == LongPrompts.error:
            most = max(map(len, encoded.values()))
            raise ConfigError(
                f"rollout.max_prompt_tokens: {self._most}, but {len(too_long)} of {len(self)} "
                f"prompts of {self._path} are longer (the longest has {most} tokens or more); "
                "raise it, or set data.long_prompts=drop"
            )
        if len(too_long) == len(self):
            raise ConfigError(
                f"{self._key}: {self._path} leaves no prompts ({len(self._rows)} rows, "
                f"{len(too_long)} too long, {self._found.conflicts} with two answers)"
            )

    def _to_encode(self, max_tokens: int, sample: int | None) -> list[int]:
        """Places of the prompts to encode: all of a small data set; of a large one each kind, and
        the longest. No tokenizer makes more tokens than a text has bytes; a template adds to all
        what it adds to the shortest.
        """
        if len(self) <= AT_ONCE and sample is None:
            return list(range(len(self)))
        sizes = np.asarray(self._sizes)[self._kept]
        if not len(sizes):
            return []
        ranked = np.argsort(-sizes, kind="stable")
        kinds = {self._kind(each): each for each in range(min(len(self), _KINDS))}
        if sample is None:
            shortest = self._tokenizer.encode_texts([self._text(int(ranked[-1]))], max_tokens)[0]
            ranked = np.flatnonzero(sizes + len(shortest) > max_tokens)
        else:
            ranked = np.concatenate([ranked[:sample], ranked[-1:]])
        return list(dict.fromkeys([*map(int, ranked), *kinds.values()]))

    def _kind(self, place: int) -> Any:
        """The kind of conversation that a prompt is, to the template; None for plain text."""
        prompt = self._prompt(self._rows[int(self._kept[place])], int(self._kept[place]))
        if isinstance(prompt, str):
            return None
        return tuple((each["role"], type(each.get("content")), *each) for each in prompt)

    def _pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Prompt and answer of every row; answers only where they are needed."""
        texts = None
        if not self._extracts and self._config.instruction is None:
            texts = self._rows.pairs(self._layout.prompt, self._layout.answer)
        if texts is None:
            texts = (self._pair(row, index) for index, row in enumerate(self._rows))
        for index, (prompt, answer) in enumerate(texts):
            if prompt is None or answer is None:
                prompt, answer = self._pair(self._rows[index], index)  # names what is wrong
            encoded = prompt.encode()
            self._sizes.append(len(encoded))
            yield encoded, answer.encode() if self._needs_answer else b""

    def _pair(self, row: dict[str, Any], index: int) -> tuple[str, str]:
        prompt = self._prompt(row, index)
        answer = self._answer(row, index) if self._needs_answer else ""
        return _as_text(prompt), answer

    def _prompt(self, row: dict[str, Any], index: int) -> str | Messages:
        prompt = self._value("prompt", row, index)
        if isinstance(prompt, str):
            return (self._config.instruction or "{}").replace("{}", prompt)
        if not isinstance(prompt, list):
            raise self._unlike("prompt", index, prompt, "text or a list of messages")
        if not prompt or not all(
            isinstance(each, dict) and isinstance(each.get("role"), str) for each in prompt
        ):
            raise self._unlike("prompt", index, prompt, 'messages such as {"role": "user", ...}')
        return prompt

    def _answer(self, row: dict[str, Any], index: int) -> str:
        answer = self._value("answer", row, index)
        if answer is None or isinstance(answer, (bool, list, dict)):  # a model writes no Python
            raise self._unlike("answer", index, answer, "text or a number")
        if not self._extracts:
            return str(answer)
        self._extract = self._extract or final_answer(str(answer))
        try:
            if found := self._extract(str(answer)):
                return found
            raise Unusable("an empty answer")
        except Unusable as error:
            raise ConfigError(
                f"data.answer_format: {self._rows.place(index)} has {error}; remove it, or set "
                "data.answer_format=text"
            ) from None

    def _value(self, name: str, row: dict[str, Any], index: int) -> Any:
        """Return a row's prompt or answer."""
        row, layout = split(row, self._layout)
        column = getattr(layout, name)
        try:
            return field(row, column)
        except LookupError as error:
            place = self._rows.place(index)
            raise ConfigError(f"data.{name}_key: {column!r} is not in {place}: {error}") from None

    def _unlike(self, name: str, index: int, value: Any, expected: str) -> ConfigError:
        _, layout = split(self._rows[index], self._layout)
        kind = "null" if value is None else type(value).__name__
        return ConfigError(
            f"data.{name}_key: {getattr(layout, name)!r} of {self._rows.place(index)} is {kind}, "
            f"expected {expected}; change or remove the row"
        )

    def _text(self, place: int) -> str:
        """The prompt as text, with its system prompt and chat template."""
        index = int(self._kept[place])
        prompt = self._prompt(self._rows[index], index)
        config = self._config
        if isinstance(prompt, str) and (
            config.chat_template_kwargs is not None or config.system_prompt is not None
        ):
            prompt = [{"role": "user", "content": prompt}]
        if (
            isinstance(prompt, list)
            and config.system_prompt is not None
            and prompt[0]["role"] != "system"
        ):
            prompt = [{"role": "system", "content": config.system_prompt}, *prompt]
        try:
            return self._tokenizer.text(prompt, config.chat_template_kwargs)
        except ConfigError as error:
            raise ConfigError(f"{error} ({self._rows.place(index)})") from None

    def _made(self, place: int, ids: Sequence[int]) -> Prompt:
        index = int(self._kept[place])
        prompt = self._prompt(self._rows[index], index)
        row, layout = split(dict(self._rows[index]), self._layout)
        for name in (layout.prompt, layout.answer):
            if name not in row and has(row, name):  # inside a column: consumers read row[name]
                row[name] = field(row, name)
        if self._extracts:
            row[layout.answer] = self._answer(row, index)
        return Prompt(
            self._first_id + index,
            tuple(ids),
            _as_text(prompt),
            row,
            layout.prompt,
            layout.answer,
        )

    def _recognised(self) -> str:
        layout = self._layout
        if layout.publisher == "as here" or (self._config.prompt_key and self._config.answer_key):
            return ""
        return f"prompt in {layout.prompt}, answer in {layout.answer}: {layout.publisher}"


def _as_text(prompt: str | Messages) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


@dataclass(frozen=True)
class Distinct:
    """Row numbers of a data set's distinct prompts, and counts of the rows left out."""

    rows: npt.NDArray[np.int64]  # numbers of those that count, the first of each prompt, ascending
    duplicates: int
    conflicts: int  # prompts that were left out, as their rows do not agree on the answer
    checksum: str = ""  # of prompts and answers, in their order


def distinct(pairs: Iterable[tuple[bytes, bytes]]) -> Distinct:
    """Find the rows that count: a prompt that stands there often counts once, one with two answers
    not at all. Only hashes are kept: tables have millions of rows.
    """
    prompt_hashes = array("Q")
    answer_hashes = array("Q")
    for prompt, answer in pairs:
        prompt_hashes.append(xxhash.xxh3_64_intdigest(prompt))
        answer_hashes.append(xxhash.xxh3_64_intdigest(answer.strip()))
    prompts, answers = (np.frombuffer(each, np.uint64) for each in (prompt_hashes, answer_hashes))
    if not len(prompts):
        return Distinct(np.zeros(0, np.int64), 0, 0)
    _, first, group = np.unique(prompts, return_index=True, return_inverse=True)
    disagreeing = np.unique(group[answers != answers[first][group]])
    kept = np.sort(np.delete(first, disagreeing)).astype(np.int64)
    checksum = xxhash.xxh3_64_hexdigest(prompts.tobytes() + answers.tobytes())
    return Distinct(kept, len(prompts) - len(first), len(disagreeing), checksum)
