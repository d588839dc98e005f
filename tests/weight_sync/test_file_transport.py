"""Writer and reader of the file transport: what arrives is what was sent, and every fault is
refused by name.

Files that change between the check and the loading, and manifests that are altered, are among the
faults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from versions import checked, write_chain

from megatron_rl.models.tensors import TensorSpec
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync import manifest
from megatron_rl.weight_sync.delta import Sent
from megatron_rl.weight_sync.file_reader import Staged, stage
from megatron_rl.weight_sync.manifest import Manifest, WeightSyncError

TENSORS = {
    "model.embed_tokens.weight": torch.arange(60, dtype=torch.float32).reshape(12, 5).bfloat16(),
    "model.layers.0.mlp.up_proj.weight": torch.arange(21, dtype=torch.int8).reshape(3, 7),
    "model.layers.0.mlp.up_proj.weight_scale": torch.tensor([[0.5], [2.0], [1e-9]]),
    "model.layers.1.mlp.up_proj.weight": torch.randn(4, 8).to(torch.float8_e4m3fn),
    "model.norm.weight": torch.ones(5).bfloat16(),
}
EXPECTED = {name: TensorSpec.of(name, tensor) for name, tensor in TENSORS.items()}
VICTIM = "model.layers.0.mlp.up_proj.weight"


def write(directory: Path, bucket_bytes: int = 64) -> Path:
    written = transport.write_version(
        directory, 7, TENSORS.items(), format="int8", bucket_bytes=bucket_bytes
    )
    assert len(written.tensors) == len(TENSORS)
    return transport.manifest_path(directory, 7, 0)


def read(directory: Path, writers: int = 1, current: int = 6) -> Staged:
    return checked(stage(directory, 7, writers, EXPECTED, current))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, under a new checksum of its own."""
    content = json.loads(path.read_text())
    change(content)
    path.write_bytes(manifest.encode(msgspec.convert(content, Manifest)))


def entry_of(content: dict[str, Any]) -> dict[str, Any]:
    return next(entry for entry in content["tensors"] if entry["name"] == VICTIM)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_what_arrives_is_what_was_sent(tmp_path: Path, bucket_bytes: int) -> None:
    write(tmp_path, bucket_bytes)
    staged = read(tmp_path)
    assert staged.policy_version == 7
    assert list(staged.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert staged.tensors[name].dtype == tensor.dtype
        assert torch.equal(staged.tensors[name].view(torch.uint8), tensor.view(torch.uint8))


def test_several_writers_make_one_version(tmp_path: Path) -> None:
    items = list(TENSORS.items())

    def written_by(writer: int, part: list[tuple[str, torch.Tensor]]) -> None:
        transport.write_version(tmp_path, 7, part, format="int8", writer=writer)

    written_by(0, items[:2])
    with pytest.raises(WeightSyncError, match=r"manifest-001\.json is missing"):
        read(tmp_path, writers=2)
    written_by(1, items[2:])
    assert set(read(tmp_path, writers=2).tensors) == set(TENSORS)
    written_by(1, items[1:])
    with pytest.raises(WeightSyncError, match=f"duplicate tensor {VICTIM}"):
        read(tmp_path, writers=2)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda content: content["tensors"].remove(entry_of(content)), f"missing tensor {VICTIM}"),
        (
            lambda content: content["tensors"].append(entry_of(content)),
            f"duplicate tensor {VICTIM}",
        ),
        (
            lambda content: entry_of(content).update(name="other"),
            f"unexpected tensor other; missing tensor {VICTIM}",
        ),
        (lambda content: entry_of(content).update(shape=[7, 3]), f"misshapen tensor {VICTIM}"),
        (lambda content: entry_of(content).update(dtype="int4"), f"mistyped tensor {VICTIM}"),
        (lambda content: content.update(policy_version=6), "policy version 6, version 7"),
    ],
)
def test_a_version_that_the_engine_does_not_expect(
    tmp_path: Path, fault: Callable[..., object], said: str
) -> None:
    edit(write(tmp_path), fault)
    with pytest.raises(WeightSyncError, match=said):
        read(tmp_path)


def test_a_version_that_is_served_already(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(WeightSyncError, match="stale policy version 7"):
        read(tmp_path, current=7)


@pytest.mark.fault("two tensors of one shape exchange their names in a manifest", "refused by name")
def test_names_of_equal_shape_cannot_be_swapped(tmp_path: Path) -> None:
    twins = {name: torch.full((4,), value) for name, value in (("left", 1.0), ("right", 2.0))}
    transport.write_version(tmp_path, 7, twins.items(), format="none")

    def swap(content: dict[str, Any]) -> None:
        first, second = content["tensors"]
        first["name"], second["name"] = second["name"], first["name"]

    edit(transport.manifest_path(tmp_path, 7, 0), swap)
    expected = {name: TensorSpec.of(name, tensor) for name, tensor in twins.items()}
    with pytest.raises(WeightSyncError, match=r"corrupt tensor (left|right)"):
        checked(stage(tmp_path, 7, 1, expected, 6))


def test_a_failing_source_leaves_no_version_behind(tmp_path: Path) -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(TENSORS.items()))
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        transport.write_version(tmp_path, 7, source(), format="int8")
    assert not list(transport.version_directory(tmp_path, 7).iterdir())


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    folder = transport.version_directory(tmp_path, 7)
    folder.mkdir()
    (folder / "bucket-000-0000.bin").symlink_to(full)
    with pytest.raises(WeightSyncError, match=r"No space.*sync\.dir"):
        write(tmp_path)
    assert not list(folder.iterdir())


def staged_patch(directory: Path) -> Staged:
    """Version 7, most of which is a patch of version 6."""
    big = torch.arange(4096, dtype=torch.int32).view(torch.int8).reshape(64, 256)
    versions = [{"big": big.index_fill(0, torch.tensor(0), first)} for first in (3, 5)]
    write_chain(directory, versions, first=6, sent=Sent())
    return checked(
        stage(
            directory,
            7,
            1,
            {"big": TensorSpec.of("big", big)},
            5,
        )
    )


def flip_all(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def load(staged: Staged) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in staged.tensors.items()}


@pytest.mark.fault(
    "bytes of a version change after they were checked", "they are refused when they are loaded"
)
@pytest.mark.fault(
    "bytes of a version change while a tensor of it is in use", "the tensor does not change"
)
@pytest.mark.parametrize("damage", [flip_all, cut])
@pytest.mark.parametrize("victim", ["whole", "patch", "base"])
def test_bytes_that_change_after_the_check_are_not_loaded(
    tmp_path: Path, victim: str, damage: Callable[[Path], None]
) -> None:
    if victim == "whole":
        write(tmp_path, bucket_bytes=1 << 20)
        staged = read(tmp_path)
    else:
        staged = staged_patch(tmp_path)
    name = VICTIM if victim == "whole" else "big"
    before = load(staged)
    in_use = staged.tensors[name]
    (bucket,) = transport.version_directory(tmp_path, 6 if victim == "base" else 7).glob("*.bin")
    damage(bucket)
    with pytest.raises(WeightSyncError, match=r"corrupt tensor|truncated file"):
        load(staged)
    assert torch.equal(in_use, before[name])


@pytest.mark.fault("one bit of a manifest flips", "the update is refused")
def test_a_flipped_bit_of_a_manifest_is_refused_or_means_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    meaning = manifest.read(path)
    taken = 0
    for place in range(len(content)):
        path.write_bytes(
            content[:place] + bytes([content[place] ^ (1 << place % 7)]) + content[place + 1 :]
        )
        try:
            read(tmp_path)
        except WeightSyncError:
            continue
        assert manifest.read(path) == meaning, "in the name of an empty field"
        taken += 1
    assert taken < len(content) / 10
