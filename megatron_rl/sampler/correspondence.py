"""Requests to another process from several threads; every reply goes to whoever asked."""

from __future__ import annotations

import queue
import threading
from typing import Any

from megatron_rl.processes.channel import Channel, ChannelClosed

Replies = queue.SimpleQueue[dict[str, Any] | None]  # None: no more will come


class Correspondence:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._expected: dict[int, Replies] = {}  # by request
        self._numbering, self._sending = threading.Lock(), threading.Lock()
        self._number = 0
        self._over = False

    def send(self, method: str, arguments: dict[str, Any], replies: Replies) -> int:
        """The request's number, which its replies carry. Raises ChannelClosed where none can come any more."""
        with self._numbering:
            if self._over:
                raise ChannelClosed("the end of the stream was seen before")
            self._number += 1
            number = self._number
            self._expected[number] = replies
        with self._sending:
            self._channel.send({"id": number, "method": method, "arguments": arguments})
        return number

    def deliver(self) -> None:
        """Until the end of the stream: for a thread of its own, so that the other side never waits for a reader."""
        try:
            while True:
                self._hand_over(self._channel.receive())
        except OSError:  # a ChannelClosed, or what a channel says that was closed meanwhile
            pass
        with self._numbering:
            self._over = True
            left = {id(replies): replies for replies in self._expected.values()}
        for replies in left.values():
            replies.put(None)

    def _hand_over(self, reply: dict[str, Any]) -> None:
        with self._numbering:
            if "error" not in reply and _more_will_come(reply["value"]):
                replies = self._expected.get(reply["id"])
            else:
                replies = self._expected.pop(reply["id"], None)
        if replies is not None:
            replies.put(reply)

    def forget(self, numbers: list[int]) -> None:
        """No replies to these are expected any more."""
        with self._numbering:
            for number in numbers:
                self._expected.pop(number, None)

    def close(self) -> None:
        self._channel.hang_up()


def _more_will_come(value: Any) -> bool:
    return isinstance(value, dict) and value.get("left", 0) > 0
