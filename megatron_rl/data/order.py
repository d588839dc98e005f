"""The order in which prompts are drawn: endless, shuffled per epoch, resumable.

The order of an epoch is a permutation drawn from (seed, epoch). Several sources take turns as their weights say: in a
cycle of `CYCLE` places each has its share, in an order drawn from (seed, cycle), and an epoch of its own. `position`
counts prompts handed out and is the whole state.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from megatron_rl.data.dataset import Dataset
from megatron_rl.types import Prompt

CYCLE = 1000


class PromptOrder:
    def __init__(self, dataset: Dataset, seed: int, shuffle: bool, position: int = 0) -> None:
        self._prompts = dataset.prompts
        shares = dataset.shares or ((len(dataset), 1.0),)
        self._firsts = [0, *accumulate(size for size, _ in shares)]
        self._counts = _counts([weight for _, weight in shares]) if len(shares) > 1 else [1]
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = lru_cache(len(shares))(self._shuffled)
        self._cycle = lru_cache(1)(self._turns)
        self.position = position

    def take(self, count: int) -> list[Prompt]:
        return [prompt for _, prompt in zip(range(count), self._stream(), strict=False)]

    def _stream(self) -> Iterator[Prompt]:
        while True:
            source, drawn = self._place(self.position)
            first, end = self._firsts[source : source + 2]
            epoch, offset = divmod(drawn, end - first)
            self.position += 1
            yield self._prompts[first + self._epoch(source, epoch)[offset]]

    def _place(self, position: int) -> tuple[int, int]:
        """Whose turn it is, and how often it was before."""
        if len(self._counts) == 1:
            return 0, position
        cycle, place = divmod(position, sum(self._counts))
        source, before = self._cycle(cycle)[place]
        return source, cycle * self._counts[source] + before

    def _turns(self, cycle: int) -> list[tuple[int, int]]:
        sources = [source for source, count in enumerate(self._counts) for _ in range(count)]
        random.Random(f"{self._seed}/cycle/{cycle}").shuffle(sources)
        seen = [0] * len(self._counts)
        turns = []
        for source in sources:
            turns.append((source, seen[source]))
            seen[source] += 1
        return turns

    def _shuffled(self, source: int, epoch: int) -> Sequence[int]:
        order = array("L", range(self._firsts[source + 1] - self._firsts[source]))
        if self._shuffle:
            name = f"{self._seed}/{epoch}" if len(self._counts) == 1 else f"{self._seed}/{source}/{epoch}"
            random.Random(name).shuffle(order)
        return order


def _counts(weights: Sequence[float]) -> list[int]:
    """Places in a cycle: at least one each."""
    return [max(1, round(CYCLE * weight / sum(weights))) for weight in weights]
