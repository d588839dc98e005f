"""Environment: interface of multi-turn tasks; loads a recipe's class or agent, checks replies.

A subclass begins a conversation (`reset`) and replies to a response (`step`); `tools` are plain
typed Python functions, called when the policy calls them. An agent is a coroutine function
`run(base_url, row, **settings)`, or a class with such a method whose constructor takes the
settings: it runs the conversation itself, through OpenAI's API. See docs/guides/environments.md.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_rl.types import LARGEST_NUMBER

Message = Mapping[str, Any]  # in the form of chat templates: role, content, ...
Tool = Callable[..., Any]
Agent = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


@dataclass(frozen=True)
class Answer:
    """The policy's response in a turn without tool calls."""

    text: str  # without special tokens
    content: str  # as in the conversation
    turn: int = 0
    finish_reason: str = "stop"  # length: truncated
    token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Step:
    """Reply to a response. `step` may also return its first three or four fields as a tuple."""

    messages: Sequence[Message] | str = ()  # a text: a user message
    reward: float | None = None  # None: no reward for this turn
    done: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)  # logged as metrics
    advantage: float | None = None  # of this turn's tokens, with environment.credit: environment


class Environment:
    """Conversation in a process of its own; the constructor receives the recipe's `settings`."""

    tools: Sequence[Tool] = ()

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | str:
        """Return the first messages, from a row of the data set."""
        return row["prompt"]

    def step(self, answer: Answer) -> Step | tuple[Any, ...]:
        """Reply to a response without tool calls. By default the conversation ends, and the
        recipe's reward scores it.
        """
        return Step(done=True)

    def close(self) -> float | None:
        """End the conversation; a returned number is added to the last turn's reward."""
        return None


@dataclass(frozen=True)
class Loaded:
    """Class or agent that `environment.name` names."""

    make: Callable[..., Environment] | None = None
    agent: Callable[..., Agent] | None = None  # an agent with these settings


def load(name: str) -> Loaded:
    """Load `package.module:Class` or `path/file.py:function`; LookupError describes the problem."""
    from megatron_rl.rewards.functions import imported

    found = imported(name)
    if inspect.iscoroutinefunction(found):
        return Loaded(agent=lambda **settings: partial(found, **settings))
    if isinstance(found, type) and inspect.iscoroutinefunction(getattr(found, "run", None)):
        return Loaded(agent=lambda **settings: found(**settings).run)
    if not callable(found):
        raise LookupError(
            f"{name!r} is {type(found).__name__}: neither a class nor a coroutine function"
        )
    if isinstance(found, type) and not all(
        callable(getattr(found, one, None)) for one in ("reset", "step")
    ):
        raise LookupError(
            f"{name!r} has no methods reset and step: derive it from {__name__}.Environment"
        )
    return Loaded(make=found)


def as_step(returned: Any) -> Step:
    """Convert the return value of `step` to a Step; TypeError if invalid."""
    if isinstance(returned, Step):
        step = returned
    elif isinstance(returned, tuple) and 3 <= len(returned) <= 4:
        step = Step(*returned)
    else:
        raise TypeError(
            f"step returned {type(returned).__name__}; return Step, or (messages, reward, done)"
        )
    reward = None if step.reward is None else finite(step.reward)
    return Step(step.messages, reward, bool(step.done), step.numbers or {}, step.advantage)


def finite(number: Any) -> float:
    if not abs(found := float(number)) <= LARGEST_NUMBER:
        raise ValueError(f"{found:g} is not a finite number of at most {LARGEST_NUMBER:g}")
    return found


def as_messages(given: Any) -> list[dict[str, Any]]:
    """Convert the messages of `reset` or `step`: a text becomes a user message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = [dict(one) for one in given or ()]
    for one in messages:
        if not isinstance(one.get("role"), str):
            raise TypeError(f"a message has no role: {str(one)[:100]}")
        content = one.get("content", "")
        if not (content is None or isinstance(content, str | list)):
            raise TypeError(f"the content of a message is {type(content).__name__}, not text")
        if isinstance(content, list) and all(
            isinstance(each, dict) and each.get("type") == "text" for each in content
        ):
            one["content"] = "".join(each["text"] for each in content)
    return messages
