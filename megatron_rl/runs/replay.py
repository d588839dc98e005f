"""What other corrections would have done to the batches that a run recorded. Nothing is trained.

    python -m megatron_rl.runs.replay runs/quickstart --corrections none tis icepop [correction.weight.high=4 ...]

Shape suffixes: B sequences, T response positions (right-padded).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.advantage import group_advantages
from megatron_rl.config import ConfigError, load
from megatron_rl.config.schema import AdvantageConfig, Anchor, CorrectionConfig
from megatron_rl.rollout_correction import apply_conditional_rules, keep_rows, rollout_correction
from megatron_rl.runs.rollout_file import read_rollouts, recorded_steps
from megatron_rl.runs.run_dir import RunDir

COLUMNS: dict[str, tuple[str, str]] = {
    "rollout_is_eff_sample_size": ("ESS", ".4f"),
    "rollout_is_mean": ("mean weight", ".4f"),
    "rollout_is_max": ("max weight", ".3f"),
    "rollout_is_ratio_fraction_high": ("above bound", ".2%"),
    "rollout_rs_masked_fraction": ("tokens masked", ".2%"),
    "rollout_rs_seq_masked_fraction": ("rows masked", ".2%"),
    "weight_bias": ("bias", "+.2e"),
    "weight_variance": ("variance", ".2e"),
}


@dataclass(frozen=True)
class Recorded:
    """One step's batch, as it was before any correction."""

    step: int
    prox_logprobs_BT: torch.Tensor
    sampler_logprobs_BT: torch.Tensor
    mask_BT: torch.Tensor
    rewards_B: torch.Tensor
    groups_B: torch.Tensor


def load_recorded(step: int, path: Path) -> Recorded:
    table = read_rollouts(path)
    if table.column("prox_logprobs").null_count:
        raise ConfigError(
            f"{path}: no learner logprobs were recorded; a run has them with correction.anchor=prox and a policy loss"
        )
    masks = table.column("loss_mask").to_pylist()
    scores = zip(table.column("reward").to_pylist(), table.column("error").to_pylist(), strict=True)
    return Recorded(
        step,
        _padded(table.column("prox_logprobs").to_pylist(), torch.float32),
        _padded(table.column("sampler_logprobs").to_pylist(), torch.float32),
        _padded(masks, torch.bool),
        torch.tensor([reward if error is None else math.nan for reward, error in scores], dtype=torch.float32),
        torch.tensor(table.column("group").to_pylist(), dtype=torch.int64),
    )


def replay(
    batches: Sequence[Recorded], corrections: Mapping[str, CorrectionConfig], advantage: AdvantageConfig
) -> dict[str, dict[str, float]]:
    """Correction -> its metrics (names without their group), averaged over the batches; the largest weight of all."""
    table = {}
    for name, config in corrections.items():
        if config.anchor == Anchor.sampler:
            raise ConfigError(f"correction {name}: anchor sampler has its weights only inside the loss; leave it out")
        found = [_metrics(batch, config, advantage) for batch in batches]
        table[name] = {key: math.fsum(one[key] for one in found) / len(found) for key in found[0]}
        table[name]["rollout_is_max"] = max(one["rollout_is_max"] for one in found)
    return table


def _metrics(batch: Recorded, config: CorrectionConfig, advantage: AdvantageConfig) -> dict[str, float]:
    """In the order of the loop: correction, baselines over the survivors, rules that look at advantages."""
    correction = rollout_correction(batch.prox_logprobs_BT, batch.sampler_logprobs_BT, batch.mask_BT, config)
    counted_B = correction.baseline_keep_B(config) & torch.isfinite(batch.rewards_B)
    advantages_B, keep_B = group_advantages(batch.rewards_B, batch.groups_B, counted_B, advantage)
    correction = apply_conditional_rules(keep_rows(correction, keep_B, config), advantages_B, config)
    return {name.split("/", 1)[1]: value for name, value in correction.metrics.items()}


def describe(table: Mapping[str, Mapping[str, float]]) -> str:
    head = ["correction", *(label for label, _ in COLUMNS.values())]
    rows = [
        [name, *(format(metrics[key], form) if key in metrics else "" for key, (_, form) in COLUMNS.items())]
        for name, metrics in table.items()
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in [head, *rows]
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.runs.replay",
        usage="%(prog)s RUN --corrections NAME [NAME ...] [key=value ...]",
        description="Applies other corrections to the batches that a run recorded.",
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--corrections", nargs="+", default=[], metavar="NAME", help="presets of conf/correction")
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in argv if word not in overrides])
    run = RunDir(options.run)
    try:
        own = load(run.config)
        presets = {name: load(run.config, [f"correction={name}", *overrides]) for name in options.corrections}
        files = recorded_steps(run.rollouts)
        if not files:
            raise ConfigError(f"{run.rollouts}: no recorded steps; log.record_every says which steps are recorded")
        batches = [load_recorded(step, path) for step, path in files]
        corrections = {"(as run)": own.correction} | {name: config.correction for name, config in presets.items()}
        print(f"{len(batches)} recorded steps of {run.path}, {sum(int(b.mask_BT.sum()) for b in batches):,} tokens")
        print(describe(replay(batches, corrections, own.advantage)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    out_BT = torch.zeros(len(rows), max((len(row) for row in rows), default=0), dtype=dtype)
    for index, row in enumerate(rows):
        out_BT[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return out_BT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
