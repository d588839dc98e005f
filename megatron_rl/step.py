"""Correction, advantages and targets of a step, of a replica's rows; metrics of the mismatch, of all
rows.

Shape suffixes: B rows, N response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_rl.advantage import turn_advantages
from megatron_rl.batch import Share, UpdateInputs
from megatron_rl.config.schema import Center, Config
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.rollout_correction.breakdown import (
    mismatch_by_age,
    mismatch_by_format,
    mismatch_in_sessions,
)
from megatron_rl.rollout_correction.correction import Correction, completed, correct, staleness


@dataclass(frozen=True)
class CorrectedBatch:
    """A replica's rows with their correction, and the advantages of all rows."""

    config: Config
    share: Share
    version: int  # the learner's, before the updates
    anchor_N: Tensor | None
    top_anchor_E: Tensor | None  # of the top tokens
    correction: Correction
    advantages_B: Tensor
    baseline_B: Tensor  # bool: rows that count in their group's baseline

    @classmethod
    def corrected(
        cls,
        config: Config,
        share: Share,
        version: int,
        anchor_N: Tensor | None,
        top_anchor_E: Tensor | None = None,
    ) -> CorrectedBatch:
        found = correct(share, anchor_N, config.correction, config.advantage, top_anchor_E)
        return cls(config, share, version, anchor_N, top_anchor_E, *found)

    def targets(self, reference_N: Tensor | None) -> UpdateInputs:
        """Inputs of all updates of the step. Covariance losses select among trained tokens."""
        config = self.config
        correction = self.correction
        batch = self.share.batch
        own_B = correction.advantages_B
        seed = config.run.seed + self.version + 1
        top: dict[str, Tensor | None] = {}
        reads = config.correction.reads_top_logprobs
        centered = config.correction.center != Center.none
        if centered or (reads and self.top_anchor_E is None):
            top = {
                "top_counts_N": batch.top_counts_N,
                "top_logprobs_E": batch.top_logprobs_E,
                "top_sampled_E": batch.top_sampled_E if centered else None,
                "top_anchor_E": self.top_anchor_E,
                "top_weights_E": correction.top_weights_E,
                "tail_weights_N": correction.tail_weights_N,
            }
        return UpdateInputs(
            prompt_lengths_B=batch.prompt_lengths_B,
            response_lengths_B=batch.response_lengths_B,
            groups_B=batch.groups_B,
            sampler_logprobs_N=batch.sampler_logprobs_N,
            anchor_logprobs_N=self.anchor_N,
            ref_logprobs_N=reference_N,
            advantages_B=own_B,
            weights_N=correction.weights_N,
            mask_N=correction.mask_N,
            denominator_mask_N=correction.denominator_mask_N,
            selected_N=select_by_covariance(
                self.share, self.anchor_N, own_B, correction.mask_N, config.loss, seed
            ),
            advantages_N=turn_advantages(
                self.share,
                self.advantages_B,
                self.baseline_B,
                config.advantage,
                config.environment.credit,
            ),
            staleness_N=staleness(batch, config.correction, self.version),
            turns_N=batch.turns_N,
            **top,
        )

    def completed(self, own_N: Tensor | None) -> CorrectedBatch:
        """Return the batch after its updates, whose forward pass may complete the correction."""
        if own_N is None:
            return self
        given = self.share, self.config.correction, self.config.advantage
        return replace(self, correction=completed(self.correction, own_N, *given))

    def metrics(self) -> dict[str, float]:
        """Metrics of the mismatch and of the correction."""
        prox_N = self.correction.prox_logprobs_N
        if prox_N is None:
            return self.correction.metrics
        return {
            **mismatch_by_format(prox_N, self.share, self.top_anchor_E),
            **mismatch_by_age(prox_N, self.share, self.version, self.top_anchor_E),
            **mismatch_in_sessions(prox_N, self.share, self.top_anchor_E),
            **self.correction.metrics,
        }

    def recorded(self) -> dict[str, Tensor | None]:
        """Columns for the record."""
        correction = self.correction
        return {
            "prox_logprobs_N": correction.prox_logprobs_N,
            "top_prox_logprobs_E": self.top_anchor_E,
            "weights_N": correction.weights_N,
            "mask_N": correction.mask_N,
        }
