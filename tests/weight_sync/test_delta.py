"""Patches: any two byte strings, any chain of versions; what is put together is what was sent, or
it is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from versions import checked, flip, write_chain

from megatron_rl.models.tensors import TensorSpec
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync.delta import (
    LONGEST_GAP,
    Sent,
    apply_patch,
    changed_bytes,
    make_patch,
)
from megatron_rl.weight_sync.file_reader import Staged, stage
from megatron_rl.weight_sync.manifest import WeightSyncError

NAME = "model.layers.0.mlp.up_proj.weight"


@given(
    st.integers(0, 300),
    st.integers(0, 2**31),
    st.floats(0, 0.4),
)
@settings(max_examples=60, deadline=None)
def test_a_patch_turns_the_old_bytes_into_the_new(size: int, seed: int, fraction: float) -> None:
    generator = np.random.default_rng(seed)
    old = generator.integers(0, 256, size, dtype=np.uint8)
    new = np.where(
        generator.random(size) < fraction, generator.integers(0, 256, size, dtype=np.uint8), old
    )
    assert changed_bytes(old, new).tolist() == np.flatnonzero(old != new).tolist()
    patch = make_patch(old, new, 1)
    if patch is None:
        assert 3 * (old != new).sum() >= size
        return
    assert patch.changed_values == (old != new).sum() == patch.changes
    target = old.copy()
    apply_patch(target, patch.data, patch.changes)
    assert np.array_equal(target, new)


def test_changes_may_lie_further_apart_than_a_gap_can_say() -> None:
    old = np.zeros(10 * LONGEST_GAP, dtype=np.uint8)
    new = old.copy()
    where = [0, 1, LONGEST_GAP + 1, 3 * LONGEST_GAP + 5, len(new) - 1]
    new[where] = 7
    patch = make_patch(old, new, 2)
    assert patch.changes > len(where)
    assert patch.changed_values == 4  # of two bytes each
    apply_patch(old, patch.data, patch.changes)
    assert np.array_equal(old, new)
    with pytest.raises(ValueError, match="writes at"):
        apply_patch(old[:100], patch.data, patch.changes)


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """As training makes them: few INT8 values change from version to version, other tensors
    entirely or not at all.
    """
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(
        -127,
        127,
        (64, 48),
        dtype=torch.int8,
        generator=generator,
    )
    for past in range(1, version + 1):
        generator.manual_seed(past)
        rows, columns = torch.randint(0, 48, (2, 20), generator=generator)
        weight[rows, columns] = past
    return {
        NAME: weight,
        NAME + "_scale": torch.full((64, 1), 0.5 + version),
        "model.norm.weight": torch.ones(5).bfloat16(),
    }


EXPECTED = {name: TensorSpec.of(name, tensor) for name, tensor in tensors_of(0).items()}


def read(directory: Path, version: int) -> Staged:
    return checked(stage(directory, version, 1, EXPECTED, -1))


@pytest.fixture
def three_versions(tmp_path: Path) -> Path:
    sent = Sent()
    whole, patch, _ = write_chain(tmp_path, map(tensors_of, range(3)), sent=sent)
    assert patch.nbytes < whole.nbytes / 3
    assert sent.changed == pytest.approx(64 + 20, abs=3)  # some places are drawn twice
    assert sent.values == 64 * 48 + 64 + 5
    return tmp_path


def test_any_version_is_put_together_from_the_whole_one(three_versions: Path) -> None:
    for version in (2, 0, 1):  # each by a receiver that has just started
        staged = read(three_versions, version)
        for name, tensor in tensors_of(version).items():
            assert torch.equal(staged.tensors[name], tensor), (version, name)


@pytest.mark.parametrize("version", [0, 1], ids=["base", "gap"])
def test_a_patch_with_a_wrong_byte_is_refused(three_versions: Path, version: int) -> None:
    (file,) = transport.version_directory(three_versions, version).glob("*.bin")
    flip(file, 0)
    with pytest.raises(WeightSyncError, match=f"corrupt tensor {NAME}"):
        read(three_versions, 2)


def test_files_that_are_used_again_hold_the_new_version_alone(tmp_path: Path) -> None:
    def write(version: int, rows: int) -> Path:
        tensor = torch.full((rows, 48), version, dtype=torch.int8)
        transport.write_version(tmp_path, version, [(NAME, tensor)], format="int8")
        return transport.version_directory(tmp_path, version)

    (first,) = write(0, 64).glob("*.bin")
    inode = first.stat().st_ino
    assert transport.spare_bytes(tmp_path) == 0
    transport.write_over(tmp_path, 0)
    assert transport.spare_bytes(tmp_path) == 64 * 48
    (second,) = write(1, 10).glob("*.bin")
    assert (second.stat().st_ino, second.stat().st_size) == (inode, 480)
    staged = stage(
        tmp_path,
        1,
        1,
        {NAME: TensorSpec(NAME, "int8", (10, 48))},
        0,
    )
    assert bool((staged.tensors[NAME] == 1).all())
