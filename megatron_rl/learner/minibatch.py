"""Parts of a minibatch: the rows of one micro-batch as the loss wants them, and the whole of it on disk.

B rows of the minibatch, b rows of a micro-batch, T response positions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.learner.packing import Pack
from megatron_rl.types import LossInputs, Targets


def loss_inputs(targets: Targets, mine: Pack, logprobs_bT: Tensor, device: torch.device) -> LossInputs:
    """The micro-batch's rows and columns of everything that the loss looks at."""
    rows = torch.tensor(mine.rows)

    def cut(matrix_BT: Tensor) -> Tensor:
        return matrix_BT[rows, : mine.horizon].to(device)

    def maybe(matrix_BT: Tensor | None) -> Tensor | None:
        return None if matrix_BT is None else cut(matrix_BT)

    return LossInputs(
        logprobs_BT=logprobs_bT,
        anchor_logprobs_BT=cut(targets.anchor_logprobs_BT),
        sampler_logprobs_BT=cut(targets.batch.sampler_logprobs_BT),
        ref_logprobs_BT=maybe(targets.ref_logprobs_BT),
        entropy_BT=None,
        advantages_B=targets.advantages_B[rows].to(device),
        weights_BT=cut(targets.weights_BT),
        mask_BT=cut(targets.mask_BT),
        denominator_mask_BT=cut(targets.denominator_mask_BT),
        prompt_ids_B=targets.batch.groups_B[rows].to(device),
        selected_BT=maybe(targets.selected_BT),
    )


def dump(targets: Targets, metrics: Mapping[str, float], path: Path) -> None:
    """A minibatch as safetensors, its metrics as the file's metadata."""
    parts = {f"batch.{name}": value for name, value in vars(targets.batch).items()} | vars(targets)
    # clones: the file refuses tensors that share memory
    tensors = {name: value.detach().cpu().clone() for name, value in parts.items() if isinstance(value, Tensor)}
    save_file(tensors, path, metadata={"metrics": json.dumps(dict(metrics))})
