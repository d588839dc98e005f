"""Adapters: environments of other projects, used unchanged, each by a class that `environment.name`
names.

What is the user's own stands in `environment.settings`: `target: package.module:Class` and whatever
it is to be given. docs/environments_adapters.md says what each was tried with.
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
