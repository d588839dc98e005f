"""Hostile checkpoints: each is refused by name; none runs code, leaves its folder or grows."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_factory import KEY, WEIGHT, save, write_parts
from helpers import Command
from simulated import hf_config
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from megatron_rl.checkpoint.torch_dist.index import CheckpointError, Entry, read_index
from megatron_rl.checkpoint.torch_dist.reader import Reader, read_saved
from megatron_rl.checkpoint.torch_dist.writer import Block, write_blocks, write_index
from megatron_rl.config import from_mapping, to_yaml
from megatron_rl.config.schema import IfExists
from megatron_rl.models.mapping import find
from megatron_rl.models.shape import Lora, ModelShape
from megatron_rl.tracking.run_dir import open_run

YAML = to_yaml(from_mapping({"run": {"name": "run"}}))
EVIDENCE = "executed"


class Attack:
    """Leaves evidence, when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {EVIDENCE}",)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a good checkpoint of step 2; attacks would leave traces in the working folder."""
    monkeypatch.chdir(tmp_path)
    run, _ = open_run(tmp_path / "run", IfExists.refuse, YAML)
    assert run.lock is not None
    run.lock.close()
    run.metrics.write_text('{"progress/step": 1}\n')
    save(run.checkpoints, 2)
    return run.path


def indexed(change: Callable[[Metadata], Metadata]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "policy" / ".metadata"
        path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))

    return apply


def written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def linked(name: str, target: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return apply


def pipe(folder: Path) -> None:
    (folder / "policy" / ".metadata").unlink()
    os.mkfifo(folder / "policy" / ".metadata")


def places(**changes: Any) -> Callable[[Path], None]:
    return indexed(
        lambda one: replace(
            one,
            storage_data={key: replace(info, **changes) for key, info in one.storage_data.items()},
        )
    )


def described(size: tuple[int, ...]) -> Callable[[Path], None]:
    """An index that declares this size, in one part."""

    def change(one: Metadata) -> Metadata:
        ((key, about),) = one.state_dict_metadata.items()
        part = ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
        whole = TensorStorageMetadata(about.properties, torch.Size(size), [part])
        return replace(one, state_dict_metadata={key: whole})

    return indexed(change)


def laughs() -> bytes:
    """A key that takes forever to hash: a hundred nested tuples of twice the same."""
    # BINPUT, BINGET, TUPLE2
    twice = b"".join(bytes((*b"q", number, *b"h", number, 0x86)) for number in range(100))
    return b"\x80\x04}K\x00" + twice + b"K\x01s."


BAD: dict[str, Callable[[Path], None]] = {
    "an index that executes": indexed(lambda one: replace(one, planner_data=Attack())),
    "an index that is an attack": written("policy/.metadata", pickle.dumps(Attack())),
    "an index of old opcodes that executes": written(
        "policy/.metadata", b"cos\nsystem\n(S'touch executed'\ntR."
    ),
    "an index with an instance": written("policy/.metadata", b"(S'touch executed'\nios\nsystem\n."),
    "an index that asks for a huge memo": written(
        "policy/.metadata", b"\x80\x04Nr\xff\xff\xff\x7f."
    ),
    "an index with huge bytes": written(
        "policy/.metadata", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x."
    ),
    "an index of endless hashes": written("policy/.metadata", laughs()),
    "an index of deep lists": written("policy/.metadata", b"\x80\x04" + b"](" * 20_000 + b"."),
    "a place outside": places(relative_path="../../../secret"),
    "a place that begins before its file": places(offset=-8),
    "a place beyond its file": places(offset=1 << 40),
    "a place that is longer than its file": places(length=1 << 40),
    "a packed place": places(transform_descriptors=["zstd"]),
    "a tensor of terabytes": described((1 << 40, 8)),
    "a tensor of more numbers than there are": described((1 << 62, 1 << 62)),
    "parts in no place": indexed(lambda one: replace(one, storage_data={})),
    "a backend of another kind": written("policy/metadata.json", b'{"sharded_backend": "zarr"}'),
    "a header that lies": written("ranks/rank_0.safetensors", struct.pack("<Q", 1 << 60) + b"{}"),
    "a header that names more than there is": written(
        "sync.safetensors",
        struct.pack("<Q", 64)
        + b'{"a":{"dtype":"F32","shape":[99],"data_offsets":[0,396]}}'.ljust(64),
    ),
    "no index": lambda folder: (folder / "policy" / ".metadata").unlink(),
    "a link to data elsewhere": linked("policy/rank_0.distcp", "/etc/passwd"),
    "an index that is a link": linked("policy/.metadata", "/etc/passwd"),
    "a pipe for an index": pipe,
}


@pytest.mark.fault(
    "a checkpoint of a stranger lies about its content, or would execute, with checksums that "
    "are right",
    "it has a verdict, an older one is taken; nothing runs, is read elsewhere, or is allocated "
    "beyond the files",
)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_checkpoint_is_reported_and_skipped(run: Path, name: str, command: Command) -> None:
    save(run / "checkpoints", 4, BAD[name])
    Path("secret").write_text("secret")
    tracemalloc.start()
    lines = command("checkpoints", run).splitlines()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(lines) >= 3
    assert any("incomplete: " in line for line in lines)
    assert lines[-1].rstrip().endswith("complete")
    assert peak < 64 << 20
    _, said = open_run(run, IfExists.resume, YAML)
    assert "checkpoint of step 4" in said
    assert "resumes after step 2" in said
    assert not Path(EVIDENCE).exists()
    assert Path("secret").read_text() == "secret"


@pytest.mark.fault(
    "the file of a tensor is not what it says", "it is refused; nothing runs, nothing huge is made"
)
def test_a_tensor_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = tmp_path / "good"
    bad = tmp_path / "bad"
    torch.save(WEIGHT, good)
    whole = good.read_bytes()
    assert torch.equal(read_saved(good, 0, len(whole), "float32", (8, 8)), WEIGHT)
    transposed = tmp_path / "transposed"
    torch.save(WEIGHT.t(), transposed)
    assert torch.equal(
        read_saved(
            transposed,
            0,
            transposed.stat().st_size,
            "float32",
            (8, 8),
        ),
        WEIGHT.t(),
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 << 20))
    for content in (pickle.dumps(Attack()), b"", packed.getvalue()):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=r"."):
            read_saved(bad, 0, len(content), "float32", (8, 8))
    torch.save(Attack(), bad)
    with pytest.raises(ValueError, match="UnpicklingError"):
        read_saved(bad, 0, bad.stat().st_size, "float32", (8, 8))
    assert not Path(EVIDENCE).exists()
    choice = random.Random(1)
    for _ in range(300):  # any damage yields the same values, other values, or a ValueError
        content = bytearray(whole)
        for _ in range(choice.randrange(1, 4)):
            content[choice.randrange(len(content))] = choice.randrange(256)
        bad.write_bytes(
            content[: choice.randrange(len(content))] if choice.random() < 0.3 else content
        )
        try:
            assert read_saved(
                bad,
                0,
                bad.stat().st_size,
                "float32",
                (8, 8),
            ).shape == (8, 8)
        except ValueError:
            pass


@pytest.mark.fault("an index is damaged anywhere", "it is read, or refused by a sentence")
def test_a_damaged_index(run: Path) -> None:
    folder = run / "checkpoints" / "step_2" / "policy"
    whole = (folder / ".metadata").read_bytes()
    choice = random.Random(2)
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(choice.randrange(1, 5)):
            content[choice.randrange(len(content))] = choice.randrange(256)
        (folder / ".metadata").write_bytes(content)
        try:
            read_index(folder)
        except CheckpointError:
            pass


@pytest.mark.fault(
    "a part of a tensor is there twice, or not at all", "it is refused: no value is left to chance"
)
def test_parts_that_do_not_cover(tmp_path: Path) -> None:
    entry = Entry(KEY, ())

    def reader(*rows: int) -> Reader:
        folder = tmp_path / str(rows)
        folder.mkdir()
        write_parts(folder, *rows)
        return Reader(folder)

    assert torch.equal(reader(0, 4).read(entry, (2, 1), (5, 3)), WEIGHT[2:7, 1:4])
    overlapping = reader(0, 3)
    with pytest.raises(CheckpointError, match="twice"):
        overlapping.read(entry, (0, 0), (8, 8))
    assert torch.equal(overlapping.read(entry, (4, 0), (3, 8)), WEIGHT[4:7])
    with pytest.raises(CheckpointError, match="8 of 16"):
        overlapping.read(entry, (6, 0), (2, 8))


@pytest.mark.parametrize("rank", [4, 16])
def test_no_block_is_cut_out_of_a_tensor_of_another_size(tmp_path: Path, rank: int) -> None:
    name = "decoder.layers.0.mlp.linear_fc2.lora.A"
    kinds = ("", "optimizer.state.exp_avg.")
    blocks = [
        Block(
            f"{kind}{name}",
            (8, 96),
            (0, 0),
            torch.ones(8, 96),
        )
        for kind in kinds
    ]
    write_index(tmp_path, write_blocks(tmp_path / "rank_0.distcp", blocks))
    lora = Lora(rank, 1.0, ("down_proj",))
    shape = replace(ModelShape.from_hf(hf_config("qwen3")), lora=lora)
    reader = Reader(tmp_path)
    entry = reader.find(find(name, shape), shape)
    for kind in kinds:
        with pytest.raises(CheckpointError, match=rf"{kind}{name} .*\[8, 96\].*\[{rank}, 96\]"):
            reader.read(entry, (3, 0), (1, 96), kind)
