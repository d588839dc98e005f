"""How long ranks wait for the slowest: rows balanced by tokens alone, and by attention's cost too.

    python tools/bench/packing.py [--samples 50] [--longest 20480] [--budget 24576]
    python tools/bench/packing.py --measure [--rounds 3]

Answers are log-normal around a fifth of the longest and cut there, prompts have 200 tokens: a long tail. Cost is
reckoned in operations (learner/operations.py): the slowest rank's over the average, where 1 is no waiting. `replicas`
is one sum of gradients at the end of an update; with experts every micro-batch waits, with stages the pipeline drains
once.

--measure: no model of cost, but seconds of a core, of each replica's rows in turn, in one learner on this host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rl.config.schema import (
    Config,
    Format,
    LearnerSection,
    OptimSection,
    QuantizationSection,
    RolloutSection,
)
from megatron_rl.learner.operations import attention_share
from megatron_rl.learner.packing import assign_rows
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config
from megatron_rl.types import Batch, Targets

MODELS = Path(__file__).resolve().parents[2] / "conf" / "model"
PROMPT = 200
MEASURED = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "initializer_range": 0.02,
}  # fmt: skip


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
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.measure:
        measure(options.rounds)
        return
    print(f"{'waits':<9} {'model':<14} {'rows':>4} {'DP':>3} {'PP':>3}   by tokens  by cost   packs of a replica")
    for case in CASES:
        tokens, cost, before, after = reckon(case, options.samples, options.longest, options.budget)
        print(
            f"{case.name:<9} {case.model:<14} {case.rows:>4} {case.replicas:>3} {case.stages:>3}   "
            f"{tokens:9.3f}  {cost:7.3f}   {before:.2f} -> {after:.2f}"
        )


def measure(rounds: int) -> None:
    """Each replica's rows as an update of their own; by tokens and by cost in turn."""
    from megatron_rl.learner.learner import Learner  # makes torch the host's

    torch.set_num_threads(1)
    section = LearnerSection(tokens_per_microbatch=8192)
    config = Config(
        learner=section,
        optim=OptimSection(lr=1e-9),
        quantization=QuantizationSection(Format.int8),
        rollout=RolloutSection(max_prompt_tokens=PROMPT, max_response_tokens=4096),
    )
    names = ("run", "learner", "optim", "loss", "correction", "rollout", "quantization")
    model = Model.of(MEASURED, Layout.from_config(section))
    learner = Learner(model, **{name: getattr(config, name) for name in names})
    learner.init_random(1)
    case, random = Case("replicas", "measured", 48, 4), torch.Generator().manual_seed(2)
    lengths = lengths_of(case.rows, 4096, random)
    whole, attention = targets_of(lengths, random), attention_share(model)
    costs = [length + attention * length**2 for length in lengths]
    ways = {"tokens": case.by_tokens(lengths, 8192), "cost": case.by_cost(lengths, 8192, attention)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, packs in ways.items():
            seconds = list(of_replicas(learner, whole, packs))
            if number:  # the first of each makes its room in memory
                taken[name].append(max(seconds) / statistics.fmean(seconds))
    for name, packs in ways.items():
        rounded = ", ".join(f"{ratio:.3f}" for ratio in taken[name])
        print(f"by {name:<7} slowest of {case.replicas} replicas over the average: {statistics.median(taken[name]):.3f}"
              f" ({rounded}); reckoned {waiting(case, packs, costs):.3f}")  # fmt: skip


def of_replicas(learner: object, whole: Targets, packs: list[list[list[int]]]) -> Iterator[float]:
    for share in packs:
        rows = torch.tensor(sorted(row for pack in share for row in pack))
        mine = rows_of(whole, rows)
        begun = time.thread_time()
        learner.update(mine)  # type: ignore[attr-defined]
        yield time.thread_time() - begun


def rows_of(whole: Targets, rows: torch.Tensor) -> Targets:
    parts = {name: value[rows] for name, value in vars(whole).items() if isinstance(value, torch.Tensor)}
    return replace(whole, batch=whole.batch.rows(rows), **parts)


def targets_of(lengths: Sequence[int], random: torch.Generator) -> Targets:
    rows, responses_B = len(lengths), torch.tensor(lengths) - PROMPT
    width = int(responses_B.max())
    mask_BT = torch.arange(width) < responses_B[:, None]
    batch = Batch(
        tokens_BS=torch.randint(1, MEASURED["vocab_size"], (rows, PROMPT + width), generator=random),  # type: ignore[call-overload]
        prompt_lengths_B=torch.full((rows,), PROMPT),
        response_lengths_B=responses_B,
        mask_BT=mask_BT,
        sampler_logprobs_BT=torch.full(mask_BT.shape, -6.0),
        rewards_B=torch.rand(rows, generator=random),
        groups_B=torch.arange(rows) // 4,
        versions_B=torch.zeros(rows, dtype=torch.int64),
    )
    return Targets(
        batch=batch,
        anchor_logprobs_BT=batch.sampler_logprobs_BT,
        ref_logprobs_BT=None,
        advantages_B=torch.randn(rows, generator=random),
        weights_BT=torch.ones(mask_BT.shape),
        mask_BT=mask_BT,
        denominator_mask_BT=mask_BT,
    )


if __name__ == "__main__":
    main()
