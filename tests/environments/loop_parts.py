"""Tools and an environment that answer by a script, for this project's loop and for others': they
import neither.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

Conversation = dict[str, Any]


def say(text: str) -> str:
    """Says what it is told."""
    return text


def fail(text: str) -> str:
    """Fails with what it is told."""
    raise ValueError(text)


TOOLS = (say, fail)
for tool in TOOLS:
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }
    function = {"name": tool.__name__, "description": tool.__doc__, "parameters": parameters}
    tool.schema = {"type": "function", "function": function}  # type: ignore[attr-defined]


class Tools:
    """An environment of this project's that has the tools."""

    tools = TOOLS

    def reset(self, row: Mapping[str, Any]) -> Any:
        return row["prompt"]

    def step(self, answer: Any) -> Any:
        return (), 1.0, True


class Lines:
    """An environment of SkyRL-Gym's that says the next messages of `extras["said"]` after each
    answer.
    """

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        self.said = list(extras["said"])

    def init(self, prompt: Any) -> Any:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        said, done = (self.said.pop(0), False) if self.said else ([], True)
        return {"observations": said, "reward": float(done), "done": done, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def each(
    script: dict[str, Any], one: Callable[[int, Conversation], Awaitable[Any]], names: str
) -> list[dict[str, Any]]:
    """What a loop has made of each conversation, one after the other, or how it failed. `names`: of
    its own fields.
    """

    async def told(number: int, conversation: Conversation) -> dict[str, Any]:
        try:
            made = await one(number, conversation)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        fields = zip(("prompt", "tokens", "mask", "logprobs"), names.split(), strict=True)
        return {ours: getattr(made, theirs) for ours, theirs in fields}

    async def all_of_them() -> list[dict[str, Any]]:
        return [
            await told(number, conversation)
            for number, conversation in enumerate(script["conversations"])
        ]

    return asyncio.run(all_of_them())


def played(play: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """`python FILE SCRIPTS RESULT`: what a loop has made of each conversation of each script, as
    JSON.
    """
    scripts, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps([play(one) for one in json.loads(scripts.read_text())]))
