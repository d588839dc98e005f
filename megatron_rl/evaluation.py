"""Evaluator of a held-out set: samples responses, scores them without a length penalty, computes
accuracy, pass@k, maj@k.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from megatron_rl.config.evaluation import HeldOut
from megatron_rl.config.schema import VERIFIERS
from megatron_rl.rollout.collect import Group, Scorer, grouped
from megatron_rl.sampler.generation import GenerationSource
from megatron_rl.types import Metrics, Prompt, SamplingParams, Verdict


class Evaluator:
    """Evaluates a policy on a held-out set, with fixed seeds; greedy responses repeat exactly."""

    def __init__(
        self, about: HeldOut, prompts: Sequence[Prompt], sampler: GenerationSource, scorer: Scorer
    ) -> None:
        self.about = about
        self.prompts = prompts[: about.max_prompts]
        self._sampler = sampler
        self._scorer = replace(scorer, config=replace(about.reward, overlong_buffer=0))
        self._params = SamplingParams(
            samples=about.samples,
            max_tokens=about.max_tokens,
            temperature=about.temperature,
            top_p=about.top_p,
            stop_token_ids=scorer.tokenizer.stop_token_ids,
        )

    def evaluate(self) -> Metrics:
        return self.metrics(self._answered(self.prompts, 0))

    def in_parts(self, answers: int, done: Callable[[int], None]) -> list[Group]:
        """Sample and score the set, about `answers` responses at a time; `done` gets the count
        after each.
        """
        size = max(1, answers // self.about.samples)
        groups = list[Group]()
        for start in range(0, len(self.prompts), size):
            groups += self._answered(self.prompts[start : start + size], start)
            done(len(groups))
        return groups

    def _answered(self, prompts: Sequence[Prompt], first: int) -> list[Group]:
        rollouts = self._sampler.generate(prompts, self._params, seed=0, first_group=first)
        # one of a conversation's branches
        last = {(one.group, one.sample): one for one in rollouts}.values()
        return grouped(self._scorer.score(list(last), self._params.max_tokens))

    def metrics(self, groups: Sequence[Group]) -> Metrics:
        everything = [one for group in groups for one in group]
        verdicts = Counter(one.verdict for one in everything)
        found = dict(self._estimates(groups)) | {
            "reward_mean": fmean(one.reward for one in everything),
            "n": len(groups),
            "response_tokens_mean": fmean(len(one.rollout.token_ids) for one in everything),
            "truncated_fraction": fmean(
                one.rollout.finish_reason == "length" for one in everything
            ),
            "no_answer_fraction": verdicts[Verdict.no_answer] / len(everything),
            "errors": sum(one.error is not None for one in everything),
        }
        return {f"{self.about.prefix}{name}": value for name, value in found.items()}

    def _estimates(self, groups: Sequence[Group]) -> Iterator[tuple[str, float]]:
        """Yield the metrics of the set. A response without a score counts as wrong."""
        right = [[one.verdict == Verdict.right for one in group] for group in groups]
        each: dict[str, list[float]] = {"accuracy": [fmean(verdicts) for verdicts in right]}
        for k in self.about.ks:
            each[f"pass@{k}"] = [pass_at(k, len(verdicts), sum(verdicts)) for verdicts in right]
        if self.about.samples > 1 and self._votes(groups):
            answers = [[one.answer for one in group] for group in groups]
            each[f"maj@{self.about.samples}"] = list(map(majority, answers, right))
        for name, values in each.items():
            mean, error = mean_and_error(values)
            yield name, mean
            if error is not None:
                yield f"{name}_stderr", error

    def _votes(self, groups: Sequence[Group]) -> bool:
        """True if the reward reports the answers it found: verifiers do, functions may."""
        first = next(iter(self.about.reward.weights))
        return first in VERIFIERS or any(
            one.answer is not None for group in groups for one in group
        )


def pass_at(k: int, n: int, right: int) -> float:
    """Share of the choices of k among n samples with a right one: the unbiased pass@k."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Score of the most frequent answer; a tie counts by the share of its right answers.

    None has no vote: no answer was found in the response, or it was cut off. Without votes: 0.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_right)
    most = max(map(len, votes.values()), default=0)
    leaders = [fmean(verdicts) for verdicts in votes.values() if len(verdicts) == most]
    return fmean(leaders) if leaders else 0.0


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean of a value per prompt, and its standard error; None for a single prompt."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
