"""Replies reach whoever asked, from whichever thread, and the end reaches everybody."""

import queue
import threading

import pytest

from megatron_rl.processes.channel import Channel, ChannelClosed, channel_pair
from megatron_rl.sampler.correspondence import Correspondence

PATIENCE_S = 120.0


@pytest.fixture
def line():
    ours, theirs = channel_pair()
    line = Correspondence(ours)
    reader = threading.Thread(target=line.deliver, daemon=True)
    reader.start()
    yield line, Channel(theirs)
    line.close()
    reader.join(PATIENCE_S)
    assert not reader.is_alive(), "a reader is woken by the end"


def test_replies_out_of_order_find_their_way(line):
    line, theirs = line
    waiting = [queue.SimpleQueue() for _ in range(50)]
    threads = [threading.Thread(target=line.send, args=("ask", {"of": i}, waiting[i])) for i in range(50)]
    for thread in threads:
        thread.start()
    requests = [theirs.receive(PATIENCE_S) for _ in range(50)]
    assert len({request["id"] for request in requests}) == 50
    for request in reversed(requests):
        theirs.send({"id": request["id"], "value": request["arguments"]["of"]})
    assert [replies.get(timeout=PATIENCE_S)["value"] for replies in waiting] == list(range(50))


def test_an_answer_in_parts_ends_with_the_one_that_leaves_nothing(line):
    line, theirs = line
    replies = queue.SimpleQueue()
    number = line.send("ask", {}, replies)
    for left in (2, 1, 0, 0):
        theirs.send({"id": number, "value": {"left": left}})
    other = queue.SimpleQueue()
    theirs.send({"id": line.send("ask", {}, other), "value": None})
    assert other.get(timeout=PATIENCE_S)["value"] is None
    assert [replies.get(timeout=PATIENCE_S)["value"]["left"] for _ in range(3)] == [2, 1, 0]
    assert replies.empty(), "what nobody expects is dropped"


def test_the_end_reaches_everybody_once(line):
    line, theirs = line
    mine, other = queue.SimpleQueue(), queue.SimpleQueue()
    for replies in (mine, mine, other):
        line.send("ask", {}, replies)
    theirs.close()
    assert (mine.get(timeout=PATIENCE_S), other.get(timeout=PATIENCE_S)) == (None, None)
    assert mine.empty()
    with pytest.raises(ChannelClosed):
        line.send("ask", {}, mine)
