"""Prompts that the servers of a fleet are answering, as seen from the thread that has added them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from megatron_rl.sampler.fleet.dispatch import Dispatcher, Done, Job
from megatron_rl.sampler.protocol import SamplerError, request_seed
from megatron_rl.types import Prompt, Rollout, written


class FleetAnswering:
    """See protocol.Answering."""

    def __init__(
        self,
        ask: Callable[[Callable[[Any], Any]], Any],
        count: Callable[[int, float, int, int], None],
        dispatcher: Dispatcher,
        seed: int,
    ) -> None:
        """`ask`: the servers, on their event loop. `count`: tokens, seconds, prompts that went elsewhere, restarts."""
        self._ask, self._count, self._dispatcher, self._seed = ask, count, dispatcher, seed
        self._open: dict[int, Prompt] = {}  # by group
        self._since = 0.0  # open, and not counted yet
        self._retried = 0
        self._closed = False

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        groups = dict(enumerate(prompts, first_group))
        if not self._open:
            self._since = time.perf_counter()
        self._open |= groups
        jobs = [
            Job(group, prompt.token_ids, request_seed(self._seed, group), f"prompt {prompt.id}")
            for group, prompt in groups.items()
        ]
        self._ask(lambda servers: servers.add(self._dispatcher, jobs))

    def finished(self) -> list[list[Rollout]]:
        done, restarts = self._ask(lambda servers: servers.finished(self._dispatcher))
        groups = [_rollouts(self._open.pop(one.job.number), one) for one in done]
        now, retried = time.perf_counter(), self._dispatcher.retried
        tokens = sum(len(rollout.token_ids) for group in groups for rollout in group)
        if groups:
            self._count(tokens, now - self._since, retried - self._retried, restarts)
        self._since, self._retried = now, retried
        return groups

    def close(self) -> None:
        """Safe to call twice, from another thread, and after the sampler's own end."""
        if not self._closed:
            self._closed = True
            with suppress(SamplerError):  # the sampler itself has ended
                self._ask(lambda servers: servers.give_up(self._dispatcher))


def _rollouts(prompt: Prompt, done: Done) -> list[Rollout]:
    return [
        Rollout(
            prompt=prompt,
            group=done.job.number,
            sample=sample,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            loss_mask=written(len(answer.token_ids)),
            finish_reason=answer.finish_reason,
            policy_version=answer.oldest if answer.token_ids else done.version,
            format=done.format.value,
            kept_ids=answer.kept.ids if answer.kept else None,
            kept_counts=answer.kept.counts if answer.kept else None,
            versions=answer.versions,
        )
        for sample, answer in enumerate(done.answers)
    ]
