"""One learner rank of test_push, in a module that a fresh process can import."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from simulated import hf_config, local_parameters, random_hf

from megatron_rl.config.schema import Config, Format, LearnerSection, QuantizationSection, SyncSection
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups
from megatron_rl.models.tensors import torch_dtype
from megatron_rl.quantization.quantize import quantize
from megatron_rl.weight_sync import buckets, manifest
from megatron_rl.weight_sync.file_transport import manifest_path, version_directory
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.push import WeightSync

HF_CONFIG = hf_config("qwen3", num_hidden_layers=2, tie_word_embeddings=True)
PATIENCE = timedelta(seconds=240)
NAME = "model.layers.1.mlp.down_proj.weight"  # row-parallel: its scale needs both ranks


class Weights:
    def __init__(self, rank: int, tp: int) -> None:
        place = Place(tp=rank, etp=rank)
        self.model, self.groups = Model.of(HF_CONFIG, Layout(tp=tp)), ShardGroups(place)
        shape, layout = self.model.shape, self.model.layout
        self.parameters = local_parameters(random_hf(shape), shape, layout, place)

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.parameters.items())


class Client:
    """Stands where the sampler's client does: reads the version as a receiver would, or refuses it."""

    def __init__(self) -> None:
        self.refuse = False
        self.calls: list[str] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.calls.append("update")
        if self.refuse:
            raise WeightSyncError("misshapen tensor X")
        directory, version = Path(update_info["directory"]), update_info["policy_version"]
        parts = [manifest.read(manifest_path(directory, version, w)) for w in range(update_info["writers"])]
        for _, entry in manifest.join(parts).values():
            data = (version_directory(directory, version) / entry.file).read_bytes()
            data = data[entry.offset : entry.offset + entry.nbytes]
            assert manifest.checksum(data, entry.name) == entry.checksum
            flat = torch.frombuffer(bytearray(data), dtype=torch_dtype(entry.dtype))
            self.tensors[entry.name] = flat.view(entry.shape)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")


def join_pair(
    rank: int, rendezvous: str, folder: str, client: Client | None = None
) -> tuple[WeightSync, Weights, Client]:
    """Become one of two tensor-parallel ranks that send INT8; the client is rank 0's sampler."""
    torch.set_num_threads(1)
    buckets.BUCKET_BYTES = 1 << 20  # several of them
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=PATIENCE)
    config = Config(
        learner=LearnerSection(tensor_parallel=2),
        quantization=QuantizationSection(format=Format.int8),
        sync=SyncSection(dir=folder),
    )
    client, learner = client or Client(), Weights(rank, 2)
    return WeightSync.from_config(learner, client if rank == 0 else None, config), learner, client


class RefusesOnce(Client):
    def update_weights(self, update_info: Any) -> None:
        self.refuse = "update" not in self.calls
        super().update_weights(update_info)


def run_resending_rank(rank: int, rendezvous: str, folder: str, out: str) -> None:
    """Two versions, the first of which is refused at the first attempt."""
    sync, _, client = join_pair(rank, rendezvous, folder, RefusesOnce())
    reports = [sync.push(version) for version in (1, 2)]
    sync.close()
    found = {
        "calls": client.calls,
        "resent": [report.metrics()["sync/resent"] for report in reports],
        "first_failure": reports[0].first_failure,
    }
    Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def run_rank(rank: int, rendezvous: str, folder: str, out: str) -> None:
    sync, learner, client = join_pair(rank, rendezvous, folder)
    report = sync.push(3)
    found: dict[str, Any] = {
        "metrics": report.metrics(),
        "worst": report.error.worst,
        "calls": list(client.calls),
        "left": sorted(p.name for p in sync.transport.directory.iterdir()),
        "errors": [],
    }
    if rank == 0:
        want = quantize(random_hf(ModelShape.from_hf(HF_CONFIG))[NAME], Format.int8)
        found["equal"] = all(
            torch.equal(client.tensors[NAME.removesuffix("weight") + key], value) for key, value in want.items()
        )
        found["names"] = sorted(client.tensors)

    def failing(version: int) -> None:
        try:
            sync.push(version)
            found["errors"].append("none")
        except WeightSyncError as error:
            found["errors"].append(str(error))

    client.refuse = True  # the sampler refuses
    failing(4)
    client.refuse = False
    healthy = learner.parameters["decoder.layers.1.mlp.linear_fc2.weight"].clone()
    if rank == 1:  # a rank that does not write has diverged
        learner.parameters["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] = float("inf")
    failing(5)
    learner.parameters["decoder.layers.1.mlp.linear_fc2.weight"] = healthy
    if rank == 0:  # the version's folder cannot be made
        version_directory(sync.transport.directory, 6).write_text("in the way")
    failing(6)
    failing(7)
    sync.close()
    found["gone"] = not sync.transport.directory.exists() if rank == 0 else True
    Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()
