"""push over two real gloo processes (TP2): what is written, what is reported, and that errors reach
every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from push_rank import NAME, RankWeights, Receiver, sync_of
from spawned import run_ranks

from megatron_rl.config.schema import Format
from megatron_rl.quantization.formats import BY_FORMAT
from megatron_rl.weight_sync import manifest
from megatron_rl.weight_sync.file_transport import SyncDir, manifest_path
from megatron_rl.weight_sync.manifest import WeightSyncError


@pytest.mark.ranks
@pytest.mark.fault("one of two ranks' versions is refused", "both ranks send it again")
def test_two_ranks(tmp_path: Path) -> None:
    codes, (driver, other) = run_ranks("push_rank", tmp_path, tmp_path / "sync")
    assert codes == [0, 0]
    assert driver["equal"]
    assert driver["calls"] == ["init", "start", "update", "finish 3"]
    assert "lm_head.weight" not in driver["names"]  # tied
    # the last version stays, for an engine that starts again
    assert driver["left"] == [
        "owner.lock",
        "v00000003",
    ]
    assert driver["metrics"]["sync/version"] == other["metrics"]["sync/version"] == 3
    assert driver["metrics"]["sync/tensors"] == len(driver["names"])
    assert 0.001 < driver["metrics"]["sync/quant_error_max"] < 0.02
    assert driver["metrics"]["sync/clamped_fraction"] == 0
    for first_failure, resent, next_resent in (driver["resent"], other["resent"]):
        assert "misshapen tensor X" in first_failure
        assert (resent, next_resent) == (1, 0)
    refused, diverged, blocked, healthy = zip(driver["errors"], other["errors"], strict=True)
    assert "misshapen tensor X" in refused[0]
    assert "misshapen tensor X" in refused[1]
    assert all("rank 1" in error and NAME in error for error in diverged)
    assert all("rank 0" in error and "v00000008" in error for error in blocked)
    assert healthy == ("", "")
    assert driver["gone"]


class Fleet(Receiver):
    """Notes what it is sent, or refuses it."""

    def take(self, info: Any) -> None:
        if self.refuse:
            raise WeightSyncError("corrupt tensor X")
        self.info = info

    def manifests(self) -> dict[str, manifest.Manifest]:
        """Return the last accepted update's manifests by format; raise if files are missing."""
        infos = self.info[BY_FORMAT]
        return {
            name: manifest.read(manifest_path(Path(one["directory"]), one["policy_version"], 0))
            for name, one in infos.items()
        }


def test_a_mixed_fleet_gets_every_format_and_can_read_the_last_version_until_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = []  # asked for
    monkeypatch.setattr(SyncDir, "require_free", lambda _, nbytes: room.append(nbytes))
    formats = [Format.int8, Format.none, Format.int8]
    client = Fleet()
    sync = sync_of(RankWeights(0, 1), client, tmp_path, engines=3, formats=formats)
    report = sync.push(1)
    found = client.manifests()
    assert {name: one.format for name, one in found.items()} == {"none": "none", "int8": "int8"}
    scales = {
        name: sum(entry.name.endswith("_scale") for entry in one.tensors)
        for name, one in found.items()
    }
    assert scales["none"] == 0 < scales["int8"]
    assert report.tensors == sum(len(one.tensors) for one in found.values())
    assert report.nbytes == sum(sum(one.files.values()) for one in found.values())
    assert room == [sum(room[1:]), *room[1:]]
    assert len(room) == 3

    client.refuse = 2
    with pytest.raises(WeightSyncError, match="corrupt tensor X"):
        sync.push(2)
    assert {one.policy_version for one in client.manifests().values()} == {1}
    assert not list(sync.transport.directory.glob("*/v00000002"))

    client.refuse = 0
    sync.push(3)
    assert {one.policy_version for one in client.manifests().values()} == {3}
    assert not list(sync.transport.directory.glob("*/v00000001"))
    sync.close()
    assert list(tmp_path.iterdir()) == []
