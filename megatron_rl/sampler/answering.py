"""From prompts that are being answered to the list that a synchronous caller waits for."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.sampler.protocol import Answering
from megatron_rl.types import Prompt, Rollout


def answer_all(answering: Answering, prompts: Sequence[Prompt], first_group: int) -> list[Rollout]:
    """Ordered by prompt, then sample; nothing stays open, whatever happens."""
    try:
        answering.add(prompts, first_group)
        groups: list[list[Rollout]] = []
        while more := answering.finished():
            groups += more
    finally:
        answering.close()
    return [rollout for group in sorted(groups, key=lambda group: group[0].group) for rollout in group]
