"""What a learner has to keep to go on exactly where it was: weights, optimizer, random states, what it has measured.

Weights and optimizer are kept as whole tensors (`models/regions.py`), so that any layout can go on. The rest is small,
and each rank's own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_rl.learner import host  # noqa: F401 - before megatron

from megatron.core import tensor_parallel  # isort: skip

from megatron_rl.checkpoint.torch_dist.index import entries
from megatron_rl.checkpoint.torch_dist.reader import Reader
from megatron_rl.checkpoint.torch_dist.writer import Block, part_of
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import Param, find
from megatron_rl.models.regions import Region, run_regions, shard_regions
from megatron_rl.models.table import Split

if TYPE_CHECKING:
    from megatron_rl.learner.learner import Learner

OPTIMIZER = "optimizer.state."  # as megatron-core names it
RANDOM = "rng."
TRACKER = f"{RANDOM}tracker."
EMBEDDING = "embedding.word_embeddings.weight"


class LearnerState:
    """A learner as a checkpoint saves and restores it (checkpoint/saver.py)."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.rank, self.is_driver = learner.rank, learner.is_driver
        self.layout, self.device = learner.layout, learner.device

    @property
    def steps(self) -> int:
        return self._learner.steps

    def blocks(self) -> Iterator[Block]:
        """What this rank has to write, as views of the learner's own memory; no two ranks write the same."""
        for name, parameter in self._learner.named_parameters():
            param = find(name, self._learner.shape)
            if not _writes(self._learner, param):
                continue
            entry, *_ = entries(param, self._learner.shape, stacked=not self._learner.shape.dense_layers)
            whole = param.local_shape(Layout())
            regions = shard_regions(param, self._learner.layout, self._learner.place)
            if _first_replica(self._learner, param):
                for region in regions:
                    yield part_of(entry, whole, region.offset, _part(parameter.detach(), region))
            for kind, run, start, stop in _optimizer_runs(self._learner, parameter):
                for at, region in run_regions(regions, tuple(parameter.shape), start, stop):
                    values = run[at : at + torch.Size(region.size).numel()].view(region.size)
                    yield part_of(entry, whole, region.offset, values, f"{OPTIMIZER}{kind}.")

    def restore(self, reader: Reader, steps: int) -> None:
        """Weights and optimizer after `steps` optimizer steps, written by a learner of any layout."""
        if steps:
            for each in _optimizers(self._learner):
                each._init_optimizer_states_with_dummy_values()  # overwritten below
        for name, parameter in self._learner.named_parameters():
            _fill(self._learner, reader, find(name, self._learner.shape), parameter.data)
        self._learner.optimizer.reload_model_params()
        self._learner.weights_changed()
        for name, parameter in self._learner.named_parameters() if steps else ():
            for kind, run, start, stop in _optimizer_runs(self._learner, parameter):
                local = torch.zeros(parameter.shape, dtype=run.dtype)
                _fill(self._learner, reader, find(name, self._learner.shape), local, f"{OPTIMIZER}{kind}.")
                run.copy_(local.flatten()[start:stop])
        for each in _optimizers(self._learner) if steps else ():
            _set_steps(each.optimizer, steps)
        self._learner.steps = steps

    def own(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """This rank's small rest: tensors, and text."""
        tensors = random_tensors(self._learner) | {
            name: value.clone() for name, value in self._learner.measured().items()
        }
        return tensors, {
            "rng.python": json.dumps(random.getstate()),
            "nonfinite": str(self._learner.nonfinite.in_a_row),
        }

    def restore_own(self, tensors: dict[str, Tensor], text: dict[str, str]) -> None:
        self._learner.measure(tensors)
        restore_random(self._learner, tensors)
        version, numbers, gauss = json.loads(text["rng.python"])
        random.setstate((version, tuple(numbers), gauss))
        self._learner.nonfinite.in_a_row = int(text.get("nonfinite", 0))

    def restore_measured(self, ranks: list[dict[str, Tensor]]) -> None:
        """From ranks of another layout: what any of them has seen. Their random states mean nothing here."""
        seen = {name: torch.stack([rank[name] for rank in ranks]).amax(0) for name in self._learner.measured()}
        self._learner.measure(seen)


def random_tensors(learner: Learner) -> dict[str, Tensor]:
    """What the model's own random numbers come from."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        tensors[f"{TRACKER}{name}"] = state
    if learner.device.type != "cpu":
        tensors["rng.device"] = torch.cuda.get_rng_state()
    return {name: value.clone() for name, value in tensors.items()}


def restore_random(learner: Learner, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    states = {name.removeprefix(TRACKER): value for name, value in tensors.items() if name.startswith(TRACKER)}
    tensor_parallel.get_cuda_rng_tracker().set_states(states)
    if "rng.device" in tensors and learner.device.type != "cpu":
        torch.cuda.set_rng_state(tensors["rng.device"])


def _writes(learner: Learner, param: Param) -> bool:
    """Of the ranks that hold the same shard in a tensor-parallel group, the first."""
    if param.row.copy:
        return False
    _, place = param.tensor_parallel(learner.layout, learner.place)
    return param.row.split is not Split.replicated or place == 0


def _first_replica(learner: Learner, param: Param) -> bool:
    return (learner.place.edp if param.row.expert else learner.place.dp) == 0


def _part(local: Tensor, region: Region) -> Tensor:
    for axis, (start, length) in enumerate(zip(region.start, region.size, strict=True)):
        local = local.narrow(axis, start, length)
    return local


def _fill(learner: Learner, reader: Reader, param: Param, local: Tensor, kind: str = "") -> None:
    """A shard, or what the optimizer keeps for it; a copy of tied embeddings is filled from the embeddings."""
    stored = find(EMBEDDING, learner.shape) if param.row.copy else param
    entry = reader.find(stored, learner.shape)
    for region in shard_regions(stored, learner.layout, learner.place):
        _part(local, region).copy_(reader.read(entry, region.offset, region.size, kind))


def _optimizers(learner: Learner) -> Iterator[Any]:
    yield from learner.optimizer.chained_optimizers


def _optimizer_runs(learner: Learner, parameter: torch.nn.Parameter) -> Iterator[tuple[str, Tensor, int, int]]:
    """(kind, flat values, from, to) of what this rank's optimizer holds of a shard."""
    for each in _optimizers(learner):
        if parameter not in each.model_param_group_index_map:
            continue
        held = each._get_model_param_range_map(parameter)["param"]
        for kind, values in each._get_main_param_and_optimizer_states(parameter).items():
            master = kind == "param" and values.dtype == parameter.dtype  # FP32: the weights themselves
            if kind != "step" and not master:
                yield kind, values.detach().flatten(), held.start, held.end


def _set_steps(optimizer: Any, steps: int) -> None:
    """torch's Adam counts for each parameter, Transformer Engine's for each group."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.as_tensor(state["step"]).fill_(steps) if isinstance(state["step"], Tensor) else steps
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = steps
