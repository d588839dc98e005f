"""Process of an embedded vLLM engine: `python -m megatron_rl.engine.child FD PARENT_PID CORES`;
`run` is the main function of a server's process, too (server.py).

The socket FD brings the engine's arguments and then requests (messages.py); the process ends when
it closes. The kernel ends the process with its parent, too. CORES, such as `0,1`, binds it to a
share of the machine; `all` does not. It ignores Ctrl-C and USR1, which its parent handles.
"""

import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from megatron_rl.engine.engine import Engine
from megatron_rl.engine.service import Frame, Service, described
from megatron_rl.processes import process
from megatron_rl.processes.channel import Channel, ChannelClosed


class ParentLine:
    """Socket to the parent, for requests and their replies."""

    def __init__(self, descriptor: int) -> None:
        self._channel = Channel(socket.socket(fileno=descriptor))

    def receive(self) -> list[Frame]:
        return self._channel.receive()

    def send(self, frames: list[Frame]) -> None:
        self._channel.send(frames)

    def pass_on(self, service: Service) -> None:
        """Forward requests in a thread, so that the parent's end is noticed in the middle of a long
        step.
        """
        try:
            while True:
                service.ask(self, self.receive())
        except ChannelClosed:
            process.end_own_group()


def run(
    descriptor: int,
    parent: int,
    cores: str,
    opened: Callable[[Engine, Service], None] = lambda *_: None,
) -> None:
    """Run the process from start to end. `opened`: called once the engine is up, before the parent
    is notified.
    """
    process.die_with_parent(parent)
    process.leave_to_the_driver()
    process.keep_to(cores)
    try:
        _serve(ParentLine(descriptor), opened)
    except ChannelClosed:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        process.end_own_group()  # workers included; an orderly shutdown takes seconds


def _serve(line: ParentLine, opened: Callable[[Engine, Service], None]) -> None:
    (first,) = line.receive()
    service = Service()
    threading.Thread(target=line.pass_on, args=[service], daemon=True).start()
    try:
        engine = Engine(first["arguments"])
        opened(engine, service)
    except Exception as error:
        traceback.print_exc()
        line.send([{"id": first["id"], "error": described(error)}])
        return
    status: dict[str, Any] = engine.status()
    line.send([{"id": first["id"], "value": status}])
    service.run(engine)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
