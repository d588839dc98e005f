"""The rows of one micro-batch, as the loss wants them.

B rows of the minibatch, b rows of a micro-batch, T response positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.one_copy import in_one_copy
from megatron_rl.learner.packing import Pack
from megatron_rl.types import LossInputs, Targets


def loss_inputs(targets: Targets, mine: Pack, logprobs_bT: Tensor, device: torch.device) -> LossInputs:
    """The micro-batch's rows and columns of everything that the loss looks at."""
    rows = torch.tensor(mine.rows)
    batch = targets.batch
    of_rows = {"advantages_B": targets.advantages_B, "prompt_ids_B": batch.groups_B}
    matrices = {
        "anchor_logprobs_BT": targets.anchor_logprobs_BT,
        "sampler_logprobs_BT": batch.sampler_logprobs_BT,
        "ref_logprobs_BT": targets.ref_logprobs_BT,
        "weights_BT": targets.weights_BT,
        "mask_BT": targets.mask_BT,
        "denominator_mask_BT": targets.denominator_mask_BT,
        "selected_BT": targets.selected_BT,
    }
    cut = {name: values_B[rows] for name, values_B in of_rows.items()}
    cut |= {name: matrix_BT[rows, : mine.horizon] for name, matrix_BT in matrices.items() if matrix_BT is not None}
    there: dict[str, Any] = dict.fromkeys(("anchor_logprobs_BT", "ref_logprobs_BT", "selected_BT", "entropy_BT"))
    return LossInputs(logprobs_BT=logprobs_bT, **(there | in_one_copy(cut, device)))
