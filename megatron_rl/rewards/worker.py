"""One reward worker: `python -m megatron_rl.rewards.worker DESCRIPTOR PARENT_PID`, started by `pool.py`.

The first message names the reward; each further one is a task with a number, which its reply repeats. A reward is user
code and may run programs that a model wrote: none of them inherits the channel, standard input is empty, and what they
print goes to the log. Nothing but this loop can answer.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import socket
import sys

from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.processes.process import adopt_orphans, die_with_parent, release
from megatron_rl.processes.stacks import show_on_request
from megatron_rl.rewards.functions import Reward, resolve

MAX_ERROR = 500  # characters: a window of replies must fit the channel


def main(descriptor: int, parent: int) -> None:
    die_with_parent(parent)  # a reward that hangs does not see the end of its channel
    adopt_orphans()
    show_on_request()
    # what it starts may be ended by an interrupt, as usual; the worker itself is not
    signal.signal(signal.SIGINT, lambda *_: None)
    release(signal.SIGINT)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    channel = Channel(connection)
    start = channel.receive()
    resource.setrlimit(resource.RLIMIT_DATA, (start["memory_bytes"], start["memory_bytes"]))
    sys.path[:0] = start["path"]
    try:
        reward = resolve(start["name"])
    except LookupError as error:
        channel.send({"error": str(error)})
        return
    channel.send({"ready": True})
    while True:
        message = channel.receive()
        channel.send({"id": message["id"], **judge(reward, message["task"])})


def judge(reward: Reward, content: bytes) -> dict[str, float | str]:
    try:
        task = json.loads(content)
        score = float(reward(task["row"], task["answer_key"], task["response"]))
    except Exception as error:  # a reward is user code: whatever it raises is its result
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        return {"error": text.encode("utf-8", "replace").decode()}
    return {"score": score} if math.isfinite(score) else {"error": f"the score is {score}"}


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]))
    except (KeyboardInterrupt, ChannelClosed):
        pass
