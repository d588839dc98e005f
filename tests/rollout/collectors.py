"""A collector of answers and scores that a test has written."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollouts import rollout

from megatron_rl.config.schema import RewardSection, RolloutSection
from megatron_rl.data.prompts import Dataset, PromptOrder
from megatron_rl.rewards.task import Score, Task
from megatron_rl.rollout.collect import Collector, ImmediateStream, Scorer
from megatron_rl.types import Prompt, Rollout, SamplingParams, Verdict


class Words:
    """A token is a letter."""

    stop_token_ids = (0,)

    def encode(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        return [ord(letter) for letter in str(prompt)]

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        return ["".join(map(chr, row)) for row in token_ids]


class Script:
    """Scripted responses and scores: a word each; `?` has no score, a capital was truncated."""

    def __init__(self, *groups: str) -> None:
        self.groups = list(groups)

    def stream(self, params: SamplingParams, *, seed: int, step: int) -> ImmediateStream:
        return ImmediateStream(
            lambda prompts, first: self.generate(
                prompts, params, seed=seed, first_group=first, step=step
            )
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        first_group: int,
        step: int = 0,
    ) -> list[Rollout]:
        return [
            rollout(
                (ord(word),),
                prompt=prompt,
                group=group,
                sample=at,
                finish_reason="length" if word.isupper() else "stop",
                policy_version=step,
            )
            for group, prompt in enumerate(prompts, first_group)
            for at, word in enumerate(self.groups.pop(0) if self.groups else "nnnn")
        ]

    def score(self, tasks: Sequence[Task]) -> list[Score]:
        return [judged(task.response) for task in tasks]


def judged(word: str) -> Score:
    if word == "?":
        return Score(0.0, Verdict.error, "no score")
    return Score(1.0, Verdict.right) if word in "yY" else Score(0.0, Verdict.wrong)


def collector(
    answers: Any,
    scores: Any,
    rollout: RolloutSection,
    reward: RewardSection | None = None,
    rebaseline: bool = True,
) -> Collector:
    prompts = tuple(Prompt(index, (1,), "1", {}) for index in range(997))
    order = PromptOrder(Dataset(prompts, len(prompts), 0, 0), seed=1)
    scorer = Scorer(reward or RewardSection(), scores, Words())  # type: ignore[arg-type]
    return Collector(rollout, order, answers, scorer, rebaseline=rebaseline, seed=1)
