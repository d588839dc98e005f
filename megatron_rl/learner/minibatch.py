"""The rows of one micro-batch, as the loss wants them.

B rows of the minibatch, b rows of a micro-batch, T response positions.
"""

from __future__ import annotations

import torch
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
        anchor_logprobs_BT=maybe(targets.anchor_logprobs_BT),
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
