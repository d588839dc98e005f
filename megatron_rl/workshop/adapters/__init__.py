"""Integrations of other projects' environments, unchanged: `environment.name` names their class.

The user's own code is named in `environment.settings`: `target: package.module:Class` and its
arguments. docs/environments_adapters.md lists the versions tried.
"""

from typing import Any

from megatron_rl.environments.environment import as_messages


def opening(prompt: Any, said: Any, between: str = "\n\n") -> list[dict[str, Any]]:
    """The prompt of a row, with what an environment says at first behind its last message."""
    messages = as_messages(prompt)
    if not said:
        return messages
    if not isinstance(said, str):
        return messages + as_messages(said)
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": said}]
    if messages[-1]["content"]:
        text = f"{messages[-1]['content']}{between}{said}"
    else:
        text = said
    return [*messages[:-1], {**messages[-1], "content": text}]
