"""Jobs of the learner's workers on a device: a run's use of a learner, and refused operations."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import logged
from learner_cases import Fields, make_batch, make_targets, update
from push_rank import Receiver

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.saver import Saver
from megatron_rl.config.schema import (
    CheckpointSection,
    Config,
    Format,
    KvCache,
    QuantizationSection,
    SyncSection,
)
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.state import LearnerState
from megatron_rl.weight_sync.export import export_hf
from megatron_rl.weight_sync.file_push import FilePush
from megatron_rl.weight_sync.push import WeightSync
from megatron_rl.weight_sync.unsharded_source import UnshardedSource


def whole(learner: Learner, job: Fields) -> Fields:
    """Scores, syncs, updates, a save with an offloaded optimizer, a resumed update, an export."""
    assert learner.device.type == ("cuda" if job.get("on_device") else "cpu")
    batch = make_batch()
    root = Path(job["root"])
    notes = logged()
    if learner.is_driver:
        root.mkdir()
        (root / "config.json").write_text(json.dumps(job["hf"]))
    learner.broadcast()
    receiver = Receiver()
    quantization = QuantizationSection(Format.int8, smoothing=0.5, kv_cache=KvCache.fp8)
    config = Config(quantization=quantization, sync=SyncSection(dir=str(root), full_every=2))
    sync = WeightSync(learner, receiver if learner.is_driver else None, config)
    saver = Saver(root / "checkpoints", CheckpointSection(every=1), LearnerState(learner), sync)
    if learner.is_driver:
        (root / "checkpoints").mkdir()
    learner.keep_reference()
    targets = make_targets(batch, learner.logprobs(batch))
    sent = [_pushed(sync, receiver, 0)]
    targets = replace(targets, ref_logprobs_N=learner.reference_logprobs(batch))
    steps = [update(learner, batch, targets)]
    after_N = learner.logprobs(batch)
    saver.snapshot_rng_and_stats()
    learner.release_memory()
    saver.begin(1, {"driver": {"position": 1, "seen": {}}})
    sent.append(_pushed(sync, receiver, 1))
    saver.settle(wait=True)
    steps.append(update(learner, batch, targets))
    learner.broadcast()  # rank 0 has named the checkpoint
    saver.load(checkpoints.read(root / "checkpoints" / "step_1"))
    again_N = learner.logprobs(batch)
    assert isinstance(sync.transport, FilePush)
    (source,) = sync.transport._sources.values()
    carried = [_carried(learner, UnshardedSource(source, everywhere=True)) for _ in range(2)]
    steps.append(update(learner, batch, targets))
    export_hf(learner, root, root / "model")
    trained_N = learner.logprobs(batch)
    learner.load_hf(root / "model")
    exported_N = learner.logprobs(batch)
    sync.close()
    assert not notes, notes
    return {
        "steps": steps,
        "sent": sent,
        "carried": carried,
        "logprobs": [after_N, again_N, trained_N, exported_N],
    }


def _pushed(sync: WeightSync, receiver: Receiver, version: int) -> dict[str, float]:
    """The magnitudes of what a sampler got."""
    sync.push(version)
    return {name: float(values.float().abs().sum()) for name, values in receiver.tensors.items()}


def _carried(learner: Learner, whole: UnshardedSource) -> dict[str, float]:
    """The magnitudes of what `nccl` and `ipc` would carry, which has to lie on the device."""
    whole.begin(dict(learner.named_parameters()))
    found = {}
    for name, values in whole:
        assert values.device == learner.device, name
        found[name] = float(values.float().abs().sum())
    assert whole.shards.failure is None, whole.shards.failure
    return found


def mixes(learner: Learner, job: Fields) -> list[str]:
    """Mixes of the host's and the device's values that the stand-in accepts: none."""
    here = torch.arange(4.0)
    there = here.to(learner.device)
    optimizer = learner.optimizer.chained_optimizers[0]
    refused = {
        "a sum": lambda: here + there,
        "values by index": lambda: here.index_put_((torch.tensor([0, 1]),), there[:2]),
        "memory": lambda: there.numpy(),
        "a group of hosts": lambda: dist.all_reduce(
            there, group=optimizer.data_parallel_group_gloo
        ),
        "a group of devices": lambda: dist.all_reduce(here, group=optimizer.data_parallel_group),
    }
    return [name for name, mix in refused.items() if not _raises(mix)]


def _raises(mix: Callable[[], Any]) -> bool:
    try:
        mix()
    except (RuntimeError, TypeError) as error:
        return "device" in str(error)
    return False
