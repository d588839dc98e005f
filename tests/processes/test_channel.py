"""Messages between the sampler's two processes."""

import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.engine.generation import completed
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


NAN = np.nan


@pytest.mark.parametrize(
    ("tokens", "positions", "logprobs"),
    [
        ([5, 6], [{5: -0.5}, {6: -1.5}], [-0.5, -1.5]),
        ([7, 8], [{9: -9.0, 7: -2.0}, {}], [-2.0, NAN]),  # more than the sampled token, then none at all
        ([], [], []),
        ([4], None, [NAN]),
    ],
)
def test_a_sample_keeps_its_tokens_logprobs_and_what_is_missing_is_marked(tokens, positions, logprobs):
    told = positions and [{token: SimpleNamespace(logprob=value) for token, value in one.items()} for one in positions]
    flat = None if told is None else Flat(told)
    drawn = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason="stop", weight_versions=None)
    found = completed(drawn, candidates=0, now=3)
    assert np.frombuffer(found["tokens"], np.int32).tolist() == tokens
    np.testing.assert_array_equal(np.frombuffer(found["logprobs"], np.float32), np.float32(logprobs))
    assert (found["finish"], found["spans"]) == ("stop", [(3, 0)])


def test_an_answer_that_was_given_up_and_its_policy_versions():
    spans = [SimpleNamespace(version="2", end=1, start=0), SimpleNamespace(version="3", end=3, start=1)]
    drawn = SimpleNamespace(token_ids=[4, 5, 6], logprobs=None, finish_reason=None, weight_versions=spans)
    found = completed(drawn, candidates=0, now=3)
    assert (found["finish"], found["spans"]) == ("abort", [(2, 1), (3, 2)])
