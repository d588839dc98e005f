"""A learner's state as checkpoints save and restore it: weights, optimizer, random states, the
maxima it has measured.

Weights and optimizer are kept as full tensors (`models/shards.py`), so that any layout can resume.
"""

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.torch_dist.index import entries
from megatron_rl.checkpoint.torch_dist.reader import Reader
from megatron_rl.checkpoint.torch_dist.writer import Block, part_of
from megatron_rl.learner.policy import Policy
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import Param, find
from megatron_rl.models.shards import part, run_regions, shard_regions
from megatron_rl.models.table import Split

OPTIMIZER = "optimizer.state."  # as megatron-core names it
EMBEDDING = "embedding.word_embeddings.weight"


class LearnerState:
    """A learner as a checkpoint saves and restores it (checkpoint/saver.py)."""

    def __init__(self, learner: Policy) -> None:
        self._learner = learner
        self.rank = learner.rank
        self.is_driver = learner.is_driver
        self.layout = learner.layout
        self.device = learner.device

    @property
    def steps(self) -> int:
        return self._learner.steps

    def blocks(self) -> Iterator[Block]:
        """The blocks that this rank has to write, views of the learner's own memory; no two ranks
        write the same.
        """
        learner = self._learner
        shape = self._learner.shape
        for param, parameter in self._params():
            if not _writes(learner, param):
                continue
            entry, *_ = entries(param, shape, stacked=not shape.dense_layers)
            whole = param.local_shape(Layout())
            regions = shard_regions(param, learner.layout, learner.place)
            # of replicas the first
            if (learner.place.edp if param.row.expert else learner.place.dp) == 0:
                for region in regions:
                    yield part_of(
                        entry,
                        whole,
                        region.offset,
                        part(parameter.detach(), region.start, region.size),
                    )
            for kind, run, start, stop in _optimizer_runs(learner, parameter):
                for at, region in run_regions(regions, tuple(parameter.shape), start, stop):
                    values = run[at : at + torch.Size(region.size).numel()].view(region.size)
                    yield part_of(entry, whole, region.offset, values, f"{OPTIMIZER}{kind}.")

    def weights(self) -> Iterator[Block]:
        return (block for block in self.blocks() if not block.key.startswith(OPTIMIZER))

    def restore(self, reader: Reader, steps: int) -> None:
        """Load weights and optimizer after `steps` optimizer steps, saved in any layout."""
        learner = self._learner
        optimizers = learner.optimizer.chained_optimizers if steps else ()
        for each in optimizers:
            each._init_optimizer_states_with_dummy_values()  # overwritten below
        for param, parameter in self._params():
            _fill(learner, reader, param, parameter.data)
        learner.optimizer.reload_model_params()
        learner.weights_changed()
        for param, parameter in self._params() if steps else ():
            for kind, run, start, stop in _optimizer_runs(learner, parameter):
                local = torch.zeros(parameter.shape, dtype=run.dtype)
                _fill(learner, reader, param, local, f"{OPTIMIZER}{kind}.")
                run.copy_(local.flatten()[start:stop])
        for each in optimizers:
            _set_steps(each.optimizer, steps)
        learner.steps = steps

    def _params(self) -> Iterator[tuple[Param, torch.nn.Parameter]]:
        """Trained parameters: the model's, or those of its adapters."""
        for name, parameter in self._learner.named_parameters():
            if parameter.requires_grad:
                yield find(name, self._learner.shape), parameter

    def own(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the rest of the state, which is specific to this rank: tensors and text."""
        measured = {name: value.clone() for name, value in self._learner.measured.items()}
        text = {
            "rng.python": json.dumps(random.getstate()),
            "nonfinite": str(self._learner.left_out_in_a_row),
        }
        return self._learner.random_states() | measured, text

    def restore_own(self, tensors: dict[str, Tensor], text: dict[str, str]) -> None:
        self._measure(tensors)
        self._learner.restore_random(tensors)
        version, numbers, gauss = json.loads(text["rng.python"])
        random.setstate((version, tuple(numbers), gauss))
        self._learner.left_out_in_a_row = int(text.get("nonfinite", 0))

    def restore_measured(self, ranks: list[dict[str, Tensor]]) -> None:
        """Take over the maxima of ranks of another layout, without their random states."""
        self._measure(
            {
                name: torch.stack([rank[name] for rank in ranks]).amax(0)
                for name in self._learner.measured
            }
        )

    def _measure(self, seen: Mapping[str, Tensor]) -> None:
        for name, held in self._learner.measured.items():
            held.copy_(seen[name])


def _writes(learner: Policy, param: Param) -> bool:
    """True if this rank is the first of those in a TP group that hold the same shard."""
    if param.row.copy:
        return False
    _, place = param.tensor_parallel(learner.layout, learner.place)
    return param.row.split is not Split.replicated or place == 0


def _fill(learner: Policy, reader: Reader, param: Param, local: Tensor, kind: str = "") -> None:
    """Fill a shard, or its optimizer state; a copy of tied embeddings from the embeddings."""
    stored = find(EMBEDDING, learner.shape) if param.row.copy else param
    entry = reader.find(stored, learner.shape)
    for region in shard_regions(stored, learner.layout, learner.place):
        part(local, region.start, region.size).copy_(
            reader.read(entry, region.offset, region.size, kind)
        )


def _optimizer_runs(
    learner: Policy, parameter: torch.nn.Parameter
) -> Iterator[tuple[str, Tensor, int, int]]:
    """(kind, flat values, from, to) of what this rank's optimizer holds of a shard."""
    for each in learner.optimizer.chained_optimizers:
        if parameter not in each.model_param_group_index_map:
            continue
        held = each._get_model_param_range_map(parameter)["param"]
        for kind, values in each._get_main_param_and_optimizer_states(parameter).items():
            # FP32: the weights themselves
            master = kind == "param" and values.dtype == parameter.dtype
            if kind != "step" and not master:
                yield kind, values.detach().flatten(), held.start, held.end


def _set_steps(optimizer: Any, steps: int) -> None:
    """Set the step counts: one per parameter in torch's Adam, one per group in TE's."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = (
                torch.as_tensor(state["step"]).fill_(steps)
                if isinstance(state["step"], Tensor)
                else steps
            )
    for group in optimizer.param_groups:
        if "step" in group:
            group["step"] = steps
