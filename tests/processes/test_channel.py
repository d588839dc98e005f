"""Messages between the sampler's two processes."""

import socket
import threading

import pytest

from megatron_rl.processes.channel import Channel, ChannelClosed


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


def test_large_messages_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    messages = [
        {
            "id": i,
            "data": bytes([i]) * (1 << 20),
            "list": [1.5, None, "ä"],
        }
        for i in range(3)
    ]
    sender = threading.Thread(target=lambda: [ours.send(message) for message in messages])
    sender.start()
    assert [theirs.receive(120) for _ in messages] == messages
    sender.join()


def test_silence_is_a_timeout_even_in_mid_message(pair):
    ours, theirs = pair
    with pytest.raises(TimeoutError):
        theirs.receive(0.05)  # is to be missed
    ours._socket.sendall(b"\x08\0\0\0\0\0\0\0half")
    with pytest.raises(TimeoutError):
        theirs.receive(0.05)  # is to be missed


def test_the_other_side_s_end_is_noticed(pair):
    ours, theirs = pair
    ours.close()
    with pytest.raises(ChannelClosed):
        theirs.receive(120)
    with pytest.raises(ChannelClosed):
        theirs.send({"data": b"x"})
