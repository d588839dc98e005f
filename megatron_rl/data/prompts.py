"""Loads and checks a configuration's data sets; draws prompts in a shuffled, resumable order."""

import random
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, count, islice
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.evaluation import HeldOut, held_out
from megatron_rl.config.schema import Config, DataSection, RewardSection
from megatron_rl.data.dataset import AT_ONCE, Dataset, Source
from megatron_rl.data.rows import Joined
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.types import Prompt

__all__ = [
    "Dataset",
    "FolderTokenizer",
    "PromptOrder",
    "check_datasets",
    "load_dataset",
    "load_held_out",
]

CYCLE = 1000  # prompts in which each of several sources has its share
EARLY_SAMPLE = 1000  # prompts of a data set that are encoded before a run is started


def load_dataset(
    key: str,
    config: DataSection,
    tokenizer: FolderTokenizer,
    max_prompt_tokens: int,
    *,
    needs_answer: bool = False,
    sample: int | None = None,
) -> Dataset:
    """The data set that `data.<key>` names. `sample`: every row is looked at, but only so many
    prompts are encoded.
    """
    parts: list[Dataset] = []
    sources = config.sources(key) or {"": 1.0}
    for path in sources:
        before = sum(part.rows for part in parts)
        source = Source(f"data.{key}", Path(path), config, tokenizer, needs_answer, before)
        parts.append(source.load(max_prompt_tokens, sample))
    if len(parts) == 1:
        return parts[0]
    return _joined(parts, list(sources.values()))


def load_held_out(
    one: HeldOut,
    config: DataSection,
    tokenizer: FolderTokenizer,
    max_prompt_tokens: int,
    sample: int | None = None,
) -> Dataset:
    source = Source(one.key, Path(one.path), config, tokenizer, one.reward.needs_answer)
    return source.load(max_prompt_tokens, sample)


def _joined(parts: list[Dataset], weights: list[float]) -> Dataset:
    """A data set of several files. A prompt in two of them stays in both, each with its weight."""
    prompts: Any = Joined([part.prompts for part in parts])
    return Dataset(
        tuple(prompts) if len(prompts) <= AT_ONCE else prompts,
        rows=sum(part.rows for part in parts),
        duplicates=sum(part.duplicates for part in parts),
        too_long=sum(part.too_long for part in parts),
        conflicts=sum(part.conflicts for part in parts),
        shares=tuple((len(part), weight) for part, weight in zip(parts, weights, strict=True)),
        columns="; ".join(dict.fromkeys(part.columns for part in parts if part.columns)),
        checksum=" ".join(part.checksum for part in parts),
    )


def check_datasets(
    config: Config,
) -> tuple[list[str], list[tuple[RewardSection, list[Prompt]]], str]:
    """Raise what loading the data would, before anything is started. Returns notes, some prompts for
    each reward, and a description of the training data.
    """
    data = config.data
    rollout = config.rollout
    tokenizer = FolderTokenizer(config.model.folder)
    longest = rollout.max_prompt_tokens
    wanted = config.reward.needs_answer or rollout.supervised
    train = load_dataset(
        "train", data, tokenizer, longest, needs_answer=wanted, sample=EARLY_SAMPLE
    )
    left = len(train)
    if left < rollout.prompts_per_step:
        raise ConfigError(
            f"rollout.prompts_per_step: {rollout.prompts_per_step}, but {data.train} has {left} "
            "prompts: a step would draw some twice; lower it"
        )
    notes = []
    if train.too_long:
        least = "at least " * (train.too_long >= EARLY_SAMPLE)
        notes.append(
            f"rollout.max_prompt_tokens: {longest}, and {least}{train.too_long} of "
            f"{left + train.too_long} prompts of {data.train} are left out, as they are longer; "
            "raise it to have them"
        )
    asked = [(config.reward, _some(train))]
    for one in held_out(config):
        rows = load_held_out(one, data, tokenizer, longest, EARLY_SAMPLE)
        if one.reward != config.reward:
            asked.append((one.reward, _some(rows)))
    return notes, asked, train.describe()


def _some(dataset: Dataset) -> list[Prompt]:
    return [dataset.prompts[place] for place in sorted({0, len(dataset) // 2, len(dataset) - 1})]


class PromptOrder:
    """The order in which prompts are drawn: endless, resumable by `position`, shuffled by (seed,
    epoch). Several sources take turns: in a cycle of `CYCLE` places each has its weight's share, in
    an order drawn from (seed, cycle), and epochs of its own.
    """

    def __init__(self, dataset: Dataset, seed: int, position: int = 0) -> None:
        self._prompts = dataset.prompts
        shares = dataset.shares or ((len(dataset), 1.0),)
        self._firsts = [0, *accumulate(size for size, _ in shares)]
        weights = [weight for _, weight in shares]
        # places of each source in a cycle
        self._counts = [max(1, round(CYCLE * weight / sum(weights))) for weight in weights]
        self._seed = seed
        self._epoch = lru_cache(len(shares))(self._shuffled)
        self._cycle = lru_cache(1)(self._turns)
        self.position = position

    def take(self, count: int) -> list[Prompt]:
        return list(islice(self._stream(), count))

    def _stream(self) -> Iterator[Prompt]:
        while True:
            source, drawn = self._place(self.position)
            first, end = self._firsts[source : source + 2]
            epoch, offset = divmod(drawn, end - first)
            self.position += 1
            yield self._prompts[first + self._epoch(source, epoch)[offset]]

    def _place(self, position: int) -> tuple[int, int]:
        """Source at a position of the mixture, and the number of its earlier draws."""
        if len(self._counts) == 1:
            return 0, position
        cycle, place = divmod(position, sum(self._counts))
        source, before = self._cycle(cycle)[place]
        return source, cycle * self._counts[source] + before

    def _turns(self, cycle: int) -> list[tuple[int, int]]:
        sources = [source for source, places in enumerate(self._counts) for _ in range(places)]
        random.Random(f"{self._seed}/cycle/{cycle}").shuffle(sources)
        numbers = [count() for _ in self._counts]
        return [(source, next(numbers[source])) for source in sources]

    def _shuffled(self, source: int, epoch: int) -> Sequence[int]:
        order = array("L", range(self._firsts[source + 1] - self._firsts[source]))
        if len(self._counts) == 1:
            name = f"{self._seed}/{epoch}"
        else:
            name = f"{self._seed}/{source}/{epoch}"
        random.Random(name).shuffle(order)
        return order
