"""Collection of a step's batch on the driver: draws prompts, gets responses (sampler, sessions or
data set), filters and refills groups, computes metrics; `Scorer`: rewards, the penalty of overlong
responses, and the responses excluded from the loss.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean, pstdev
from typing import Protocol

import numpy as np

from megatron_rl.advantage import has_variance, overlong_penalty
from megatron_rl.config.schema import RewardSection, RolloutSection
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.rewards.functions import reads_last
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.task import Score, Task
from megatron_rl.rollout.session_rewards import session_metrics, session_score
from megatron_rl.rollout.top_logprobs import top_metrics
from megatron_rl.tracking.timeline import Span
from megatron_rl.types import (
    NEARLY_RIGHT,
    Metrics,
    Prompt,
    Rollout,
    SamplingParams,
    Scored,
    Verdict,
    written,
)

LONGEST_CHARACTER = 5  # tokens: its bytes, and one that the beginning may be cut in
MOST_DETAILS = 64  # names of a reward's additional numbers that a step logs
Group = list[Scored]


class RewardError(RuntimeError):
    """No response of a step could be scored."""

    process = "the reward workers"
    hint = (
        "Fix the function that reward.name names, or the class that environment.name names: call "
        "it with a row of data.train and a response. Variables that it needs are listed in "
        "run.variables."
    )


class GroupStream(Protocol):
    """Prompts in generation, for one thread; others may call the sampler for other requests."""

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        """Add prompts behind those before; a prompt's group is `first_group` plus its index."""
        ...

    def finished(self) -> list[list[Rollout]]:
        """Return the complete groups; wait for at least one. Empty: no prompt is open."""
        ...

    def close(self) -> None:
        """Cancel open prompts."""
        ...


class ResponseSource(Protocol):
    """Interface of a Sampler that collection uses."""

    def stream(self, params: SamplingParams, *, seed: int, step: int) -> GroupStream: ...


@dataclass(frozen=True)
class Collected:
    scored: list[Scored]  # responses that the step trains on
    drawn: list[Scored]  # all responses, before the group filter
    metrics: Metrics
    # half-open range of the drawn prompts: a group's number is its prompt's position in the order
    ordinals: tuple[int, int]
    spans: list[Span] = field(default_factory=list)


class Collector:
    """Collector of batches: draws prompts, has them sampled and scored, and replaces groups without
    a learning signal.
    """

    def __init__(
        self,
        config: RolloutSection,
        order: PromptOrder,
        answers: ResponseSource,
        scorer: "Scorer",
        *,
        rebaseline: bool,
        seed: int,
    ) -> None:
        self._config = config
        self._source = answers
        self._scorer = scorer
        self._rebaseline = rebaseline
        self._seed = seed
        self._params = sampling_params(config, scorer.tokenizer.stop_token_ids)
        self._order = order

    @property
    def next_group(self) -> int:
        return self._order.position

    def collect(self, step: int) -> Collected:
        """Collect a step's rollouts: complete groups, adjacent, in the order they were drawn.

        Groups are scored as they are finished. A round replaces the groups that earlier rounds have
        lost; the part of it that is already certain starts while they are in progress, with the
        same prompts as if it had waited.
        """
        first = self.next_group
        wanted = self._config.prompts_per_step
        drawn: dict[int, Group] = {}
        learnable: set[int] = set()
        spans: list[Span] = []
        # of the rounds so far, and the position where the prompts of the next one begin
        rounds = 1
        end = first + wanted
        with closing(self._source.stream(self._params, seed=self._seed, step=step)) as stream:
            self._ask(stream, wanted)
            begun = until = time.perf_counter()
            while finished := stream.finished():
                until = time.perf_counter()
                groups = self._scored(finished, spans)
                drawn |= groups
                learnable |= {number for number, group in groups.items() if self._learnable(group)}
                while rounds < self._config.max_gen_batches:
                    asked_for = self._least_refill(first, end, drawn, learnable)
                    self._ask(stream, end + asked_for - self.next_group)
                    if not asked_for or any(number not in drawn for number in range(first, end)):
                        break
                    rounds = rounds + 1
                    end = end + asked_for
            spans.append(Span("sampler", begun, until))
        everything = [drawn[number] for number in sorted(drawn)]
        kept = [drawn[number] for number in sorted(learnable)]
        # A policy that solves everything leaves no learning signal: the step then trains on all
        # responses, with zero advantages, rather than stopping the run.
        chosen = kept[:wanted] or everything[:wanted]
        metrics = self._metrics(everything, kept, chosen, rounds)
        return Collected(_flat(chosen), _flat(everything), metrics, (first, self.next_group), spans)

    def _ask(self, stream: GroupStream, count: int) -> None:
        if count > 0:
            first = self.next_group
            stream.add(self._order.take(count), first)

    def _scored(self, groups: Sequence[Sequence[Rollout]], spans: list[Span]) -> dict[int, Group]:
        begun = time.perf_counter()
        found = grouped(
            self._scorer.score([one for group in groups for one in group], self._params.max_tokens)
        )
        spans.append(Span("rewards", begun, time.perf_counter()))
        return {group[0].rollout.group: group for group in found}

    def _least_refill(
        self, first: int, end: int, drawn: Mapping[int, Group], learnable: set[int]
    ) -> int:
        """Return the smallest size of the next round, if all groups still open before `end` were
        learnable.
        """
        before = [
            number for number in range(first, end) if number in learnable or number not in drawn
        ]
        missing = self._config.prompts_per_step - len(before)
        if missing > 0:
            return _refill(missing, len(before), end - first)
        return 0

    def _learnable(self, group: Group) -> bool:
        if not self._config.dynamic_sampling:
            return True
        return has_variance([one.reward for one in group if self._counts(one)])

    def _counts(self, one: Scored) -> bool:
        """Return True if the group's baseline includes it: only those decide whether there is
        variance.
        """
        return one.error is None and (any(one.rollout.loss_mask) or not self._rebaseline)

    def _metrics(
        self, drawn: list[Group], kept: list[Group], chosen: list[Group], rounds: int
    ) -> Metrics:
        everything = [one for one in _flat(drawn) if one.rollout.row == 0]  # a session counts once
        scored = [one.reward for one in everything if one.error is None]
        if not scored:
            raise RewardError(
                f"none of {len(everything)} responses got a score; the first: {everything[0].error}"
            )
        rewards = [
            one.reward for one in _flat(chosen) if one.error is None and one.rollout.row == 0
        ] or scored
        lengths = [len(one.rollout.token_ids) for one in everything]
        counted = [[one.reward for one in group if self._counts(one)] for group in drawn]
        flat = [rewards for rewards in counted if not has_variance(rewards)]
        if self._config.samples_per_prompt > 1:
            spread = len(drawn) - len(flat)
        else:
            spread = len(kept)
        solved = sum(bool(rewards) and min(rewards) >= NEARLY_RIGHT for rewards in flat)
        return {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
            "reward/sampler_mean": fmean(scored),
            **_verdicts(everything),
            "rollout/n": len(everything),
            "rollout/n_trained": sum(map(len, chosen)),
            "rollout/prompt_tokens": sum(len(one.rollout.prompt.token_ids) for one in everything),
            "rollout/prompt_tokens_mean": fmean(
                len(one.rollout.prompt.token_ids) for one in everything
            ),
            "rollout/tokens": sum(map(_sampled, everything)),
            "rollout/response_tokens_mean": fmean(lengths),
            "rollout/response_tokens_min": min(lengths),
            "rollout/response_tokens_max": max(lengths),
            "rollout/truncated_fraction": fmean(
                one.rollout.finish_reason == "length" for one in everything
            ),
            "rollout/aborted_fraction": fmean(
                one.rollout.finish_reason == "abort" for one in everything
            ),
            "rollout/logprobs_missing": sum(
                int(np.isnan(one.rollout.logprobs).sum()) for one in everything
            ),
            **top_metrics([one.rollout for one in everything], self._config.top_logprobs),
            "rollout/gen_batches": rounds,
            "rollout/groups": len(drawn),
            "rollout/groups_kept": spread,
            "rollout/groups_kept_fraction": spread / len(drawn),
            "rollout/groups_all_right": solved,
            "rollout/groups_all_wrong": sum(map(bool, flat)) - solved,
            **session_metrics(
                [one.rollout.session for one in everything if one.rollout.session is not None]
            ),
        }


def _sampled(one: Scored) -> int:
    session = one.rollout.session
    if session is None:
        return len(one.rollout.token_ids)
    return sum(turn.tokens for turn in session.turns)


def _verdicts(scored: Sequence[Scored]) -> Metrics:
    """Return counts of verdicts, and means of the rewards' other numbers."""
    count = Counter(one.verdict for one in scored)
    details: dict[str, list[float]] = {}
    for one in scored:
        for name, value in one.details.items():
            details.setdefault(name, []).append(value)
    # names in the recipe first
    named = sorted(details, key=lambda name: (not name.startswith("part/"), name))
    return {
        "reward/right": count[Verdict.right],
        "reward/wrong": count[Verdict.wrong],
        "reward/no_answer": count[Verdict.no_answer],
        "reward/timeouts": count[Verdict.timeout],
        "reward/errors": sum(one.error is not None for one in scored),
        **{f"reward/{name}": fmean(details[name]) for name in named[:MOST_DETAILS]},
    }


def grouped(scored: Sequence[Scored]) -> list[Group]:
    """Group adjacent responses to the same prompt."""
    return [list(group) for _, group in groupby(scored, key=lambda one: one.rollout.group)]


def _flat(groups: Sequence[Group]) -> list[Scored]:
    return [one for group in groups for one in group]


def _refill(missing: int, kept: int, drawn: int) -> int:
    """Return the number of groups to draw so that about `missing` of them survive the filter."""
    survival = max(0.25, kept / drawn) if drawn else 1.0
    return math.ceil(missing / survival)


def sampling_params(config: RolloutSection, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(
        samples=config.samples_per_prompt,
        max_tokens=config.max_response_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=-1 if config.top_k is None else config.top_k,
        stop_token_ids=stop_token_ids,
        candidates=config.candidates,
        top_logprobs=config.top_logprobs.max,
        top_mass=config.top_logprobs.mass,
    )


@dataclass(frozen=True)
class Scorer:
    """Rewards with DAPO's length penalty. The loss excludes responses without a score, and
    truncated ones if the recipe filters them.
    """

    config: RewardSection
    pool: RewardPool
    tokenizer: FolderTokenizer

    def score(self, rollouts: Sequence[Rollout], max_tokens: int) -> list[Scored]:
        texts = self._ends(rollouts)
        scores = self._scores(rollouts, texts)
        lengths = [len(rollout.token_ids) for rollout in rollouts]
        reward = self.config
        penalties = overlong_penalty(lengths, max_tokens, reward.overlong_buffer).tolist()
        scored = []
        for rollout, text, result, penalty in zip(rollouts, texts, scores, penalties, strict=True):
            penalty = 0.0 if rollout.session else penalty
            filtered = reward.overlong_filter and rollout.finish_reason == "length"
            if filtered or result.error is not None:
                rollout = replace(
                    rollout, loss_mask=written(len(rollout.token_ids), by_policy=False)
                )
            total = result.reward + penalty if result.error is None else 0.0
            scored.append(
                Scored(
                    rollout,
                    total,
                    result.error,
                    text,
                    result.verdict,
                    result.details,
                    result.answer,
                )
            )
        return scored

    def _scores(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> list[Score]:
        """Score the rollouts; a session without a reward is judged by its last response."""
        own = [session_score(one.session) if one.session else None for one in rollouts]
        tasks = [
            _task(one, text)
            for one, text, found in zip(rollouts, texts, own, strict=True)
            if found is None
        ]
        judged = iter(self.pool.score(tasks) if tasks else ())
        return [next(judged) if found is None else found for found in own]

    def _ends(self, rollouts: Sequence[Rollout]) -> list[str]:
        """Return the responses' text; of long ones only the end, if the reward reads no more."""
        characters = reads_last(self.config.weights)
        if characters is None:
            return self.tokenizer.decode([rollout.token_ids for rollout in rollouts])
        tokens = LONGEST_CHARACTER * characters
        texts = self.tokenizer.decode([rollout.token_ids[-tokens:] for rollout in rollouts])
        short = [
            at
            for at, (rollout, text) in enumerate(zip(rollouts, texts, strict=True))
            if len(rollout.token_ids) > tokens and len(text) <= characters  # of tokens without text
        ]
        for at, text in zip(
            short, self.tokenizer.decode([rollouts[at].token_ids for at in short]), strict=True
        ):
            texts[at] = text
        return texts

    def whole(self, scored: Sequence[Scored]) -> list[Scored]:
        """Return scored rollouts with their complete text, for the record."""
        if reads_last(self.config.weights) is None:
            return list(scored)
        texts = self.tokenizer.decode([one.rollout.token_ids for one in scored])
        return [replace(one, text=text) for one, text in zip(scored, texts, strict=True)]

    def pieces(self, one: Scored) -> list[str]:
        """Return the text of each token."""
        return self.tokenizer.decode([[token] for token in one.rollout.token_ids])


def _task(rollout: Rollout, text: str) -> Task:
    prompt = rollout.prompt
    session = rollout.session
    finish: str = rollout.finish_reason
    text = session.answer if session else text
    # also if this branch ended differently
    if session and session.turns and session.end != "length":
        finish = session.turns[-1].finish_reason
    tokens = sum(turn.tokens for turn in session.turns) if session else len(rollout.token_ids)
    return Task(prompt.row, text, finish, prompt.prompt_key, prompt.answer_key, tokens)


class ImmediateStream:
    """GroupStream in which one blocking call serves all prompts."""

    def __init__(self, generate: Callable[[Sequence[Prompt], int], Sequence[Rollout]]) -> None:
        """`generate`: called with prompts, and the group of the first."""
        self._generate = generate
        self._rollouts: list[Rollout] = []

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        self._rollouts += self._generate(prompts, first_group)

    def finished(self) -> list[list[Rollout]]:
        rollouts = self._rollouts
        self._rollouts = []
        return [list(group) for _, group in groupby(rollouts, key=lambda one: one.group)]

    def close(self) -> None:
        pass


class DatasetResponses:
    """Sampler that returns the data set's own responses: supervised warm start runs the same
    loop.
    """

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self._tokenizer = tokenizer

    def stream(self, params: SamplingParams, *, seed: int, step: int) -> ImmediateStream:
        def answers(prompts: Sequence[Prompt], first: int) -> list[Rollout]:
            return [
                self._answer(one, params, group, step) for group, one in enumerate(prompts, first)
            ]

        return ImmediateStream(answers)

    def _answer(self, prompt: Prompt, params: SamplingParams, group: int, step: int) -> Rollout:
        answer = self._tokenizer.encode(str(prompt.answer))
        token_ids = (*answer, params.stop_token_ids[0])[: params.max_tokens]
        return Rollout(
            prompt=prompt,
            group=group,
            sample=0,
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            loss_mask=written(len(token_ids)),
            finish_reason="stop" if len(answer) < params.max_tokens else "length",
            policy_version=step - 1,
        )
