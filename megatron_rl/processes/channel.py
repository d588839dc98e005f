"""Framed msgpack messages over a socket pair of parent and child, with deadlines and a maximum
size; arrays as raw bytes. No pickle.
"""

import socket
import struct
import time
from array import array
from typing import Any

import msgspec
import numpy as np

LENGTH = struct.Struct("<Q")  # length prefix of a message
AT_ONCE = 64 << 10  # bytes
TRAVELLING = ("h", "i", "f", "|u1", "<i2", "<u2", "<f2")  # array types that can be sent


class ChannelClosed(ConnectionError):
    """The other side has closed the channel."""


class Refused(Exception):
    """Invalid request, or one that cannot be carried out: another engine would refuse it, too."""


def encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_as_bytes)


def decode(content: bytes | msgspec.Raw, kind: Any) -> Any:
    """Decode a message of this type; DecodeError, UnicodeError or RecursionError if it is
    invalid.
    """
    return msgspec.msgpack.decode(content, type=kind, dec_hook=_from_bytes)


def _as_bytes(value: Any) -> Any:
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _from_bytes(kind: Any, value: Any) -> Any:
    name, *shape, content = value
    if not isinstance(content, bytes) or name not in TRAVELLING:
        raise ValueError(f"no array of {name!r:.20}")
    if kind is array:
        return array(name, content)
    return np.frombuffer(content, name).reshape(*shape)


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._ahead = b""  # received together with the previous message

    def send(self, *messages: Any, timeout_s: float | None = None) -> None:
        """Send a message. TimeoutError if the other side does not read it in time; the channel is
        then unusable.
        """
        encoded = map(encode, messages)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(
                b"".join(part for data in encoded for part in (LENGTH.pack(len(data)), data))
            )
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None, largest: int | None = None) -> Any:
        """Receive a message of at most `largest` bytes. After TimeoutError or DecodeError the
        channel is unusable.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        if largest is not None and length > largest:
            raise msgspec.DecodeError(f"a message of {length} bytes, expected at most {largest}")
        content = self._read(length, deadline)
        try:
            return msgspec.msgpack.decode(content)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from None

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int, deadline: float | None) -> bytearray:
        buffer = bytearray(count)
        done = min(count, len(self._ahead))
        buffer[:done] = self._ahead[:done]
        self._ahead = self._ahead[done:]
        view = memoryview(buffer)[done:]
        while view:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            try:
                if len(view) >= AT_ONCE:
                    received = self._socket.recv_into(view)
                else:  # small messages arrive several at a time
                    piece = self._socket.recv(AT_ONCE)
                    received = min(len(piece), len(view))
                    view[:received] = piece[:received]
                    self._ahead = piece[received:]
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if received == 0:
                raise ChannelClosed("end of stream")
            view = view[received:]
        return buffer
