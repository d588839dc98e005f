"""Blocks of memory go round, and never while somebody looks at them."""

import threading
from collections.abc import Callable

import pytest
import torch

from megatron_rl.models import memory


def in_a_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            memory.reuse()
            work()
        except BaseException as error:  # the thread that waits raises it
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_block_is_given_again_once_its_tensor_and_all_views_are_gone(dtype: torch.dtype) -> None:
    def work() -> None:
        one = memory.empty((1024, 4096), dtype)
        place, view = one.data_ptr(), one[1:].t()
        del one
        other = memory.empty((1024, 4096), dtype)
        assert other.data_ptr() != place
        del view
        assert memory.empty((1000, 4096), dtype).data_ptr() == place
        assert other.shape == (1024, 4096)
        assert other.dtype == dtype

    in_a_thread(work)


def test_the_smallest_that_fits_is_given_and_what_is_free_and_too_small_is_let_go() -> None:
    def work() -> None:
        small, large = (memory.empty((size << 20,), torch.uint8) for size in (4, 8))
        places = small.data_ptr(), large.data_ptr()
        del small, large
        kept = [memory.empty((3 << 20,), torch.uint8), memory.empty((5 << 20,), torch.uint8)]
        assert tuple(one.data_ptr() for one in kept) == places
        del kept
        memory.empty((16 << 20,), torch.uint8)
        assert [block.nbytes for block in memory._THREAD.blocks] == [16 << 20]

    in_a_thread(work)


def test_nothing_is_kept_unless_a_thread_has_asked_for_it() -> None:
    memory.empty((1 << 22,), torch.uint8)
    assert not hasattr(memory._THREAD, "blocks")


def test_what_is_very_large_is_not_kept() -> None:
    def work() -> None:
        memory.empty((memory.LARGE + 1,), torch.uint8)
        assert memory._THREAD.blocks == []

    in_a_thread(work)
