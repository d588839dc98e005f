"""Transfers to a device in one copy; a rank beside a sleeping engine frees memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from learner_cases import make_batch, make_targets, with_kept
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config.schema import Sleep, Transport
from megatron_rl.learner.device import GIVEN, enable_expandable_segments
from megatron_rl.learner.learner import on_device
from megatron_rl.learner.modules.packing import pack

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
    """With the segments that a loss sums over."""
    batch = make_batch()
    batch = replace(batch, turns_N=batch.responses.place_N.int() // 3)
    targets = make_targets(batch, torch.rand(batch.mask_N.shape) if anchored else None)
    targets = replace(targets, turns_N=batch.turns_N)
    rows = torch.tensor([6, 1, 4])
    with Copies() as copies:
        moved = on_device(targets, rows.tolist(), DEVICE)
    assert copies.count == 1
    here = targets.rows(rows)
    for name in ("turns", "responses"):
        # without what they have derived
        _check_moved(
            vars(moved).pop(name),
            replace(getattr(here, name)),
            (),
        )
    _check_moved(moved, targets.rows(rows), ())
    answers = batch.turns_N.split(batch.response_lengths_B.tolist())
    assert torch.equal(here.turns_N, torch.cat([answers[row] for row in rows]))
    assert torch.equal(here.groups_B, targets.groups_B[rows])
    assert (here.anchor_logprobs_N is None) is (not anchored)


def test_only_ranks_beside_a_sleeping_engine_return_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settings(sleep: Sleep, transport: Transport) -> str:
        enable_expandable_segments(sleep, transport)
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
