"""Starts processes for user code (rewards, environments) on a socket; limits memory and output."""

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from megatron_rl.config import ConfigError
from megatron_rl.processes import heartbeat
from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.processes.process import for_the_driver_alone
from megatron_rl.rewards.functions import places

START_TIMEOUT_S = 300.0  # a busy machine, and imports from a cold shared file system
MEMORY_BYTES = 8 << 30  # of a worker, and of each process that it starts
MOST_BYTES = 1 << 20  # that the workers of a pool print into the run's log, all together
LOG_ENDS = f"\nuser code has printed {MOST_BYTES >> 20} MiB: what it prints from here on is left out\n".encode()
LOG_CHUNK = 64 << 10


class StartTimeout(ConfigError):
    """User code that was not imported in time; another start may succeed."""

    hint = "Start the run again when the machine is less busy, or import less in the file."


def user_process(
    module: str, name: str, log: "RewardLog", variables: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process for the user's code, and this side of the socket by which it is reached."""
    ours, theirs = socket.socketpair()
    with theirs, for_the_driver_alone():
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                module,
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log.descriptor,  # what a reward prints is no answer
            stderr=log.descriptor,
            env=variables,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the run, which ends its workers itself
        )
    heartbeat.own(name, process)
    return process, ours


def first_reply(
    channel: Channel, start: Mapping[str, Any], largest: int, key: str, name: str | None
) -> dict[str, Any]:
    """Return the first reply of the process for `name`, once the user's module is imported."""
    path = [os.getcwd(), *filter(None, sys.path), *places()]
    try:
        channel.send(
            {**start, "path": path, "memory_bytes": MEMORY_BYTES}, timeout_s=START_TIMEOUT_S
        )
        reply = msgspec.convert(channel.receive(START_TIMEOUT_S, largest), dict[str, Any])
    except TimeoutError:
        raise StartTimeout(
            f"{key}: the process for {name} did not start within {START_TIMEOUT_S:g} s: the "
            "machine is busy, or importing the file takes that long"
        ) from None
    except (ChannelClosed, msgspec.DecodeError):
        reply = {"error": f"the process for {name} died at its start"}
    if reply.get("error"):
        raise ConfigError(f"{key}: {reply['error']}")
    return reply


def as_json(content: Mapping[str, Any]) -> bytes:
    """Encode the user's values as JSON; values that JSON does not know, as text."""
    try:
        return msgspec.json.encode(content, enc_hook=str)
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        return json.dumps(content, default=str).encode()


class RewardLog:
    """Output of rewards and environments in the run's log, limited to protect the disk."""

    def __init__(self) -> None:
        self._read, write = os.pipe()  # neither is inherited: a worker is given a copy
        self._end = io.FileIO(write, "wb")
        self._thread = threading.Thread(target=self._relay, name="reward-log", daemon=True)
        self._thread.start()

    @property
    def descriptor(self) -> int:
        return self._end.fileno()

    def _relay(self) -> None:
        """Copy the workers' output; after the limit, discard it: a full pipe would block them."""
        left = MOST_BYTES
        while data := os.read(self._read, LOG_CHUNK):
            if left > 0:
                left -= len(data)
                _print(data if left > 0 else data[: left or None] + LOG_ENDS)
        os.close(self._read)

    def close(self) -> None:
        self._end.close()
        # a program that a reward has left behind may still hold the other end
        self._thread.join(1.0)


def _print(data: bytes) -> None:
    with suppress(OSError):  # a full disk is no matter of the rewards
        while data:
            data = data[os.write(2, data) :]
