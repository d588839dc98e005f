"""What both kinds of samplers make of what an engine has answered."""

from __future__ import annotations

from array import array
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


def by_token(spans: Sequence[Sequence[int]]) -> array[int]:
    """Spans are a version and a number of tokens each."""
    versions = array("i")
    for version, tokens in spans:
        versions.extend(array("i", [version]) * tokens)
    return versions
