"""A version that is refused, or not written, for a reason that may not come again: sent once more,
and counted.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from push_rank import SHARD, RankWeights, Receiver, sync_of
from versions import flip

from megatron_rl.config.schema import Format
from megatron_rl.quantization.formats import BY_FORMAT
from megatron_rl.weight_sync import file_push
from megatron_rl.weight_sync.file_transport import version_directory
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.push import WeightSync

Damage = Callable[[Path], Any]


def flip_the_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def the(pattern: str, damage: Damage) -> Damage:
    return lambda folder: damage(next(folder.glob(pattern)))


DAMAGES: dict[str, Damage] = {
    "a bit of a bucket flips": the("*.bin", flip_the_middle),
    "a bucket is lost": the("*.bin", Path.unlink),
    "a bit of the manifest flips": the("*.json", flip_the_middle),
    "the manifest is lost": the("*.json", Path.unlink),
    "the whole version is lost": shutil.rmtree,
}


class Unlucky(Receiver):
    """A receiver whose next versions are damaged before it looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.damages: list[Damage] = []

    def take(self, info: Any) -> None:
        info = info.get(BY_FORMAT, {}).get("int8", info)
        if self.damages:
            self.damages.pop(0)(version_directory(Path(info["directory"]), info["policy_version"]))
        super().take(info)


def embedded(folder: Path, **settings: Any) -> tuple[Unlucky, WeightSync]:
    receiver = Unlucky()
    return receiver, sync_of(RankWeights(0, 1), receiver, folder, **settings)


@pytest.mark.fault(
    "a version is damaged on its way", "it is sent again once, which is counted and said"
)
@pytest.mark.parametrize("formats", [[Format.int8] * 2, [Format.int8, Format.none]])
@pytest.mark.parametrize("what", DAMAGES)
def test_what_was_damaged_is_sent_again(tmp_path: Path, formats: list[Format], what: str) -> None:
    receiver, sync = embedded(tmp_path, engines=2, formats=formats)
    assert sync.push(1).metrics()["sync/resent"] == 0
    receiver.damages = [DAMAGES[what]]
    report = sync.push(2)
    assert report.metrics()["sync/resent"] == 1
    assert report.first_failure
    assert receiver.version == 2
    assert sync.push(3).first_failure == ""


@pytest.mark.fault("a version is damaged twice", "the run ends, and says that it was sent twice")
def test_it_is_sent_again_once_only(tmp_path: Path) -> None:
    receiver, sync = embedded(tmp_path)
    sync.push(1)
    receiver.damages = [DAMAGES["a bit of a bucket flips"], DAMAGES["the manifest is lost"]]
    with pytest.raises(WeightSyncError, match=r"is missing.*sent twice.*corrupt tensor"):
        sync.push(2)
    assert not receiver.damages
    assert receiver.version == 1
    assert sync.push(3).metrics()["sync/resent"] == 0


@pytest.mark.fault("a patch is damaged, or what it builds on", "the whole version is sent")
@pytest.mark.parametrize(
    ("victim", "damage", "said"),
    [
        (1, "a bit of a bucket flips", "corrupt tensor"),
        (1, "the whole version is lost", "a patch of version 1"),
    ],
)
def test_a_damaged_patch_is_followed_by_the_whole(
    tmp_path: Path, victim: int, damage: str, said: str
) -> None:
    receiver, sync = embedded(tmp_path, full_every=4)
    whole = sync.push(1).nbytes
    sync._learner.parameters[SHARD][:, 1] *= -1
    receiver.damages = [lambda folder: DAMAGES[damage](version_directory(folder.parent, victim))]
    report = sync.push(2)
    assert report.nbytes == whole
    assert said in report.first_failure
    assert receiver.version == 2
    assert [path.name for path in sync.transport.directory.glob("v*")] == ["v00000002"]
    assert sync.push(3).nbytes < whole


@pytest.mark.fault("the file system refuses a write once", "the version is sent again")
def test_what_was_not_written_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sync = embedded(tmp_path)
    sync.push(1)

    def fail_once(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file_push, "write_version", fail_once)
    report = sync.push(2)
    assert "Input/output" in report.first_failure
    assert receiver.version == 2


def test_an_unrecoverable_update_is_sent_once(tmp_path: Path) -> None:
    receiver, sync = embedded(tmp_path)
    sync.push(1)
    receiver.dead = True
    with pytest.raises(RuntimeError, match=r"process ended$"):
        sync.push(2)
    receiver.dead = False
    weights = dict(sync._learner.named_parameters())
    weights[SHARD][0, 0] = float("nan")
    with pytest.raises(WeightSyncError, match=r"has diverged$"):
        sync.push(3)
    assert not receiver.refusals
