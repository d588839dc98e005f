"""A thread that paces itself takes its share of a core, and no longer than it must once somebody waits."""

import threading
import time

import pytest

from megatron_rl.processes.threads import Pace

PIECES, PIECE_S = 10, 0.01


def _work(pace: Pace, done: list[float]) -> None:
    for _ in range(PIECES):
        end = time.thread_time() + PIECE_S
        while time.thread_time() < end:
            pass
        pace()
    done.append(time.thread_time())


@pytest.mark.parametrize(("share", "times"), [(0.1, 9.0), (0.5, 1.0), (1.0, 0.0)])
def test_it_rests_as_long_as_its_share_asks(share: float, times: float) -> None:
    pace, worked = Pace(share), list[float]()
    thread = threading.Thread(target=_work, args=(pace, worked))
    thread.start()
    thread.join()
    assert pace.rested >= 0.95 * times * PIECES * PIECE_S
    assert worked[0] >= PIECES * PIECE_S


def test_who_waits_ends_its_rest() -> None:
    pace, worked = Pace(1e-6), list[float]()  # at this pace for a day
    thread = threading.Thread(target=_work, args=(pace, worked))
    thread.start()
    pace.hurry()
    thread.join(60)
    assert worked
