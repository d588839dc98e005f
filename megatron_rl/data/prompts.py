"""The data sets that a configuration names: loaded for a run, or looked at before one is started."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.config.evaluation import HeldOut, held_out
from megatron_rl.config.schema import Config, DataSection, RewardSection, RolloutSection, RolloutSource
from megatron_rl.data.dataset import AT_ONCE, Dataset, Source
from megatron_rl.data.order import PromptOrder
from megatron_rl.data.rows import Joined
from megatron_rl.data.tokenizer import FolderTokenizer

__all__ = [
    "Dataset",
    "FolderTokenizer",
    "PromptOrder",
    "check_datasets",
    "load_dataset",
    "load_held_out",
    "needs_answers",
]

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
    """The data set that `data.<key>` names. `sample`: every row is looked at, but only so many prompts are encoded."""
    parts: list[Dataset] = []
    sources = config.sources(key) or {"": 1.0}
    for path in sources:
        before = sum(part.rows for part in parts)
        source = Source(f"data.{key}", Path(path), config, tokenizer, needs_answer, before)
        parts.append(source.load(max_prompt_tokens, sample))
    return parts[0] if len(parts) == 1 else _joined(parts, list(sources.values()))


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
    """Prompts that stand in two of the files stay in both: each file gives the share that its weight asks for."""
    prompts = Joined([part.prompts for part in parts])
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


def needs_answers(rollout: RolloutSection, reward: RewardSection) -> bool:
    return reward.needs_answer or rollout.source == RolloutSource.dataset


def check_datasets(config: Config) -> None:
    """Raises what loading the data would raise, before anything is started."""
    data, rollout = config.data, config.rollout
    tokenizer, longest = FolderTokenizer(config.model.folder), rollout.max_prompt_tokens
    wanted = needs_answers(rollout, config.reward)
    left = len(load_dataset("train", data, tokenizer, longest, needs_answer=wanted, sample=EARLY_SAMPLE))
    if left < rollout.prompts_per_step:
        raise ConfigError(
            f"rollout.prompts_per_step: {rollout.prompts_per_step}, but {data.train} has {left} prompts: "
            "a step would draw some twice; lower it"
        )
    for one in held_out(config):
        load_held_out(one, data, tokenizer, longest, EARLY_SAMPLE)
