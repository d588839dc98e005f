"""Batch of a step on the driver: correction, advantages, targets of its updates, mismatch metrics.

Shape suffixes: B sequences, T response positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_rl.advantage import turn_advantages
from megatron_rl.batch import Batch, Targets
from megatron_rl.config.schema import Config
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.rollout_correction.breakdown import (
    mismatch_by_age,
    mismatch_by_format,
    mismatch_in_sessions,
)
from megatron_rl.rollout_correction.correction import Correction, completed, correct, staleness


@dataclass(frozen=True)
class Step:
    """A batch with its correction and its advantages."""

    config: Config
    batch: Batch
    version: int  # the learner's, before the updates
    anchor_BT: torch.Tensor | None
    correction: Correction
    advantages_B: torch.Tensor

    @classmethod
    def corrected(
        cls, config: Config, batch: Batch, version: int, anchor_BT: torch.Tensor | None
    ) -> Step:
        correction, advantages_B = correct(anchor_BT, batch, config.correction, config.advantage)
        return cls(config, batch, version, anchor_BT, correction, advantages_B)

    def targets(self, reference_BT: torch.Tensor | None) -> Targets:
        """Inputs of all updates of the step. Covariance losses select among trained tokens."""
        config = self.config
        correction = self.correction
        seed = config.run.seed + self.version + 1
        chosen = self.anchor_BT, self.advantages_B, correction.mask_BT
        compared = self.batch, self.advantages_B, correction.baseline_keep_B(config.correction)
        return Targets(
            batch=self.batch,
            anchor_logprobs_BT=self.anchor_BT,
            ref_logprobs_BT=reference_BT,
            advantages_B=self.advantages_B,
            weights_BT=correction.weights_BT,
            mask_BT=correction.mask_BT,
            denominator_mask_BT=correction.denominator_mask_BT,
            selected_BT=select_by_covariance(*chosen, config.loss, seed),
            advantages_BT=turn_advantages(*compared, config.advantage, config.environment.credit),
            staleness_BT=staleness(self.batch, config.correction, self.version),
        )

    def finished(self, own_BT: torch.Tensor | None) -> tuple[Step, dict[str, float]]:
        """The step after its updates, whose own pass may complete the correction; metrics of the
        mismatch and of it.
        """
        step = self
        if own_BT is not None:
            given = self.batch, self.config.correction, self.config.advantage
            step = replace(self, correction=completed(self.correction, own_BT, *given))
        prox_BT = step.correction.source.prox_logprobs_BT
        return step, {
            **mismatch_by_format(prox_BT, self.batch),
            **mismatch_by_age(prox_BT, self.batch, self.version),
            **mismatch_in_sessions(prox_BT, self.batch),
            **step.correction.metrics,
        }
