"""Tensors in the shares of an engine's ranks: a rank reads what it loads and no more, and every
fault is named.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from simulated import hf_config, random_hf, run_sources
from versions import flip, write_chain

from megatron_rl.config.schema import Format
from megatron_rl.models.layout import Layout
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.weight_sync import engine_shards
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync.delta import Sent
from megatron_rl.weight_sync.engine_shards import NOTHING, Shard, ShardBuffer, ShardLayout
from megatron_rl.weight_sync.file_reader import Staged, stage
from megatron_rl.weight_sync.manifest import WeightSyncError

ROWS = "up.weight"
COLUMNS = "down.weight"
CUTS = {ROWS: ShardLayout(0, ((0, 6), (6, 6))), COLUMNS: ShardLayout(1, ((0, 4), (4, 4)))}


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    rows = torch.arange(96, dtype=torch.int8).reshape(12, 8)
    columns = torch.arange(40.0).reshape(5, 8).bfloat16()
    rows[7, 3] = version
    columns[2, 6] = version
    return {
        ROWS: rows,
        COLUMNS: columns,
        "norm.weight": torch.full((5,), 1.0 + version),
    }


def read(folder: Path, version: int = 0, shards: dict[str, Shard] | None = None) -> Staged:
    expected = {name: TensorSpec.of(name, tensor) for name, tensor in tensors_of(0).items()}
    return stage(folder, version, 1, expected, -1, shards or {})


@pytest.mark.parametrize("patches", [False, True])
@pytest.mark.parametrize(("ranks", "share"), [(4, 0.5), (1, 1.0)])
def test_a_rank_reads_the_parts_of_its_shard(
    tmp_path: Path, patches: bool, ranks: int, share: float
) -> None:
    """Four ranks of what was cut for two read a part each; one that loads all reads all."""
    sent = Sent() if patches else None
    write_chain(tmp_path, map(tensors_of, range(3)), sent=sent, cuts=CUTS)
    want = tensors_of(2)
    for rank in range(ranks):
        rows = 12 // ranks
        columns = 8 // ranks
        shards = {
            ROWS: Shard(0, ((rank * rows, rows),)) if ranks > 1 else Shard(),
            COLUMNS: Shard(1, ((rank * columns, columns),)) if ranks > 1 else Shard(),
        }
        staged = read(tmp_path, 2, shards)
        held = ShardBuffer.of(staged.tensors, shards)
        for name, tensor in held.items():
            assert tensor.shape == want[name].shape
            for got, wanted in zip(
                shards.get(name, Shard()).take(tensor),
                shards.get(name, Shard()).take(want[name]),
                strict=True,
            ):
                assert torch.equal(got, wanted), (rank, name)
        if not patches:
            assert staged.nbytes == share * (96 + 80) + 20


def test_what_a_rank_does_not_load_is_not_read(tmp_path: Path) -> None:
    write_chain(tmp_path, [tensors_of(0)], cuts=CUTS)
    (bucket,) = transport.version_directory(tmp_path, 0).glob("*.bin")
    flip(bucket, 50)  # in the second half of the rows
    first = Shard(0, ((0, 6),))
    second = Shard(0, ((6, 6),))
    assert torch.equal(read(tmp_path, 0, {ROWS: first}).tensors[ROWS][:6], tensors_of(0)[ROWS][:6])
    assert read(tmp_path, 0, {ROWS: NOTHING}).tensors[ROWS].shape == (12, 8)
    for shard in (second, Shard()):
        with pytest.raises(WeightSyncError, match=f"corrupt tensor {ROWS}"):
            read(tmp_path, 0, {ROWS: shard}).tensors[ROWS]


# rows of each kind that vLLM's ranks share
KINDS = {
    "qwen3_moe": {"self_attn.q_proj": (128,)},
    "phi3": {"self_attn.qkv_proj": (128, 64, 64), "mlp.gate_up_proj": (96, 96)},
}


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_what_is_cut_is_cut_into_equal_shares(
    family: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every share of every kind of row that vLLM's ranks take begins where a part does; small
    tensors stay whole.
    """
    monkeypatch.setattr(engine_shards, "SMALL", 1)
    shape = ModelShape.from_hf(hf_config(family))
    sources, yielded = run_sources(random_hf(shape), shape, Layout(tp=2), Format.int8)
    cuts = {name: cut for source in sources for name, cut in source.cuts(ranks).items()}
    tensors = dict(pair for of_rank in yielded for pair in of_rank)
    assert bool(cuts) == (ranks > 1)
    for name, cut in cuts.items():
        starts = [start for start, _ in cut.runs]
        assert [0, *(start + length for start, length in cut.runs)] == [
            *starts,
            tensors[name].shape[cut.dim],
        ]
        assert cut.dim == int(name.endswith(("o_proj.weight", "down_proj.weight")))
    if ranks > 1:
        for name, kinds in KINDS[family].items():
            begins = [
                sum(kinds[:n]) + rank * kind // ranks
                for n, kind in enumerate(kinds)
                for rank in range(ranks)
            ]
            assert [start for start, _ in cuts[f"model.layers.0.{name}.weight"].runs] == begins
    monkeypatch.undo()
    kept = [name for source in sources for name in source.cuts(ranks)]
    assert all(tensors[name].nbytes >= engine_shards.SMALL for name in kept)
    assert len(kept) < max(len(cuts), 1)
