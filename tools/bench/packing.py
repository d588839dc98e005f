"""How long ranks wait for the slowest: rows balanced by tokens alone, and by attention's cost too.

    python tools/bench/packing.py [--samples 50] [--longest 20480] [--budget 24576]

Answers are log-normal around a fifth of the longest and cut there, prompts have 200 tokens: a long tail. Cost is
reckoned in operations (learner/modules/costs.py): the slowest rank's over the average, where 1 is no waiting.
`replicas` is one sum of gradients at the end of an update; with experts every micro-batch waits, with stages the
pipeline drains once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.learner.modules.costs import attention_share
from megatron_rl.learner.modules.packing import assign_rows
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config

MODELS = Path(__file__).resolve().parents[2] / "conf" / "model"
PROMPT = 200


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    rows: int  # of an update
    replicas: int
    stages: int = 1
    experts: bool = False  # over all replicas

    @property
    def at_least(self) -> int:
        return 2 * self.stages if self.stages > 1 else 1

    def by_tokens(self, lengths: Sequence[int], budget: int) -> list[list[list[int]]]:
        """Replicas alike in tokens, and so the micro-batches of each; equally many where they wait for each other."""
        shares = assign_rows(lengths, self.replicas, budget, self.at_least)
        most = max(map(len, shares)) if self.experts else self.at_least
        found = []
        for share in shares:
            rows = sorted(row for pack in share for row in pack)
            (packs,) = assign_rows([lengths[row] for row in rows], 1, budget, max(most, self.at_least))
            found.append([[rows[place] for place in pack] for pack in packs])
        return found

    def by_cost(self, lengths: Sequence[int], budget: int, attention: float) -> list[list[list[int]]]:
        """As the learner does."""
        return assign_rows(
            lengths,
            self.replicas,
            budget,
            at_least=self.at_least,
            same_count=self.experts,
            attention=attention,
            in_step=self.stages > 1,
        )


CASES = [
    Case("replicas", "Qwen3-8B", 512, 2),
    Case("replicas", "Qwen3-8B", 512, 16),
    Case("replicas", "Qwen3-8B", 128, 16),
    Case("replicas", "Qwen3-8B", 64, 16),
    Case("replicas", "Qwen3-0.6B", 512, 8),
    Case("replicas", "Qwen3-0.6B", 128, 16),
    Case("stages", "Qwen3-32B", 128, 4, stages=4),
    Case("experts", "Qwen3-30B-A3B", 512, 8, experts=True),
    Case("experts", "Qwen3-30B-A3B", 128, 8, experts=True),
]


def lengths_of(rows: int, longest: int, random: torch.Generator) -> list[int]:
    drawn = torch.empty(rows).log_normal_(0.0, 0.9, generator=random) * longest / 5
    return [PROMPT + int(length) for length in drawn.clamp(1, longest)]


def waiting(case: Case, packs: list[list[list[int]]], costs: Sequence[float]) -> float:
    """The slowest rank's time over what it would be if all had the same to do and nobody waited."""
    of_packs = [[sum(costs[row] for row in pack) for pack in share] for share in packs]
    even = sum(costs) / case.replicas
    if case.experts:
        return sum(max(together) for together in zip(*of_packs, strict=True)) / even
    return max(sum(share) + (case.stages - 1) * max(share) for share in of_packs) / even


def reckon(case: Case, samples: int, longest: int, budget: int) -> tuple[float, float, float, float]:
    """Waiting by tokens, by cost; micro-batches of a replica by tokens, by cost."""
    model = Model.of(read_hf_config(MODELS / f"{case.model}.json"), Layout())
    attention, random = attention_share(model), torch.Generator().manual_seed(1)
    found = []
    for _ in range(samples):
        lengths = lengths_of(case.rows, longest, random)
        costs = [length + attention * length**2 for length in lengths]
        both = (case.by_tokens(lengths, budget), case.by_cost(lengths, budget, attention))
        counts = [sum(map(len, packs)) / case.replicas for packs in both]
        found.append((*(waiting(case, packs, costs) for packs in both), *counts))
    tokens, cost, before, after = (statistics.fmean(column) for column in zip(*found, strict=True))
    return tokens, cost, before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--longest", type=int, default=20480)
    parser.add_argument("--budget", type=int, default=24576)
    options = parser.parse_args()
    print(f"{'waits':<9} {'model':<14} {'rows':>4} {'DP':>3} {'PP':>3}   by tokens  by cost   packs of a replica")
    for case in CASES:
        tokens, cost, before, after = reckon(case, options.samples, options.longest, options.budget)
        print(
            f"{case.name:<9} {case.model:<14} {case.rows:>4} {case.replicas:>3} {case.stages:>3}   "
            f"{tokens:9.3f}  {cost:7.3f}   {before:.2f} -> {after:.2f}"
        )


if __name__ == "__main__":
    main()
