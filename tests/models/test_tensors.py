"""A named tensor counts its bytes as torch does; its memory goes round, and never while somebody
looks at it.
"""

import threading
from collections.abc import Callable

import pytest
import torch

from megatron_rl.models import tensors
from megatron_rl.models.tensors import DTYPES, TensorSpec, torch_dtype


def in_a_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            tensors.reuse_memory()
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
        one = tensors.empty_tensor((1024, 4096), dtype)
        place = one.data_ptr()
        view = one[1:].t()
        del one
        other = tensors.empty_tensor((1024, 4096), dtype)
        assert other.data_ptr() != place
        del view
        assert tensors.empty_tensor((1000, 4096), dtype).data_ptr() == place
        assert other.shape == (1024, 4096)
        assert other.dtype == dtype

    in_a_thread(work)


def test_the_smallest_that_fits_is_given_and_what_is_free_and_too_small_is_let_go() -> None:
    def work() -> None:
        small, large = (tensors.empty_tensor((size << 20,), torch.uint8) for size in (4, 8))
        places = small.data_ptr(), large.data_ptr()
        del small, large
        kept = [
            tensors.empty_tensor((3 << 20,), torch.uint8),
            tensors.empty_tensor((5 << 20,), torch.uint8),
        ]
        assert tuple(one.data_ptr() for one in kept) == places
        del kept
        tensors.empty_tensor((16 << 20,), torch.uint8)
        assert [block.nbytes for block in tensors._THREAD.blocks] == [16 << 20]

    in_a_thread(work)


def test_nothing_is_kept_of_a_very_large_tensor_or_unless_a_thread_has_asked_for_it() -> None:
    def work() -> None:
        tensors.empty_tensor((tensors.LARGE + 1,), torch.uint8)
        assert tensors._THREAD.blocks == []

    in_a_thread(work)
    tensors.empty_tensor((1 << 22,), torch.uint8)
    assert not hasattr(tensors._THREAD, "blocks")


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_are_torch_s(name: str) -> None:
    tensor = torch.zeros(3, 5, dtype=torch_dtype(name))
    spec = TensorSpec.of("x", tensor)
    assert spec == TensorSpec("x", name, (3, 5))
    assert spec.nbytes == tensor.nbytes


def test_names_beyond_the_table_are_no_dtypes() -> None:
    with pytest.raises(ValueError, match="'nn' is not one of int64"):
        torch_dtype("nn")
