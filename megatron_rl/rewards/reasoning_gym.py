"""Verifier `reasoning_gym`: the library's own verifier of the task that made the row; partial
credit is the score.

What stands between `<answer>` tags counts, and all of the response where there are none.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

from megatron_rl.rewards.task import Judgement, Task, verifier
from megatron_rl.types import NEARLY_RIGHT, Verdict

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@cache
def _scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    return reasoning_gym.get_score_answer_fn(name)


@verifier
def reward(task: Task) -> Judgement:
    metadata = task.row["metadata"]
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    tagged = _TAGGED.findall(task.response)
    answer = (tagged[-1] if tagged else task.response).strip()
    if not answer:
        return Judgement(Verdict.no_answer)
    entry = {
        "question": task.row.get("question"),
        "answer": task.row.get(task.answer_key),
        "metadata": metadata,
    }
    score = float(_scorer(metadata["source_dataset"])(answer, entry))
    if score >= NEARLY_RIGHT:
        return Judgement(Verdict.right, answer=answer)
    return Judgement(Verdict.wrong, score or None, answer=answer)
