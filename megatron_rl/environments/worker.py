"""Environment processes: a fork server imports the user's module once; its children serve one
environment at a time (reset, step, tool, close), or run an agent.

`python -m megatron_rl.environments.worker DESCRIPTOR PARENT_PID`. The fork server receives a socket
for each child, which replies there, one request at a time, until it closes. A call that hangs or
crashes does not affect other sessions.
"""

import asyncio
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from megatron_rl.environments.environment import (
    Agent,
    Answer,
    Environment,
    Loaded,
    as_messages,
    as_step,
    finite,
    load,
)
from megatron_rl.environments.tools import ToolBox, as_text
from megatron_rl.files import JsonObject
from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.processes.process import adopt_orphans, die_with_parent
from megatron_rl.rewards.functions import for_metrics
from megatron_rl.rewards.worker import begun

MOST_ERROR = 500  # characters
MOST_TEXT = 1 << 20  # bytes of a tool's or a step's text: longer text is cut


class TooLate(BaseException):
    """The call has reached its time limit. Not caught by the user's `except Exception`."""


def main(descriptor: int, parent: int) -> None:
    """Run the fork server."""
    control, channel, start = begun(descriptor, parent)
    try:
        loaded = load(start["name"])
        about = _about(loaded, start["settings"])
    except BaseException as error:  # the user's code
        channel.send({"error": _text_of(error)})
        return
    channel.send(about)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    itself = os.getpid()
    while True:
        _, (descriptor, *_), _, _ = socket.recv_fds(control, 1, 1)
        connection = socket.socket(fileno=descriptor)
        if os.fork() == 0:
            control.close()
            _live(connection, itself, loaded, start["settings"])
        connection.close()


def _about(loaded: Loaded, settings: Mapping[str, Any]) -> JsonObject:
    """Return the kind (agent or environment) and the tools of the loaded name; instantiate an
    environment as a check.
    """
    if loaded.make is None:
        assert loaded.agent is not None
        inspect.signature(loaded.agent(**settings)).bind("", {})
        return {"agent": True, "tools": []}
    environment = loaded.make(**settings)
    try:
        return {"agent": False, "tools": ToolBox(getattr(environment, "tools", ())).schemas}
    finally:
        _settle(asyncio.new_event_loop(), _closed(environment))


def _live(
    connection: socket.socket, fork_server: int, loaded: Loaded, settings: Mapping[str, Any]
) -> None:
    """Run a forked process."""
    try:
        os.setsid()
        die_with_parent(fork_server)
        adopt_orphans()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, _raise_too_late)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        channel = Channel(connection)
        channel.send({"pid": os.getpid()})
        Conversation(loaded, settings).serve(channel)
    except (ChannelClosed, KeyboardInterrupt):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(0)


def _raise_too_late(number: int, frame: FrameType | None) -> None:
    raise TooLate


class Conversation:
    """Environment of one conversation, or its agent; handles requests about it."""

    def __init__(self, loaded: Loaded, settings: Mapping[str, Any]) -> None:
        self._loaded = loaded
        self._settings = settings
        self._environment: Environment | None = None
        self._agent: Agent | None = None
        self._tools = ToolBox(())
        self._loop = asyncio.new_event_loop()

    def serve(self, channel: Channel) -> None:
        itself = os.getpid()
        while True:
            request = channel.receive()
            try:
                signal.setitimer(signal.ITIMER_REAL, request["seconds"])
                try:
                    reply = {"value": self._answer(json.loads(request["what"]))}
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except TooLate:
                # the previous loop may have been stopped in any state
                self._loop = asyncio.new_event_loop()
                reply = {"error": f"not done within {request['seconds']:g} s"}
            except BaseException as error:  # the user's code: any exception is its result
                reply = {"error": _text_of(error)}
            if os.getpid() != itself:
                os._exit(0)  # a child that the user's code has forked
            channel.send(reply | {"id": request["id"]})

    def _answer(self, what: JsonObject) -> Any:
        answers: JsonObject = {
            "reset": self._reset,
            "step": self._step,
            "tool": self._tool,
            "run": self._run,
        }
        return (answers | {"close": self._close})[what.pop("do")](**what)

    def _reset(self, row: Mapping[str, Any]) -> Any:
        assert self._loaded.make is not None
        self._close()
        self._environment = self._loaded.make(**self._settings)
        self._tools = ToolBox(getattr(self._environment, "tools", ()))
        messages = as_messages(self._settled(self._environment.reset(row)))
        return {"messages": _plain(messages), "tools": self._tools.schemas}

    def _step(self, answer: JsonObject) -> Any:
        assert self._environment is not None
        step = as_step(self._settled(self._environment.step(Answer(**answer))))
        if step.done and not step.messages:
            messages = []
        else:
            messages = as_messages(step.messages)
        if not step.done and not messages:
            raise ValueError(
                "step returned no message and done=False: the policy has no message to respond to"
            )
        advantage = None if step.advantage is None else finite(step.advantage)
        about = {
            "reward": step.reward,
            "done": bool(step.done),
            "numbers": for_metrics(step.numbers),
        }
        return {"messages": _plain(messages), "advantage": advantage, **about}

    def _tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool; a failure becomes text for the policy."""
        try:
            text = _cut(as_text(self._settled(self._tools.bound(name, arguments)())))
        except TooLate:
            self._loop = asyncio.new_event_loop()
            return {
                "text": f"error: {name} was stopped: it took too long",
                "failed": True,
                "late": True,
            }
        except BaseException as error:  # the user's code: SystemExit becomes a reply, too
            return {"text": f"error: {_text_of(error)}", "failed": True}
        return {"text": text, "failed": False}

    def _run(self, base_url: str, key: str, row: Mapping[str, Any]) -> Any:
        assert self._loaded.agent is not None
        self._agent = self._agent or self._loaded.agent(**self._settings)
        # read by OpenAI's clients
        os.environ |= {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": key,
        }
        found = self._settled(self._agent(base_url, row))
        if isinstance(found, Mapping):
            others = dict(found)
        else:
            others = {"reward": found}
        score = others.pop("score", None)
        reward = others.pop("reward", score)
        return {
            "reward": None if reward is None else finite(reward),
            "numbers": for_metrics(others),
        }

    def _close(self) -> Any:
        """Return the reward that the environment adds at the end."""
        environment = self._environment
        self._environment = None
        if environment is None:
            reward = None
        else:
            reward = self._settled(_closed(environment))
        return {"reward": None if reward is None else finite(reward)}

    def _settled(self, returned: Any) -> Any:
        return _settle(self._loop, returned)


def _settle(loop: asyncio.AbstractEventLoop, returned: Any) -> Any:
    if inspect.isawaitable(returned):
        return loop.run_until_complete(returned)
    return returned


def _closed(environment: Any) -> Any:
    close = getattr(environment, "close", None)
    return close() if callable(close) else None


def _plain(messages: list[JsonObject]) -> list[JsonObject]:
    """Return messages that can be sent: text cut to a bound, everything else as JSON."""
    cut = [
        one
        | {
            "content": _cut(one["content"])
            if isinstance(one.get("content"), str)
            else one.get("content") or ""
        }
        for one in messages
    ]
    return json.loads(json.dumps(cut, default=str))


def _cut(text: str) -> str:
    """Return text that can be encoded, of at most `MOST_TEXT` bytes."""
    return text[:MOST_TEXT].encode("utf-8", "replace")[:MOST_TEXT].decode("utf-8", "ignore")


def _text_of(error: BaseException) -> str:
    try:
        if isinstance(error, LookupError | ValueError | TypeError) and str(error):
            text = str(error)
        else:
            text = ""
        text = text or "".join(traceback.format_exception_only(error)).strip()
    except BaseException:
        text = type(error).__name__
    return _cut(text)[:MOST_ERROR]


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (KeyboardInterrupt, ChannelClosed, ConnectionError, ValueError):
        pass
