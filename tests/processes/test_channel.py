"""Messages between the sampler's two processes."""

import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.engine.generation import pack
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
    messages = [{"id": i, "data": bytes([i]) * (1 << 20), "list": [1.5, None, "ä"]} for i in range(3)]
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


class Flat(list):
    """As vLLM's flat logprobs: positions as dictionaries, and the same in columns."""

    def __init__(self, positions):
        super().__init__(positions)
        self.token_ids = [token for position in positions for token in position]
        self.logprobs = [entry.logprob for position in positions for entry in position.values()]


def completion(tokens, positions, finish="stop"):
    flat = (
        None if positions is None else Flat([{t: SimpleNamespace(logprob=v) for t, v in p.items()} for p in positions])
    )
    return SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=finish)


def test_pack_keeps_the_sampled_token_s_logprob_and_marks_what_is_missing():
    packed = pack(
        [
            completion([5, 6], [{5: -0.5}, {6: -1.5}]),
            completion([7, 8], [{9: -9.0, 7: -2.0}, {}]),  # more than the sampled token, then none at all
            completion([], []),
            completion([4], None, finish=None),
        ]
    )
    assert packed["lengths"] == [2, 2, 0, 1]
    assert packed["finish"] == ["stop", "stop", "stop", "abort"]
    assert np.frombuffer(packed["tokens"], np.int32).tolist() == [5, 6, 7, 8, 4]
    logprobs = np.frombuffer(packed["logprobs"], np.float32)
    np.testing.assert_array_equal(logprobs, np.float32([-0.5, -1.5, -2.0, np.nan, np.nan]))
