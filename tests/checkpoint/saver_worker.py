"""A job of the learner's workers: saves, read by megatron-core, and one on a disk that is full."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import torch
from helpers import logged
from learner_cases import make_batch, make_targets, update

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.saver import Saver, _write
from megatron_rl.config.schema import CheckpointSection
from megatron_rl.distributed import exchange
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.state import LearnerState


class Scales:
    """In the place of a weight sync."""

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": torch.ones(3)}

    def restore(self, state: Any, repeats: bool = False) -> None:
        assert torch.equal(state["scale"], torch.ones(3))


def saves(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """Two updates and a save, which megatron-core reads; then one while the disk is nearly full,
    and one afterwards.
    """
    batch = make_batch()
    root = Path(job["root"])
    said = logged()
    targets = make_targets(batch, torch.zeros(batch.mask_N.shape))
    for _ in range(2):
        update(learner, batch, targets)
    if learner.is_driver:
        root.mkdir()
    learner.broadcast()
    saver = Saver(root, CheckpointSection(), LearnerState(learner), Scales())

    def save(step: int) -> dict[str, Any]:
        returned = Event()

        def write(*given: Any) -> dict[str, Any]:
            assert returned.wait(30), "a step waits for what it saves to be written"
            return _write(*given)

        with patch("megatron_rl.checkpoint.saver._write", write):
            saver.begin(step, {"driver": {"position": step, "seen": {}}})
            returned.set()
            saver.settle(wait=True)
        learner.broadcast()  # rank 0 names the folder, and every rank looks into it
        found = next(checkpoints.complete_checkpoints(root, said.append), None)
        entries = sorted(os.listdir(root))
        return {"entries": entries, "whole": found and found.step, "metrics": dict(saver.metrics)}

    synced = list[int]()
    fsync = os.fsync
    with patch("os.fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle))):
        save(2)
    everywhere = {inode for of_rank in exchange(synced) for inode in of_rank}
    files = [path for path in (root / "step_2").rglob("*") if path.is_file()]
    unsynced = [path.name for path in files if path.stat().st_ino not in everywhere]
    read = read_by_megatron(learner, root / "step_2" / "policy")
    read["unsynced"] = unsynced
    read["modes"] = sorted({path.stat().st_mode for path in root.rglob("*") if path.is_file()})
    if not job["fills"]:
        return {"megatron": read, "disk": {}}
    filler = root / "filler"
    room = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 2
    if learner.is_driver:
        filler.write_bytes(b"x" * (shutil.disk_usage(root).free - room))
    learner.broadcast()
    disk: dict[str, Any] = {"said": said, "while full": save(4)}
    if learner.is_driver:
        filler.unlink()
    learner.broadcast()
    disk["afterwards"] = save(6)
    saver.load(checkpoints.read(root / "step_6"))
    exchange(None)  # every rank has read
    if learner.is_driver:
        shutil.rmtree(root)
    return {"megatron": read, "disk": disk}


def read_by_megatron(learner: Learner, policy: Path) -> dict[str, Any]:
    """Everything is forgotten, and read by `dist_checkpointing.load`; what differs from before."""
    from megatron.core import dist_checkpointing

    (optimizer,) = learner.optimizer.chained_optimizers
    (module,) = learner.modules

    def held() -> dict[str, torch.Tensor]:
        found = {name: parameter.detach() for name, parameter in learner.named_parameters()}
        for name, parameter in learner.named_parameters():
            if parameter in optimizer.model_param_group_index_map:
                kept = optimizer._get_main_param_and_optimizer_states(parameter)
                found |= {
                    f"{kind} of {name}": values for kind, values in kept.items() if kind != "step"
                }
        return found

    before = {name: values.clone() for name, values in held().items()}
    for values in held().values():
        values.zero_()
    weights = {
        key: value
        for key, value in module.sharded_state_dict().items()
        if "_extra_state" not in key
    }
    kind = {"distrib_optim_sharding_type": "fully_reshardable"}
    state = optimizer.sharded_state_dict(weights, is_loading=True, metadata=kind)["param_state"]
    loaded = dist_checkpointing.load({"model": weights, "optimizer": state}, str(policy))
    module.load_state_dict(loaded["model"], strict=False)
    # torch's Adam counts in each state, which this loader does not expect
    states = optimizer.optimizer.state
    steps = {parameter: state.pop("step") for parameter, state in states.items() if "step" in state}
    optimizer.load_parameter_state_from_fully_reshardable(loaded["optimizer"])
    for parameter, count in steps.items():
        states[parameter]["step"] = count
    wrong = [name for name, values in held().items() if not torch.equal(values, before[name])]
    return {"wrong": wrong, "compared": len(before)}
