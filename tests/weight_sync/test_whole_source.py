"""All writers' tensors on rank 0, or on every rank; and each rank's own shards: what single-sender transports take."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from simulated import TIMEOUT_S, ThreadGroup, assert_same_bits, hf_config, local_parameters, quantized_whole, random_hf
from spawned import exit_codes
from whole_rank import CASES, run_rank

from megatron_rl.config.schema import Format
from megatron_rl.models.layout import Layout
from megatron_rl.models.shape import ModelShape
from megatron_rl.weight_sync.groups import Ranks
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.shard_stream import ShardStream
from megatron_rl.weight_sync.source import ShardSource


@pytest.mark.ranks
def test_two_writers_in_one_order(tmp_path: Path) -> None:
    outs = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    arguments = [(rank, str(tmp_path / "store"), str(out)) for rank, out in enumerate(outs)]
    assert exit_codes(run_rank, arguments, TIMEOUT_S) == [0, 0]
    first, second = (json.loads(out.read_text()) for out in outs)
    for case in CASES:
        for everywhere in (False, True):
            here, there = first[f"{case} {everywhere}"], second[f"{case} {everywhere}"]
            assert here["metas"] == there["metas"], "every rank knows what comes, in which order"
            count = len(here["metas"])
            assert here["passes"] == [count, count]
            assert there["passes"] == ([count, count] if everywhere else [0, 0])
    assert first["interrupted"] == [True, None]
    assert second["interrupted"] == [False, None]
    count = len(first["stages False"]["metas"])
    assert first["diverged"] == [count, None], "the lockstep holds"
    assert second["diverged"][0] == 0
    assert "layers.3.mlp.down_proj.weight: the weight holds NaN" in second["diverged"][1]


@pytest.mark.parametrize("format", [Format.none, Format.int8, Format.fp8])
def test_own_shards_make_up_the_whole(format: Format) -> None:
    layout, shape = Layout(tp=2, dp=2), ModelShape.from_hf(hf_config("qwen3", vocab_size=102))
    hf = random_hf(shape)
    groups = [ThreadGroup(2), ThreadGroup(2)]
    streams, work = [], []
    for place in layout.places():
        ranks = Ranks(place, groups[place.dp], groups[place.dp])
        streams.append(ShardStream(ShardSource(shape, layout, ranks, format, bucket_bytes=20_000)))
        work.append(local_parameters(hf, shape, layout, place))

    def shards(stream: ShardStream, parameters: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        stream.begin(parameters)
        return [(name, tensor.clone()) for name, tensor in stream]

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(shards, streams, work, timeout=TIMEOUT_S))
    names = [tensor.name for tensor in streams[0].tensors]
    assert all([name for name, _ in of_rank] == names for of_rank in made)
    for replica in (made[:2], made[2:]):
        whole = []
        for (name, low), (_, high) in zip(*replica, strict=True):
            dim = streams[0].dims[name]
            whole.append((name, low if dim is None else torch.cat((low, high), dim)))
            assert dim is not None or torch.equal(low, high)
        assert_same_bits(whole, quantized_whole(hf, format))
    assert set(streams[0].dims.values()) == {None, 0, 1}


@pytest.mark.parametrize(
    ("layout", "message"), [(Layout(pp=2), "one mesh"), (Layout(tp=2), "no equal contiguous shares")]
)
def test_what_one_mesh_cannot_say_is_refused(layout: Layout, message: str) -> None:
    shape = ModelShape.from_hf(hf_config("qwen3"))  # 101 words
    with pytest.raises(WeightSyncError, match=message):
        ShardStream(ShardSource(shape, layout, Ranks()))
