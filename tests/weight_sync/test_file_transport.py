"""Writer and reader of the file transport: what arrives is what was sent, and every fault is refused by name."""

import json
from pathlib import Path

import pytest
import torch

from megatron_rl.engine.file_reader import Staged, stage
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync.manifest import WeightSyncError

TENSORS = {
    "model.embed_tokens.weight": torch.arange(60, dtype=torch.float32).reshape(12, 5).bfloat16(),
    "model.layers.0.mlp.up_proj.weight": torch.arange(21, dtype=torch.int8).reshape(3, 7),
    "model.layers.0.mlp.up_proj.weight_scale": torch.tensor([[0.5], [2.0], [1e-9]]),
    "model.layers.1.mlp.up_proj.weight": torch.randn(4, 8).to(torch.float8_e4m3fn),
    "model.norm.weight": torch.ones(5).bfloat16(),
}
EXPECTED = {name: TensorSpec.of(name, tensor) for name, tensor in TENSORS.items()}
VICTIM = "model.layers.0.mlp.up_proj.weight"


def write(directory: Path, version: int = 7, bucket_bytes: int = 64) -> Path:
    written = transport.write_version(directory, version, TENSORS.items(), format="int8", bucket_bytes=bucket_bytes)
    assert written.tensors == len(TENSORS)
    return written.manifest


def read(directory: Path, version: int = 7, writers: int = 1, current: int = 6) -> Staged:
    return stage(directory, version, writers, EXPECTED, current)


def edit(manifest: Path, change) -> None:
    content = json.loads(manifest.read_text())
    change(content)
    manifest.write_text(json.dumps(content))


def entry_of(content: dict, name: str) -> dict:
    return next(entry for entry in content["tensors"] if entry["name"] == name)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_what_arrives_is_what_was_sent(tmp_path, bucket_bytes):
    write(tmp_path, bucket_bytes=bucket_bytes)
    staged = read(tmp_path)
    assert staged.policy_version == 7
    assert list(staged.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert staged.tensors[name].dtype == tensor.dtype
        assert torch.equal(staged.tensors[name].view(torch.uint8), tensor.view(torch.uint8))


def test_several_writers_make_one_version(tmp_path):
    items = list(TENSORS.items())
    for writer, part in enumerate((items[:2], items[2:])):
        transport.write_version(tmp_path, 7, part, format="int8", writer=writer, writers=2)
    assert set(read(tmp_path, writers=2).tensors) == set(TENSORS)


def test_a_writer_that_did_not_finish_is_noticed(tmp_path):
    transport.write_version(tmp_path, 7, list(TENSORS.items())[:2], format="int8", writer=0, writers=2)
    with pytest.raises(WeightSyncError, match=r"manifest-001\.json is missing"):
        read(tmp_path, writers=2)


def test_a_tensor_sent_by_two_writers_is_a_duplicate(tmp_path):
    for writer in range(2):
        transport.write_version(tmp_path, 7, TENSORS.items(), format="int8", writer=writer, writers=2)
    with pytest.raises(WeightSyncError, match=r"duplicate tensor model\.embed_tokens\.weight"):
        read(tmp_path, writers=2)


def test_flipped_byte(tmp_path):
    manifest = write(tmp_path)
    entry = entry_of(json.loads(manifest.read_text()), VICTIM)
    path = manifest.parent / entry["file"]
    content = bytearray(path.read_bytes())
    content[entry["offset"] + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match=f"corrupt tensor {VICTIM}"):
        read(tmp_path)


def test_truncated_file(tmp_path):
    manifest = write(tmp_path, bucket_bytes=1 << 20)
    (bucket,) = manifest.parent.glob("*.bin")
    bucket.write_bytes(bucket.read_bytes()[:-1])
    with pytest.raises(WeightSyncError, match=r"truncated file .*model\.norm\.weight"):
        read(tmp_path)


def test_missing_file(tmp_path):
    manifest = write(tmp_path, bucket_bytes=1)
    (manifest.parent / entry_of(json.loads(manifest.read_text()), VICTIM)["file"]).unlink()
    with pytest.raises(WeightSyncError, match=f"missing file .*{VICTIM}"):
        read(tmp_path)


def drop(content):
    content["tensors"].remove(entry_of(content, VICTIM))


def duplicate(content):
    content["tensors"].append(entry_of(content, VICTIM))


def rename(content):
    entry_of(content, VICTIM)["name"] += "_old"


def transpose(content):
    entry_of(content, VICTIM)["shape"].reverse()


def retype(content):
    entry_of(content, VICTIM)["dtype"] = "float8_e4m3fn"


def outgrow(content):
    entry_of(content, VICTIM)["offset"] += 1 << 40


def leave_folder(content):
    entry_of(content, VICTIM)["file"] = "../../elsewhere"


def age(content):
    content["policy_version"] = 6


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (drop, f"missing tensor {VICTIM}"),
        (duplicate, f"duplicate tensor {VICTIM}"),
        (rename, f"unexpected tensor {VICTIM}_old; missing tensor {VICTIM}"),
        (transpose, rf"misshapen tensor {VICTIM}: shape \(7, 3\), the engine expects \(3, 7\)"),
        (retype, f"mistyped tensor {VICTIM}: float8_e4m3fn, the engine expects int8"),
        (outgrow, f"tensor {VICTIM} lies outside"),
        (leave_folder, f"tensor {VICTIM} lies outside"),
        (age, "carries policy version 6, version 7 was announced"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faulty_manifest(tmp_path, fault, message):
    edit(write(tmp_path), fault)
    with pytest.raises(WeightSyncError, match=message):
        read(tmp_path)


def test_stale_version(tmp_path):
    write(tmp_path)
    with pytest.raises(WeightSyncError, match="stale policy version 7: the engine already serves version 7"):
        read(tmp_path, current=7)


def test_unreadable_manifest(tmp_path):
    manifest = write(tmp_path)
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(WeightSyncError, match="unreadable"):
        read(tmp_path)


def test_a_failing_source_leaves_no_version_behind(tmp_path):
    def source():
        yield next(iter(TENSORS.items()))
        raise RuntimeError("the learner stopped")

    with pytest.raises(RuntimeError, match="the learner stopped"):
        transport.write_version(tmp_path, 7, source(), format="int8")
    assert not list(transport.version_directory(tmp_path, 7).iterdir())


def test_a_full_disk_is_named(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    folder = transport.version_directory(tmp_path, 7)
    folder.mkdir()
    (folder / "bucket-000-0000.bin").symlink_to(full)
    with pytest.raises(WeightSyncError, match=r"No space left on device.*sync\.dir"):
        write(tmp_path)
    assert not list(folder.iterdir())
