"""Rollouts of few words: an answer's tokens, and what a test says of it."""

from collections.abc import Sequence
from typing import Any

from megatron_rl.types import NOTHING, Prompt, Rollout


def rollout(token_ids: Sequence[int], **given: Any) -> Rollout:
    """All of it sampled, by version 0, as the first answer of group 0."""
    defaults = {
        "prompt": Prompt(0, (1,), "", {}),
        "group": 0,
        "sample": 0,
        "logprobs": [-1.0] * len(token_ids),
        "loss_mask": [1] * len(token_ids),
        "finish_reason": "stop",
    }
    return Rollout(**vars(NOTHING) | defaults | {"token_ids": token_ids} | given)
