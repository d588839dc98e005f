"""What is loaded is what was sent: files that change between the check and the loading, manifests that are altered."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from test_file_transport import TENSORS, VICTIM, edit, entry_of, read, write

from megatron_rl.engine.file_reader import Staged, stage
from megatron_rl.weight_sync import manifest
from megatron_rl.weight_sync.delta import Sent
from megatron_rl.weight_sync.file_transport import version_directory, write_version
from megatron_rl.weight_sync.manifest import Manifest, WeightSyncError

TWINS = {name: torch.full((4, 4), value).bfloat16() for name, value in (("left.weight", 1.0), ("right.weight", 2.0))}


def staged_patch(directory: Path) -> Staged:
    """Version 7, most of which is a patch of version 6."""
    sent = Sent()
    big = torch.arange(4096, dtype=torch.int32).view(torch.int8).reshape(64, 256)
    for version, first in ((6, 3), (7, 5)):
        big[0, 0] = first
        base = 6 if version == 7 else None
        write_version(directory, version, [("big", big)], format="int8", sent=sent, base=base)
    return stage(directory, 7, 1, {"big": manifest.TensorSpec.of("big", big)}, 5)


def flip_all(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def load(staged: Staged) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in staged.tensors.items()}


@pytest.mark.fault("bytes of a version change after they were checked", "they are refused when they are loaded")
@pytest.mark.parametrize("damage", [flip_all, cut])
@pytest.mark.parametrize("victim", ["whole", "patch", "base"])
def test_bytes_that_change_after_the_check_are_not_loaded(tmp_path: Path, victim: str, damage) -> None:
    if victim == "whole":
        write(tmp_path, bucket_bytes=1 << 20)
        staged = read(tmp_path)
    else:
        staged = staged_patch(tmp_path)
    before = load(staged)
    (bucket,) = version_directory(tmp_path, 6 if victim == "base" else 7).glob("*.bin")
    damage(bucket)
    with pytest.raises(WeightSyncError, match=r"corrupt tensor|truncated file"):
        load(staged)
    assert before, "and it was good before"


@pytest.mark.fault("bytes of a version change while a tensor of it is in use", "the tensor does not change")
@pytest.mark.parametrize("damage", [flip_all, cut])
def test_a_tensor_that_was_handed_over_stays_as_it_is(tmp_path: Path, damage) -> None:
    write(tmp_path, bucket_bytes=1 << 20)
    tensor = read(tmp_path).tensors[VICTIM]
    (bucket,) = version_directory(tmp_path, 7).glob("*.bin")
    damage(bucket)
    assert torch.equal(tensor, TENSORS[VICTIM])


def test_a_version_that_was_removed_after_the_check_can_still_be_read(tmp_path: Path) -> None:
    written = write(tmp_path)
    staged = read(tmp_path)
    for path in written.parent.iterdir():
        path.unlink()
    assert torch.equal(load(staged)[VICTIM], TENSORS[VICTIM])


def swap(first: dict, second: dict, *keys: str) -> None:
    for key in keys:
        first[key], second[key] = second[key], first[key]


@pytest.mark.fault("two tensors of one shape exchange their names in a manifest", "refused by name")
@pytest.mark.parametrize("keys", [("name",), ("name", "checksum"), ("offset", "file"), ("offset", "file", "checksum")])
@pytest.mark.parametrize("sealed", [False, True], ids=["manifest altered", "manifest checksum made anew"])
def test_names_of_equal_shape_cannot_be_swapped(tmp_path: Path, keys: tuple[str, ...], sealed: bool) -> None:
    path = write_version(tmp_path, 7, TWINS.items(), format="none").manifest
    edit(path, lambda content: swap(*content["tensors"], *keys))
    if sealed:
        path.write_bytes(manifest.encode(msgspec.json.decode(path.read_bytes(), type=Manifest)))
    expected = {name: manifest.TensorSpec.of(name, tensor) for name, tensor in TWINS.items()}
    with pytest.raises(WeightSyncError, match=r"corrupt tensor (left|right)\.weight"):
        stage(tmp_path, 7, 1, expected, 6)


@pytest.mark.fault("one bit of a manifest flips", "the update is refused")
def test_a_flipped_bit_of_a_manifest_is_refused_or_means_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    content, meaning, taken = path.read_bytes(), manifest.read(path), 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 7)]) + content[place + 1 :])
        try:
            read(tmp_path)
        except WeightSyncError:
            continue
        assert manifest.read(path) == meaning, "in the name of an empty field"
        taken += 1
    assert taken < len(content) / 10


@pytest.mark.parametrize(
    "fault",
    [
        lambda content: content.update(format="fp8"),
        lambda content: content.update(checksum=""),
        lambda content: content.pop("checksum"),
        lambda content: content["files"].update({"more.bin": 0}),
        lambda content: entry_of(content, VICTIM).update(checksum="0" * 16),
        lambda content: content["tensors"].reverse(),
    ],
    ids=["format", "no checksum", "checksum dropped", "file added", "tensor checksum", "order"],
)
def test_nothing_in_a_manifest_can_be_altered(tmp_path: Path, fault) -> None:
    path = write(tmp_path)
    (path.parent / "more.bin").touch()
    edit(path, fault)
    with pytest.raises(WeightSyncError, match="corrupt"):
        read(tmp_path)


def test_a_manifest_written_in_another_way_is_the_same(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    assert read(tmp_path).policy_version == 7


@pytest.mark.fault("a file of a version cannot be read", "refused with the tensors that it holds")
def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    manifest_file = write(tmp_path, bucket_bytes=1)
    path = manifest_file.parent / entry_of(json.loads(manifest_file.read_text()), VICTIM)["file"]
    path.unlink()
    path.mkdir()
    with pytest.raises(WeightSyncError, match=VICTIM):
        read(tmp_path)
    manifest_file.unlink()
    manifest_file.mkdir()
    with pytest.raises(WeightSyncError, match="unreadable"):
        read(tmp_path)
