"""Learner of one rank: takes optimizer steps on minibatches with megatron-core; its forward passes
are in forward.py.

The loss is divided by counts over the whole minibatch, known before the step: micro-batches, packs
and data-parallel ranks add up, and nothing is averaged anywhere.

B rows of a batch, N response tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.batch import Batch, Share, UpdateInputs
from megatron_rl.config.schema import Config
from megatron_rl.learner.forward import ForwardPasses
from megatron_rl.learner.modules.head import LogprobOutput
from megatron_rl.learner.modules.packing import Pack, in_one_copy, unpadded
from megatron_rl.learner.nonfinite import NonFiniteUpdates
from megatron_rl.learner.optimizer import clip, learning_rate
from megatron_rl.learner.profile import Profiler
from megatron_rl.learner.state import LearnerState
from megatron_rl.loss.policy_loss import (
    Totals,
    count_totals,
    over_trained,
    policy_loss,
    read_tokens,
)
from megatron_rl.models.model import Model
from megatron_rl.rollout_correction.metrics import KEPT_LOG_MASS, OUTSIDE_SUPPORT
from megatron_rl.types import Metrics


@dataclass(frozen=True)
class Counted:
    """Rows and token count of a minibatch, known to every rank."""

    rows: Tensor  # of the table, with a token that a loss looks at
    tokens: int  # that are trained on
    totals: Totals


class Learner(ForwardPasses):
    """A rank's part of the policy, its optimizer, and the methods that all ranks call together."""

    def __init__(
        self,
        model: Model,
        config: Config,
        dump_dir: Path | None = None,
    ) -> None:
        super().__init__(model, config)
        self.loss = config.loss
        self.correction = config.correction
        # of each stage one
        speaks = (self.place.replica, self.place.tp, self.place.cp) == (
            0,
            0,
            0,
        )
        self.profiler = Profiler(config.log.profile_steps, dump_dir, self.rank if speaks else None)
        self._nonfinite = NonFiniteUpdates(self, LearnerState(self).weights, dump_dir)
        self._own_logprobs_N: Tensor | None = None

    def update(self, share: Share, targets: UpdateInputs, rows: Tensor | None = None) -> Metrics:
        """Run one optimizer step on the minibatch, or on these rows of the table; same metrics on
        all ranks. `targets`: of the replica's rows.
        """
        minibatch = torch.arange(len(share.all)) if rows is None else rows
        about = self._counted(share, targets, minibatch)
        # no term of the loss reads a token: weights, momentum and schedule are unchanged
        if not len(about.rows):
            return {"loss/total": 0.0, "optim/grad_norm": 0.0, "optim/updates": 0.0}
        if self.offload is not None:
            self.offload.take_back()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._nonfinite.begin()
        packs = self._packs(share, about.rows)
        # copied before the first micro-batch: a copy between them would make the CPU wait for the
        # device
        columns = {mine.rows: on_device(targets, mine.rows, self.device) for mine in packs}
        about = replace(about, totals=about.totals.to(self.device))
        anchored = targets.anchor_logprobs_N is not None
        with self.profiler.tracing("update", len(packs) * len(self.chunks)):
            with nullcontext() if anchored else self._activations.looking(True):
                asked = self._asked(top=targets.top_logprobs_E is not None)
                results = self._run(packs, asked, partial(self._loss, columns, about))
            if not anchored:
                logprobs = [logprobs_N for _, logprobs_N in results]
                own_N = self._gathered(share, packs, logprobs)
                seen_B = torch.isin(share.own, about.rows)
                own_N[~share.batch.responses.at_tokens(seen_B)] = math.nan
                self._own_logprobs_N = own_N
            mine: Metrics = {}
            for metrics, _ in results if self.ranks.reports else ():
                for name, value in metrics.items():
                    mine[name] = mine.get(name, 0.0) + float(value)
            metrics = over_trained(self.ranks.add_up(mine))
            return self._step(metrics, lambda: self._whole(share, targets, minibatch))

    def _counted(self, share: Share, targets: UpdateInputs, minibatch: Tensor) -> Counted:
        counted_N = targets.denominator_mask_N
        masks = (
            targets.mask_N,
            counted_N,
            read_tokens(self.loss, targets),
            targets.weights_N > 0,
        )
        counts = [targets.responses.count(mask_N) for mask_N in masks]
        counts_B4 = share.everywhere(torch.stack(counts, dim=1))[minibatch]
        trained_B, counted_B, seen_B, measured_B = counts_B4.unbind(dim=1)
        return Counted(
            rows=minibatch[seen_B > 0],  # the others add nothing
            tokens=max(1, int(trained_B.sum())),
            totals=count_totals(
                counted_B,
                share.all.groups_B[minibatch],
                self.rollout.max_response_tokens,
                int(measured_B.sum()),
            ),
        )

    def _whole(
        self, share: Share, targets: UpdateInputs, minibatch: Tensor
    ) -> tuple[Batch, UpdateInputs] | None:
        """A minibatch of all replicas, on the driver. Experts that were replayed are left out where
        stages have those of their own layers alone.
        """
        batch = share.batch
        if self.layout.pp > 1 and len(share.rows_of) > 1:
            batch = replace(batch, experts_PLK=None)
        of_batch: dict[str, Any] = self.data_plane.collect(share, batch.columns, batch)
        of_targets: dict[str, Any] = self.data_plane.collect(share, targets.columns, targets)
        if not self.is_driver:
            return None
        whole_batch = replace(batch, **of_batch)
        whole_targets = replace(targets, **of_targets)
        return whole_batch.rows(minibatch), whole_targets.rows(minibatch)

    def take_own_logprobs(self) -> Tensor | None:
        """Logprobs of the replica's response tokens by the last update's forward pass, where it had
        no anchor and something to train on; NaN in rows that nothing was trained on.
        """
        taken = self._own_logprobs_N
        self._own_logprobs_N = None
        return taken

    def _loss(
        self,
        columns: Mapping[tuple[int, ...], UpdateInputs],
        about: Counted,
        mine: Pack,
        scores: LogprobOutput,
    ) -> tuple[Tensor, Tensor, tuple[dict[str, Any], Tensor]]:
        """The micro-batch's share of the loss, a count megatron-core wants and we do not use,
        metrics and logprobs.
        """
        unused = torch.zeros((), dtype=torch.int, device=self.device)
        if not mine.rows:
            # a replica without rows still takes part in every collective
            return scores.logprobs_N.sum() * 0.0, unused, ({}, torch.zeros(0))
        assert scores.entropy_N is not None
        targets = columns[mine.rows]
        top_logprobs_E = None
        if targets.top_logprobs_E is not None:
            assert scores.top_logprobs_NM is not None and targets.top_counts_N is not None
            entries = len(targets.top_logprobs_E)
            top_logprobs_E = unpadded(scores.top_logprobs_NM, targets.top_counts_N, entries)
        loss, metrics = policy_loss(
            scores.logprobs_N,
            targets,
            self.loss,
            about.totals,
            self.correction,
            scores.entropy_N if self.loss.entropy_coef else None,
            top_logprobs_E,
        )
        entropy = (scores.entropy_N.detach() * targets.mask_N).sum() / about.tokens
        found = {**metrics, "loss/total": loss.detach(), "loss/entropy": entropy}
        if scores.truncation is not None:
            trained_N = targets.mask_N
            outside_N = scores.truncation.outside_N
            found[OUTSIDE_SUPPORT] = (outside_N & trained_N).sum() / about.tokens
            log_mass_N = scores.truncation.log_mass_N
            found[KEPT_LOG_MASS] = (log_mass_N * trained_N).sum() / about.tokens
        return loss, unused, (found, scores.logprobs_N.detach())

    def _step(
        self, metrics: Metrics, whole: Callable[[], tuple[Batch, UpdateInputs] | None]
    ) -> Metrics:
        """Clip and step, unless the loss or the gradient norm is not finite."""
        rate = learning_rate(self.optim, self.steps, self.run.steps * self.learner.n_minibatches)
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
            self._nonfinite.met(whole, metrics, norm)
        return {
            **metrics,
            "optim/grad_norm": norm,
            "optim/lr": rate,
            "optim/updates": float(finite),
            "optim/skipped": float(not finite),
            "optim/clipped": float(finite and 0 < self.clip_grad < norm),
        }


def on_device(targets: UpdateInputs, rows: Sequence[int], device: torch.device) -> UpdateInputs:
    """Copy the targets of a pack's rows to the device at once, with segments computed on the CPU to
    avoid a synchronization.
    """
    part = targets.rows(torch.tensor(rows, dtype=torch.int64))
    turns = part.turns
    of_turns: dict[str, Tensor] = {}
    if turns is not None and turns.unit_R is not None:
        of_turns = {"lengths_R": turns.lengths_R, "unit_R": turns.unit_R}
    there: dict[str, Any] = in_one_copy(part.columns | of_turns, device)
    if turns is not None:
        turns = replace(turns, **{name: there.pop(name) for name in of_turns})
    moved = replace(part, **there)
    vars(moved)["responses"] = replace(part.responses, lengths_R=moved.response_lengths_B)
    vars(moved)["turns"] = turns
    return moved
