"""Reward worker, started by `pool.py`: judges tasks from its channel and sends scores back.

`python -m megatron_rl.rewards.worker DESCRIPTOR PARENT_PID`. Environment processes start the same
way. A reward is user code and may run programs that a model wrote: none of them inherits the
channel, so that nothing but this loop replies.
"""

import hashlib
import json
import os
import re
import resource
import signal
import socket
import sys
import traceback
from typing import Any

from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.processes.process import adopt_orphans, die_with_parent, release
from megatron_rl.rewards.functions import Rewards
from megatron_rl.rewards.task import Score, Task
from megatron_rl.types import Verdict

LONGEST_ANSWER = 64  # bytes
AWAY = re.compile(r"^(Connection\w*Error|TimeoutError|socket\.gaierror): ", re.M)
MAX_ERROR = 500  # characters: a window of replies must fit the channel


def begun(descriptor: int, parent: int) -> tuple[socket.socket, Channel, dict[str, Any]]:
    """Start a process for user code: its connection, channel and first message."""
    die_with_parent(parent)  # a reward that hangs does not see the end of its channel
    adopt_orphans()
    # what it starts may be ended by an interrupt, as usual; the worker itself is not: Slurm signals
    # all of a job step, and the loop's step that is still to be finished needs its scores
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    release(signal.SIGINT)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel = Channel(connection)
    start = channel.receive()
    resource.setrlimit(resource.RLIMIT_DATA, (start["memory_bytes"], start["memory_bytes"]))
    sys.path[:0] = start["path"]
    return connection, channel, start


def main(descriptor: int, parent: int) -> None:
    _, channel, start = begun(descriptor, parent)
    try:
        rewards = Rewards(start["weights"], start["wrong"])
    except LookupError as error:
        channel.send({"error": str(error)})
        return
    channel.send({"ready": True})
    itself = os.getpid()
    while True:
        message = channel.receive()
        score = judge(rewards, message["task"])
        if os.getpid() != itself:
            # a child that the reward has forked and let go on: the channel is not its own
            os._exit(0)
        channel.send({"id": message["id"], "score": score})


def judge(rewards: Rewards, content: bytes) -> Score:
    try:
        judged = rewards.judge(Task(**json.loads(content)))
    except BaseException as error:  # a reward is user code: any exception is its result
        # works even if the exception's own __str__ fails
        text = "".join(traceback.format_exception_only(error)).strip()
        # search the whole chain: a library may have wrapped the connection error
        away = AWAY.search("".join(traceback.format_exception(error))) is not None
        return Score(0.0, Verdict.error, _sendable(text[:MAX_ERROR]), away=away)
    if judged.verdict == Verdict.timeout:
        return Score(0.0, judged.verdict, "the verifier stopped at its own time limit")
    details = {_sendable(name): number for name, number in judged.details.items()}
    answer = None if judged.answer is None else _short(judged.answer)
    return Score(judged.score or 0.0, judged.verdict, details=details, answer=answer)


def _sendable(text: str) -> str:
    """The text without halves of surrogate pairs, which no channel takes."""
    return text.encode("utf-8", "replace").decode()


def _short(answer: str) -> str:
    """The answer, or the hash of a long one."""
    text = _sendable(answer).encode()
    if len(text) <= LONGEST_ANSWER:
        return text.decode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (KeyboardInterrupt, ChannelClosed):
        pass
