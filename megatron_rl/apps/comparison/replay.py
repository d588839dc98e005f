"""`megatron-rl replay`: metrics of other corrections on the batches that a run recorded.

Tables of its sessions' mismatch and of its busiest experts follow, if recorded. Nothing is trained.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.apps.reports.run_data import reading, session_table
from megatron_rl.batch import Share
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.schema import AdvantageConfig, Anchor, CorrectionConfig
from megatron_rl.rollout_correction.correction import correct, without_stale
from megatron_rl.rollout_correction.metrics import TOP_DIVERGENCES
from megatron_rl.tracking.console import table
from megatron_rl.tracking.rollout_file import Recorded, load_recorded, recorded_steps
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.types import Metrics

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


def replay_run(folder: Path, names: Sequence[str], overrides: Sequence[str]) -> str:
    """Replay the run's correction and the named presets, with overrides, on all it recorded."""
    run = RunDir(folder)
    own = recorded_config(run.config)
    presets = {
        name: recorded_config(run.config, [f"correction={name}", *overrides]).correction
        for name in names
    }
    files = recorded_steps(run.rollouts)
    if not files:
        raise ConfigError(
            f"{run.rollouts}: no recorded steps; log.record_every sets which steps are recorded"
        )
    problems: list[str] = []
    recorded = []
    for _, path in files:
        with reading(path, problems):
            recorded.append(load_recorded(path))
    if not recorded:
        raise ConfigError("\n".join(problems))
    if any(one.prox_logprobs_N is None for one in recorded):
        raise ConfigError(
            f"{run.rollouts}: no learner logprobs were recorded; a run has them with "
            "correction.anchor=prox and a policy loss"
        )
    tokens = sum(int(one.batch.mask_N.sum()) for one in recorded)
    found = replay(recorded, {"(as run)": own.correction} | presets, own.advantage)
    unread = "".join(f"\nnot readable: {problem}" for problem in problems)
    text = describe(found) + _divergences(found["(as run)"]) + session_table(recorded) + unread
    return f"{len(recorded)} recorded steps of {run.path}, {tokens:,} tokens\n{text}"


def replay(
    recorded: Sequence[Recorded],
    corrections: Mapping[str, CorrectionConfig],
    advantage: AdvantageConfig,
) -> dict[str, Metrics]:
    """Correction -> its metrics (names without their group), averaged over the steps; the largest
    weight of all.
    """
    replayed = {}
    for name, config in corrections.items():
        hint = None
        if config.anchor != Anchor.prox:
            hint = f"anchor {config.anchor} has its weights only inside the loss; leave it out"
        elif config.reads_top_logprobs and any(one.top_prox_logprobs_E is None for one in recorded):
            hint = (
                "the learner's logprobs of top tokens were not recorded; a run has them with "
                "rollout.top_logprobs, several updates a batch, and a correction that reads them"
            )
        if hint:
            raise ConfigError(f"correction {name}: {hint}")
        found = [_metrics(one, config, advantage) for one in recorded]
        replayed[name] = {
            key: math.fsum(one[key] for one in found) / len(found)
            for key in found[0]
            if all(key in one for one in found)  # a resumed run may have recorded more
        }
        replayed[name]["rollout_is_max"] = max(one["rollout_is_max"] for one in found)
    return replayed


def _metrics(recorded: Recorded, config: CorrectionConfig, advantage: AdvantageConfig) -> Metrics:
    assert recorded.prox_logprobs_N is not None
    batch, stale = without_stale(recorded.batch, config, recorded.version)
    share = Share.alone(batch)
    correction, _, _ = correct(
        share, recorded.prox_logprobs_N, config, advantage, recorded.top_prox_logprobs_E
    )
    return {name.split("/", 1)[1]: value for name, value in (stale | correction.metrics).items()}


def _divergences(metrics: Metrics) -> str:
    if TOP_DIVERGENCES[0] not in metrics:
        return ""
    kl, reverse_kl, tv = (metrics[name] for name in TOP_DIVERGENCES)
    return (
        f"\nover top tokens: KL(sampler, learner) {kl:.2e}, KL(learner, sampler) {reverse_kl:.2e}, "
        f"total variation {tv:.2e}"
    )


def describe(replayed: Mapping[str, Metrics]) -> str:
    head = ["correction", *(label for label, _ in COLUMNS.values())]
    rows = [
        [
            name,
            *(
                format(metrics[key], form) if key in metrics else ""
                for key, (_, form) in COLUMNS.items()
            ),
        ]
        for name, metrics in replayed.items()
    ]
    return "\n".join(table(head, rows))
