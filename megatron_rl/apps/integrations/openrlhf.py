r"""Integration of OpenRLHF's agents (AgentInstanceBase) as environments of a run.

OpenRLHF's prompts and feedback are raw text that includes the marks of the chat template; here they
are messages. `feedback` is a regular expression that finds the message in the text, such as
`user\n(.*?)<\|im_end\|>` (its first group; all of the text without one, or without a match).
"""

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.environment import Answer, Step, as_messages
from megatron_rl.rewards.functions import for_metrics, imported


class OpenRLHFEnvironment:
    """A conversation with an AgentInstance. `label`: the column of the row that is its label."""

    def __init__(self, target: str, label: str = "label", feedback: str | None = None) -> None:
        self._make = imported(target)
        self._label = label
        self._feedback = re.compile(feedback, re.DOTALL) if feedback else None
        self._agent: Any = None
        # what OpenRLHF calls observation_text; the label
        self._seen = ""
        self._given = None

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._agent = self._make()
        self._given = row.get(self._label)
        messages = as_messages(row["prompt"])
        prompt = "\n".join(str(one.get("content") or "") for one in messages)
        found = await self._agent.reset({"observation": prompt, "label": self._given})
        self._seen = found["observation"]
        if self._seen == prompt:
            return messages
        return as_messages(self._found(self._seen))

    async def step(self, answer: Answer) -> Step:
        states = {
            "observation_text": self._seen,
            "action_text": answer.text,
            "label": self._given,
            "sampling_params": None,
        }
        found = await self._agent.step(states)
        said = found["environment_feedback"]
        self._seen += answer.text + said
        numbers = for_metrics({"score": found.get("scores"), **(found.get("extra_logs") or {})})
        done = bool(found["done"])
        return Step(() if done else self._found(said), float(found["rewards"]), done, numbers)

    def _found(self, text: str) -> str:
        match = self._feedback.search(text) if self._feedback else None
        return match[1] if match else text
