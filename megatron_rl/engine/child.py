"""The process that owns vLLM's engine: `python -m megatron_rl.engine.child FD PARENT_PID CORES`.

Answers requests from the socket FD: while prompts are open, between two of the engine's steps. Lives exactly as long
as its parent: the kernel kills it when the parent dies, and the end of the socket's stream does the same where the
kernel does not. It ignores Ctrl-C and USR1: its parent decides what they mean.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rl.engine.engine import Engine
from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.processes.process import die_with_parent, end_own_group, keep_to, leave_to_the_driver
from megatron_rl.processes.stacks import show_on_request

REQUESTS: dict[str, Callable[..., Any]] = {
    name: getattr(Engine, name)
    for name in (
        "health", "generate", "abandon", "activations", "routed_experts", "init_weight_transfer_engine",
        "start_weight_update", "update_weights", "await_weight_update", "finish_weight_update", "sleep", "wake",
    )
}  # fmt: skip
Request = dict[str, Any]
Requests = queue.SimpleQueue[Request]


def read_requests(channel: Channel, requests: Requests) -> None:
    """A thread, so that the parent's end is noticed in the middle of a long step."""
    try:
        while True:
            requests.put(channel.receive())
    except ChannelClosed:
        end_own_group()


def arrived(requests: Requests, wait: bool) -> list[Request]:
    found = [requests.get()] if wait else []
    while not requests.empty():
        found.append(requests.get())
    return found


def answer(channel: Channel, request: Request, call: Callable[[], Any]) -> bool:
    """Reply to a request; whether it succeeded. What `generate` begins is replied to as it finishes."""
    try:
        value = call()
    except Exception as error:
        traceback.print_exc()
        refuse(channel, request["id"], error)
        return False
    if request["method"] != "generate":
        channel.send({"id": request["id"], "value": value})
    return True


def refuse(channel: Channel, request: int, error: Exception) -> None:
    channel.send({"id": request, "error": {"type": type(error).__name__, "message": str(error)}})


def take(channel: Channel, request: Request, engine: Engine) -> None:
    method, arguments = request["method"], request["arguments"]
    if method == "shutdown":
        engine.shutdown()
        os._exit(0)
    if method == "generate":
        arguments = {"request": request["id"], **arguments}
    answer(channel, request, lambda: REQUESTS[method](engine, **arguments))


def serve(channel: Channel) -> None:
    requests: Requests = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(channel, requests), daemon=True).start()
    made: list[Engine] = []

    def start(arguments: dict[str, Any]) -> dict[str, Any]:
        made.append(Engine(arguments))
        return made[0].health()

    first = requests.get()
    if not answer(channel, first, lambda: start(first["arguments"])):
        return
    (engine,) = made
    waiting: list[Request] = []
    while True:
        waiting += arrived(requests, wait=not waiting and not engine.writes)
        those_now, waiting = waiting, []
        for request in those_now:
            if engine.must_wait(request["method"]):
                waiting.append(request)
            else:
                take(channel, request, engine)
        for number, reply in engine.step():
            if isinstance(reply, Exception):
                refuse(channel, number, reply)
            else:
                channel.send({"id": number, "value": reply})


def main() -> None:
    descriptor, parent, cores = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent(parent)
    leave_to_the_driver()
    show_on_request()
    keep_to(cores)
    try:
        serve(Channel(socket.socket(fileno=descriptor)))
    except ChannelClosed:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        end_own_group()  # workers included; nothing here is worth an orderly shutdown's seconds


if __name__ == "__main__":
    main()
