"""A learner rank and the receiver of what it sends, for tests of `push` and for ranks in processes
of their own.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from simulated import hf_config, local_parameters, random_hf

from megatron_rl.config.schema import (
    Config,
    Format,
    QuantizationSection,
    SamplerSection,
    SyncSection,
)
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups
from megatron_rl.quantization.quantize import quantize
from megatron_rl.weight_sync import buckets, manifest
from megatron_rl.weight_sync.file_reader import stage
from megatron_rl.weight_sync.file_transport import manifest_path, version_directory
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.push import WeightSync

HF_CONFIG = hf_config("qwen3", num_hidden_layers=2, tie_word_embeddings=True)
PATIENCE = timedelta(seconds=240)
NAME = "model.layers.1.mlp.down_proj.weight"  # row-parallel: its scale needs both ranks
SHARD = "decoder.layers.1.mlp.linear_fc2.weight"


class RankWeights:
    def __init__(self, rank: int, tp: int) -> None:
        place = Place(tp=rank, etp=rank)
        self.model = Model.of(HF_CONFIG, Layout(tp=tp))
        self.groups = ShardGroups(place)
        shape = self.model.shape
        layout = self.model.layout
        self.parameters = local_parameters(random_hf(shape), shape, layout, place)

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.parameters.items())


class Receiver:
    """Stands where a sampler does: verifies every version as an engine's worker does, and keeps the
    tensors.
    """

    def __init__(self) -> None:
        self.version = -1
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.refusals: list[str] = []
        self.refuse = 0  # so many updates
        self.dead = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        if self.dead:
            raise RuntimeError("the sampler's process ended")
        self.calls.append("start")

    def update_weights(self, info: Any) -> None:
        self.calls.append("update")
        try:
            self.take(info)
        except WeightSyncError as error:
            self.refusals.append(str(error))
            raise

    def take(self, info: Any) -> None:
        if self.refuse:
            self.refuse -= 1
            raise WeightSyncError("misshapen tensor X")
        directory = Path(info["directory"])
        version = info["policy_version"]
        parts = [
            manifest.read(manifest_path(directory, version, writer))
            for writer in range(info["writers"])
        ]
        expected = {entry.name: entry.spec for part in parts for entry in part.tensors}
        staged = stage(directory, version, info["writers"], expected, self.version)
        self.tensors = {name: tensor.clone() for name, tensor in staged.tensors.items()}
        self.version = version

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(f"finish {weight_version}")


def sync_of(
    learner: RankWeights,
    receiver: Receiver | None,
    folder: Path,
    format: Format = Format.int8,
    full_every: int = 1,
    **sampler: Any,
) -> WeightSync:
    quantization = QuantizationSection(format)
    sync = SyncSection(dir=str(folder), full_every=full_every)
    config = Config(quantization=quantization, sync=sync, sampler=SamplerSection(**sampler))
    return WeightSync(learner, receiver, config)


def meet(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=PATIENCE
    )


def join_pair(rank: int, rendezvous: str, folder: str) -> tuple[WeightSync, RankWeights, Receiver]:
    """Become one of two tensor-parallel ranks that send INT8; the receiver is rank 0's sampler."""
    meet(rank, rendezvous)
    buckets.BUCKET_BYTES = 1 << 20  # several of them
    receiver = Receiver()
    learner = RankWeights(rank, 2)
    return sync_of(learner, receiver if rank == 0 else None, Path(folder)), learner, receiver


def error_of(sync: WeightSync, version: int) -> str:
    try:
        sync.push(version)
    except WeightSyncError as error:
        return str(error)
    return ""


def run_rank(rank: int, rendezvous: str, folder: str) -> dict[str, Any]:
    sync, learner, receiver = join_pair(rank, rendezvous, folder)
    report = sync.push(3)
    found = {
        "metrics": report.metrics(),
        "calls": list(receiver.calls),
        "left": sorted(p.name for p in sync.transport.directory.iterdir()),
        "names": sorted(receiver.tensors),
    }
    if rank == 0:
        want = quantize(random_hf(ModelShape.from_hf(HF_CONFIG))[NAME], Format.int8)
        stem = NAME.removesuffix("weight")
        found["equal"] = all(
            torch.equal(receiver.tensors[stem + key], value) for key, value in want.items()
        )
    receiver.refuse = 1
    report = sync.push(4)
    found["resent"] = [
        report.first_failure,
        report.metrics()["sync/resent"],
        sync.push(5).metrics()["sync/resent"],
    ]
    receiver.refuse = 2  # at both attempts
    errors = [error_of(sync, 6)]
    receiver.refuse = 0
    healthy = learner.parameters[SHARD].clone()
    if rank == 1:  # a rank that does not write has diverged
        learner.parameters[SHARD][0, 0] = float("inf")
    errors.append(error_of(sync, 7))
    learner.parameters[SHARD] = healthy
    if rank == 0:  # the version's folder cannot be made
        version_directory(sync.transport.directory, 8).write_text("in the way")
    found["errors"] = [*errors, error_of(sync, 8), error_of(sync, 9)]
    sync.close()
    return found | {"gone": not sync.transport.directory.exists()}
