"""Verifier `exact_match`: right where the response, stripped, is the row's answer."""

from megatron_rl.rewards.task import Judgement, Task, right_or_wrong, verifier
from megatron_rl.types import Verdict


@verifier
def reward(task: Task) -> Judgement:
    response = task.response.strip()
    if response:
        return right_or_wrong(response == task.answer.strip(), response)
    return Judgement(Verdict.no_answer)
