"""The learner: a policy under megatron-core that gives logprobs and takes optimizer steps, the same on every rank.

The loss is divided by counts over the whole minibatch, known before the step: micro-batches, packs and data-parallel
ranks add up, and nothing is averaged anywhere.

B rows of the batch, b rows of a micro-batch, T response positions, N response tokens of a pack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.forward import ForwardPasses
from megatron_rl.learner.head import Scores
from megatron_rl.learner.logprobs import Truncation
from megatron_rl.learner.nonfinite import NonFiniteUpdates
from megatron_rl.learner.optimizer import clip, learning_rate
from megatron_rl.learner.packing import Pack, in_one_copy
from megatron_rl.learner.policy import Sections
from megatron_rl.learner.state import LearnerState
from megatron_rl.loss.policy_loss import Totals, count_totals, policy_loss, seen_tokens
from megatron_rl.models.model import Model
from megatron_rl.rollout_correction.metrics import KEPT_LOG_MASS, OUTSIDE_SUPPORT
from megatron_rl.rollout_correction.weights import step_scale
from megatron_rl.types import LossInputs, OwnPass, Targets


class Learner(ForwardPasses):
    """One rank's part of the policy, its optimizer, and the methods that all ranks call together."""

    def __init__(
        self,
        model: Model,
        sections: Sections,
        dump_dir: Path | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(model, sections)
        self.loss, self.correction = sections.loss, sections.correction
        self._nonfinite = NonFiniteUpdates(self, LearnerState(self).weights, dump_dir, note)
        self._own_pass: OwnPass | None = None

    def update(self, targets: Targets) -> dict[str, float]:
        """One optimizer step on the global minibatch; the same metrics on every rank."""
        counted_BT, groups_B = targets.denominator_mask_BT.to(self.device), targets.batch.groups_B.to(self.device)
        totals = count_totals(counted_BT, groups_B, self.rollout.max_response_tokens, targets.weights_BT)
        seen_BT = seen_tokens(self.loss, targets.mask_BT, targets.denominator_mask_BT)
        rows = seen_BT.any(dim=1).nonzero().flatten().tolist()  # the others add nothing
        if not rows:  # no term of the loss looks at any token: weights, momentum and the schedule stay as they are
            return {"loss/total": 0.0, "optim/grad_norm": 0.0, "optim/updates": 0.0}
        if self.offload is not None:
            self.offload.take_back()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._nonfinite.begin()
        tokens = max(1, int(targets.mask_BT.sum()))
        packs = self._packs(targets.batch, rows)
        anchored = targets.anchor_logprobs_BT is not None
        self._forward_clock.take()
        with nullcontext() if anchored else self._activations.looking(True):
            results = self._run(packs, self._asked(), partial(self._loss, targets, totals, tokens))
        if not anchored:
            logprobs_BT = self._gathered(targets.batch, packs, [logprobs_bT for _, logprobs_bT in results])
            logprobs_BT[~seen_BT.any(dim=1)] = math.nan
            self._own_pass = OwnPass(logprobs_BT, self._forward_clock.take())
        mine: dict[str, float] = {}
        for metrics, _ in results if self.ranks.reports else ():
            for name, value in metrics.items():
                mine[name] = mine.get(name, 0.0) + float(value)
        return self._step(targets, self.ranks.add_up(mine))

    def take_own_pass(self) -> OwnPass | None:
        """The last update's forward pass, where it had no anchor and something to train on."""
        taken, self._own_pass = self._own_pass, None
        return taken

    def _loss(
        self, targets: Targets, totals: Totals, tokens: int, mine: Pack, scores: Scores
    ) -> tuple[Tensor, Tensor, tuple[dict[str, Any], Tensor]]:
        """The micro-batch's share of the loss, a count megatron-core wants and we do not use, metrics and logprobs."""
        unused = torch.zeros((), dtype=torch.int, device=self.device)
        if not mine.rows:
            # a replica without rows still takes part in every collective
            return scores.logprobs_N.sum() * 0.0, unused, ({}, torch.zeros(0, mine.horizon))
        assert scores.entropy_N is not None
        entropy_bT, logprobs_bT = mine.matrix(scores.entropy_N), mine.matrix(scores.logprobs_N)
        inputs = loss_inputs(targets, mine, logprobs_bT, self.device)
        if self.loss.entropy_coef:
            inputs = replace(inputs, entropy_BT=entropy_bT)
        loss, metrics = policy_loss(inputs, self.loss, totals, self.correction)
        entropy = (entropy_bT.detach() * inputs.mask_BT).sum() / tokens
        found = {**metrics, "loss/total": loss.detach(), "loss/entropy": entropy}
        if scores.truncation is not None:
            found |= {name: value / tokens for name, value in _sums(scores.truncation, mine, inputs.mask_BT)}
        return loss, unused, (found, logprobs_bT.detach())

    def _step(self, targets: Targets, metrics: dict[str, float]) -> dict[str, float]:
        """Clip and step, unless something is not a number."""
        rate = learning_rate(self.optim, self.steps, self.run.steps * self.learner.n_minibatches)
        rate *= step_scale(targets.weights_BT, targets.mask_BT, self.correction.step_power)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        finite = math.isfinite(norm) and math.isfinite(metrics.get("loss/total", 0.0))
        if finite:
            clip(self.optimizer, norm, self.clip_grad)
            self.optimizer.step_with_ready_grads()
            self.weights_changed()
            self.steps += 1
            self.left_out_in_a_row = 0
        else:
            self._nonfinite.met(targets, metrics, norm)
        return {
            **metrics,
            "optim/grad_norm": norm,
            "optim/lr": rate,
            "optim/updates": float(finite),
            "optim/skipped": float(not finite),
            "optim/clipped": float(finite and 0 < self.clip_grad < norm),
        }


def _sums(found: Truncation, mine: Pack, mask_bT: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Over the tokens that are trained on."""
    yield OUTSIDE_SUPPORT, (mine.matrix(found.outside_N.float()) * mask_bT).sum()
    yield KEPT_LOG_MASS, (mine.matrix(found.log_mass_N) * mask_bT).sum()


def loss_inputs(targets: Targets, mine: Pack, logprobs_bT: Tensor, device: torch.device) -> LossInputs:
    """The micro-batch's rows and columns of everything that the loss looks at."""
    batch, rows = targets.batch, torch.tensor(mine.rows)
    names = [
        "anchor_logprobs",
        "ref_logprobs",
        "weights",
        "mask",
        "denominator_mask",
        "selected",
        "advantages",
        "staleness",
    ]
    matrices = {f"{name}_BT": getattr(targets, f"{name}_BT") for name in names}
    matrices |= {"sampler_logprobs_BT": batch.sampler_logprobs_BT, "turns_BT": batch.turns_BT}
    cut = {"advantages_B": targets.advantages_B[rows], "prompt_ids_B": batch.groups_B[rows]}
    cut |= {name: matrix_BT[rows, : mine.horizon] for name, matrix_BT in matrices.items() if matrix_BT is not None}
    there: dict[str, Any] = dict.fromkeys((*matrices, "entropy_BT"))
    return LossInputs(logprobs_BT=logprobs_bT, **(there | in_one_copy(cut, device)))
