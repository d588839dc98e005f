"""Which tokens are passed through both engines: a run's recorded rollouts, or prompts that the engine answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Config
from megatron_rl.data.dataset import Source
from megatron_rl.data.prompts import FolderTokenizer
from megatron_rl.runs.rollout_file import load_recorded, recorded_steps
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, Rollout, SamplingParams, written

RANDOM_TOKENS = 8  # of a prompt, where nothing else is named


@dataclass(frozen=True)
class Wanted:
    count: int
    tokens: int  # of each at most, prompt and answer
    prompts: Path | None = None  # a file
    run: Path | None = None


def recorded(wanted: Wanted, room: int) -> list[Rollout]:
    """Sequences of the last recorded step, spread over it, as far as there is room; none without a run."""
    steps = recorded_steps(RunDir(wanted.run).rollouts) if wanted.run and wanted.prompts is None else []
    if not steps:
        return []
    whole = [one.rollout for one in load_recorded(steps[-1][1]).scored]
    every = [rollout for rollout in whole if rollout.token_ids]
    return [_cut(rollout, room) for rollout in every[:: max(1, len(every) // wanted.count)][: wanted.count]]


def prompts(config: Config, folder: Path, vocab: int, wanted: Wanted, room: int) -> list[Prompt]:
    """Prompts of the file, or random ones: what the engine makes of them is a text of its own."""
    if wanted.prompts is None:
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocab, (wanted.count, min(RANDOM_TOKENS, room // 2)), generator=draw).tolist()
        return [Prompt(number, tuple(ids), "", {}) for number, ids in enumerate(tokens)]
    longest = config.rollout.max_prompt_tokens
    source = Source("--prompts", wanted.prompts, config.data, FolderTokenizer(folder), needs_answer=False)
    found = source.load(longest, None).prompts[: wanted.count]
    if not found:
        raise ConfigError(f"--prompts {wanted.prompts}: it has no prompt of up to {longest} tokens; name another file")
    return [_shortened(prompt, room // 2) for prompt in found]


def answered(sampler: Sampler, prompts: Sequence[Prompt], room: int) -> list[Rollout]:
    """One answer each, as far as there is room, at temperature 1."""
    left = room - max(len(prompt.token_ids) for prompt in prompts)
    return sampler.generate(prompts, SamplingParams(1, left), seed=0, first_group=0, step=0)


def _cut(rollout: Rollout, room: int) -> Rollout:
    prompt = _shortened(rollout.prompt, max(room // 2, room - len(rollout.token_ids)))
    length = min(len(rollout.token_ids), room - len(prompt.token_ids))
    return replace(
        rollout,
        prompt=prompt,
        token_ids=rollout.token_ids[:length],
        logprobs=rollout.logprobs[:length],
        loss_mask=written(length),
    )


def _shortened(prompt: Prompt, most: int) -> Prompt:
    """Its end."""
    return replace(prompt, token_ids=prompt.token_ids[-most:])
