"""Integration of TRL's tools and environments (`tools`, `environment_factory` of GRPOTrainer).

An environment is a class whose public methods are tools; `reset(**row)` may return a text, which is
added to the last user message, and `get_reward()` the reward. A reward function that reads
`environments` is named by `reward`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from transformers.utils import get_json_schema

from megatron_rl.environments.environment import Answer, Step, as_messages
from megatron_rl.rewards.functions import imported

NO_TOOLS = ("reset", "get_reward")


class TRLEnvironment:
    """A conversation with TRL's tools. `target`: an `environment_factory`; `tools`: functions."""

    def __init__(
        self,
        target: str | None = None,
        tools: Sequence[str] = (),
        reward: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._environment: Any = None
        self._reward = imported(reward) if reward else None
        self._row: dict[str, Any] = {}
        self._answer = ""
        functions = [imported(name) for name in tools]
        if target:
            self._environment = imported(target)(**(arguments or {}))
            functions += [
                method
                for name, method in inspect.getmembers(self._environment, inspect.ismethod)
                if name not in NO_TOOLS and not name.startswith("_")
            ]
        self.tools = [_tool(function) for function in functions]

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._row = dict(row)
        said = None if self._environment is None else self._environment.reset(**row)
        return _opening(row.get("prompt", ""), said)

    def step(self, answer: Answer) -> Step:
        self._answer = answer.content
        return Step(done=True)

    async def close(self) -> float | None:
        """The reward of the environment's own, and that of the function which looks at it."""
        if not self._row:
            return None
        found = []
        if hasattr(self._environment, "get_reward"):
            found.append(await _settled(self._environment.get_reward()))
        if self._reward is not None:
            columns = {name: [value] for name, value in self._row.items()}
            given = {
                "prompts": columns.pop("prompt", [None]),
                "completions": [[{"role": "assistant", "content": self._answer}]],
                "environments": [self._environment],
            }
            columns.pop("completion", None)
            found.append((await _settled(self._reward(**columns, **given)))[0])
        rewards = [float(one) for one in found if one is not None]
        return sum(rewards) if rewards else None


def _opening(prompt: Any, said: Any) -> list[dict[str, Any]]:
    """The prompt of a row, with what an environment says at first added to its last message."""
    messages = as_messages(prompt)
    if not said:
        return messages
    if not isinstance(said, str):
        return messages + as_messages(said)
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": said}]
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + said}]


def _tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with TRL's schema for chat templates; its result is converted by `str`."""

    @wraps(function)
    async def called(**arguments: Any) -> str:
        return str(await _settled(function(**arguments)))

    called.schema = get_json_schema(function)  # type: ignore[attr-defined]
    return called


async def _settled(returned: Any) -> Any:
    if inspect.isawaitable(returned):
        return await returned
    return returned
