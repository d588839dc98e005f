"""Transfers to a device in one copy; a rank beside a sleeping engine frees memory."""

from typing import Any

import pytest
import torch
from helpers import lone_rank
from learner_cases import make_batch, make_targets, with_kept
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config.schema import Sleep, Transport
from megatron_rl.learner.device import GIVEN, keep_returnable
from megatron_rl.learner.learner import loss_columns, loss_inputs
from megatron_rl.learner.modules.packing import pack
from megatron_rl.learner.shares import DataPlane

HOST = torch.device("cpu")
DEVICE = torch.device("meta")  # shapes and no content
OF_HOSTS = ("padded_index_X", "packed_index_S", "blanks")


class Copies(TorchDispatchMode):
    """Counts what is moved to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and "device" in (kwargs or {})
        return func(*args, **(kwargs or {}))


def _check_moved(moved: Any, here: Any, stays: tuple[str, ...]) -> None:
    for name, value in vars(here).items():
        there = getattr(moved, name)
        if isinstance(value, torch.Tensor) and name not in stays:
            assert there.device == DEVICE, name
            assert (there.dtype, there.shape) == (value.dtype, value.shape), name
        else:
            assert there is value or there == value, name


@pytest.mark.parametrize("kept", [False, True])
def test_a_pack_moves_in_one_copy(kept: bool) -> None:
    made = pack(with_kept(make_batch()) if kept else make_batch(), [0, 2, 3, 7])
    with Copies() as copies:
        moved = made.to(DEVICE)
    assert copies.count == 1
    _check_moved(moved, made, OF_HOSTS)
    assert (moved.kept_NK is None) is (not kept)


@pytest.mark.parametrize("anchored", [False, True])
def test_the_rows_of_a_microbatch_move_in_one_copy(anchored: bool) -> None:
    batch = make_batch()
    batch = batch.with_matrices(
        turns_BT=torch.arange(batch.mask_BT.shape[1]).expand_as(batch.mask_BT) // 3
    )
    targets = make_targets(batch, torch.rand(batch.mask_BT.shape) if anchored else None)
    mine = pack(batch, [1, 4, 6])
    logprobs_bT = torch.zeros(3, mine.horizon)
    share = DataPlane(lone_rank()).loss_rows(targets, [[*range(len(batch))]])
    there = mine.to(DEVICE)
    with Copies() as copies:
        moved = loss_inputs(loss_columns(share, there, DEVICE), there, logprobs_bT)
    assert copies.count == 1
    here = loss_inputs(loss_columns(share, mine, HOST), mine, logprobs_bT)
    rows = list(mine.rows)
    _check_moved(moved, here, ("logprobs_BT",))
    assert torch.equal(here.turns_BT, batch.turns_BT[rows, : mine.horizon])
    assert torch.equal(here.prompt_ids_B, targets.batch.groups_B[rows])
    assert (here.anchor_logprobs_BT is None) is (not anchored)


def test_only_ranks_beside_a_sleeping_engine_return_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settings(sleep: Sleep, transport: Transport) -> str:
        keep_returnable(sleep, transport)
        return torch._C._accelerator_getAllocatorSettings()

    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)
    try:
        assert settings(Sleep.discard, Transport.ipc) == ""
        assert settings(Sleep.none, Transport.file) == ""
        monkeypatch.setenv(GIVEN[0], "max_split_size_mb:512")
        assert settings(Sleep.discard, Transport.file) == ""
        monkeypatch.delenv(GIVEN[0])
        assert settings(Sleep.discard, Transport.file) == "expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings("")
