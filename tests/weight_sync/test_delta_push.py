"""Patches (`sync.full_every`) through `push`: what travels, when it is whole, and what a refused
patch leads to.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from push_rank import HF_CONFIG, NAME, SHARD, RankWeights, Receiver, sync_of
from simulated import assert_same_bits, quantized_whole, random_hf

from megatron_rl.config.schema import Format
from megatron_rl.models.shape import ModelShape
from megatron_rl.weight_sync.file_transport import version_directory


class Training:
    """A learner of one rank whose weights move a little before every push."""

    def __init__(self, folder: Path, format: Format = Format.int8) -> None:
        self.receiver = Receiver()
        self.weights = RankWeights(0, 1)
        self.sync = sync_of(self.weights, self.receiver, folder, format, full_every=4)

    def push(self, version: int):
        self.weights.parameters[SHARD][:, version] *= -1
        return self.sync.push(version).metrics()

    def versions(self) -> list[str]:
        return sorted(path.name for path in self.sync.transport.directory.glob("v*"))


@pytest.mark.parametrize("format", [Format.none, Format.int8])
def test_few_bytes_travel_and_all_arrive(tmp_path: Path, format: Format) -> None:
    training = Training(tmp_path, format)
    first = training.push(0)
    assert "sync/changed_fraction" not in first
    rows, _ = training.weights.parameters[SHARD].shape
    for version in range(1, 4):
        metrics = training.push(version)
        assert metrics["sync/bytes"] < first["sync/bytes"] / 10
        values = sum(tensor.numel() for tensor in training.receiver.tensors.values())
        # a scale may move too
        assert metrics["sync/changed_fraction"] == pytest.approx(rows / values, rel=0.1)
    assert training.versions() == ["v00000000", "v00000001", "v00000002", "v00000003"]
    whole = training.push(4)
    assert whole["sync/bytes"] == first["sync/bytes"]
    assert whole["sync/changed_fraction"] < 0.01
    assert training.versions() == ["v00000004"]
    original = random_hf(ModelShape.from_hf(HF_CONFIG))
    original[NAME][:, :5] *= -1
    want = quantized_whole(original, format)
    assert_same_bits(list(training.receiver.tensors.items()), want)
    training.sync.close()


def test_after_a_failure_the_next_version_is_whole(tmp_path: Path) -> None:
    training = Training(tmp_path)
    whole = training.push(0)["sync/bytes"]
    training.push(1)
    training.receiver.dead = True
    with pytest.raises(RuntimeError, match="ended"):
        training.push(2)
    assert not version_directory(training.sync.transport.directory, 2).exists()
    training.receiver = training.sync.transport._sampler = Receiver()
    assert training.push(3)["sync/bytes"] == whole
    assert training.receiver.version == 3


def test_no_version_takes_the_files_of_one_that_it_builds_on(tmp_path: Path) -> None:
    training = Training(tmp_path)
    transport = training.sync.transport
    # of one host: there the next version takes the last one's
    transport._sync = replace(transport._sync, dir=None)
    assert [training.push(version)["sync/resent"] for version in range(6)] == [0] * 6
    assert training.versions() == ["v00000004", "v00000005"]
