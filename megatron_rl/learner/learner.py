"""Learner of one rank: takes optimizer steps on minibatches with megatron-core; its forward passes
are in forward.py.

The loss is divided by counts over the whole minibatch, known before the step: micro-batches, packs
and data-parallel ranks add up, and nothing is averaged anywhere.

B rows of the batch, b rows of a micro-batch, T response positions, N response tokens of a pack.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.batch import LossInputs, Targets
from megatron_rl.learner.forward import ForwardPasses
from megatron_rl.learner.modules.head import Scores
from megatron_rl.learner.modules.logprobs import Truncation
from megatron_rl.learner.modules.packing import Pack, in_one_copy
from megatron_rl.learner.nonfinite import NonFiniteUpdates
from megatron_rl.learner.optimizer import clip, learning_rate
from megatron_rl.learner.policy import Sections
from megatron_rl.learner.profile import Profiler
from megatron_rl.learner.shares import Share, SharedTargets
from megatron_rl.learner.state import LearnerState
from megatron_rl.loss.policy_loss import (
    Totals,
    count_totals,
    over_trained,
    policy_loss,
    seen_tokens,
)
from megatron_rl.models.model import Model
from megatron_rl.rollout_correction.metrics import KEPT_LOG_MASS, OUTSIDE_SUPPORT


@dataclass(frozen=True)
class About:
    """A minibatch, as every rank has to know it."""

    rows: list[int]  # of the batch, with a token that a loss looks at
    minibatch: Tensor  # all of its rows
    tokens: int  # that are trained on
    totals: Totals
    anchored: bool


class Learner(ForwardPasses):
    """A rank's part of the policy, its optimizer, and the methods that all ranks call together."""

    def __init__(
        self,
        model: Model,
        sections: Sections,
        dump_dir: Path | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(model, sections)
        self.loss = sections.loss
        self.correction = sections.correction
        # of each stage one
        speaks = (self.place.replica, self.place.tp, self.place.cp) == (
            0,
            0,
            0,
        )
        self.profiler = Profiler(
            sections.log.profile_steps, dump_dir, self.rank if speaks else None, note
        )
        self._nonfinite = NonFiniteUpdates(self, LearnerState(self).weights, dump_dir, note)
        self._own_logprobs_BT: Tensor | None = None

    def update(
        self, targets: Targets | SharedTargets, rows: Tensor | None = None
    ) -> dict[str, float]:
        """Run one optimizer step on the minibatch, or on these rows; same metrics on all ranks."""
        about = self._about(targets, torch.arange(len(targets.batch)) if rows is None else rows)
        # no term of the loss looks at any token: weights, momentum and schedule stay as they are
        if not about.rows:
            return {"loss/total": 0.0, "optim/grad_norm": 0.0, "optim/updates": 0.0}
        if self.offload is not None:
            self.offload.take_back()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._nonfinite.begin()
        work = self._work(targets.batch, about.rows)
        share = self.plane.loss_rows(targets, work.rows)
        # copied before the first micro-batch: a copy among them would make the host wait for the
        # device
        columns = {mine.rows: loss_columns(share, mine, self.device) for mine in work.packs}
        about = replace(about, totals=about.totals.to(self.device))
        with self.profiler.tracing("update", len(work.packs) * len(self.chunks)):
            with nullcontext() if about.anchored else self._activations.looking(True):
                results = self._run(work.packs, self._asked(), partial(self._loss, columns, about))
            if not about.anchored:
                logprobs_BT = self._gathered(
                    targets.batch, work, [logprobs_bT for _, logprobs_bT in results]
                )
                if len(logprobs_BT):
                    unseen_B = torch.ones(len(logprobs_BT), dtype=torch.bool)
                    unseen_B[about.rows] = False
                    logprobs_BT[unseen_B] = math.nan
                self._own_logprobs_BT = logprobs_BT
            mine: dict[str, float] = {}
            for metrics, _ in results if self.ranks.reports else ():
                for name, value in metrics.items():
                    mine[name] = mine.get(name, 0.0) + float(value)
            return self._step(about, targets, over_trained(self.ranks.add_up(mine)))

    def _about(self, targets: Targets | SharedTargets, rows: Tensor) -> About:
        """Facts of a minibatch for every rank, broadcast where the driver alone has the rows."""
        if isinstance(targets, Targets):
            return self._counted(targets, rows)
        if targets.whole is None:
            counted = None
        else:
            counted = vars(self._counted(targets.whole, rows))
        about = self.ranks.broadcast(counted and {**counted, "totals": vars(counted["totals"])})
        return About(**{**about, "totals": Totals(**about["totals"]), "minibatch": rows})

    def _counted(self, targets: Targets, rows: Tensor) -> About:
        if len(rows) == len(targets.batch):
            part = targets
        else:
            part = targets.rows(rows)
        horizon = self.rollout.max_response_tokens
        totals = count_totals(
            part.denominator_mask_BT, part.batch.groups_B, horizon, part.weights_BT
        )
        seen_B = seen_tokens(self.loss, part.mask_BT, part.denominator_mask_BT).any(dim=1)
        return About(
            rows=rows[seen_B].tolist(),  # the others add nothing
            minibatch=rows,
            tokens=max(1, int(part.mask_BT.sum())),
            totals=totals,
            anchored=part.anchor_logprobs_BT is not None,
        )

    def take_own_logprobs(self) -> Tensor | None:
        """Logprobs [B, T] of the last update's forward pass, where it had no anchor and something
        to train on; NaN in rows that nothing was trained on.
        """
        taken = self._own_logprobs_BT
        self._own_logprobs_BT = None
        return taken

    def _loss(
        self,
        columns: Mapping[tuple[int, ...], Mapping[str, Tensor]],
        about: About,
        mine: Pack,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, tuple[dict[str, Any], Tensor]]:
        """The micro-batch's share of the loss, a count megatron-core wants and we do not use,
        metrics and logprobs.
        """
        unused = torch.zeros((), dtype=torch.int, device=self.device)
        if not mine.rows:
            # a replica without rows still takes part in every collective
            return scores.logprobs_N.sum() * 0.0, unused, ({}, torch.zeros(0, mine.horizon))
        assert scores.entropy_N is not None
        entropy_bT = mine.matrix(scores.entropy_N)
        logprobs_bT = mine.matrix(scores.logprobs_N)
        inputs = loss_inputs(columns[mine.rows], mine, logprobs_bT)
        if self.loss.entropy_coef:
            inputs = replace(inputs, entropy_BT=entropy_bT)
        loss, metrics = policy_loss(inputs, self.loss, about.totals, self.correction)
        entropy = (entropy_bT.detach() * inputs.mask_BT).sum() / about.tokens
        found = {**metrics, "loss/total": loss.detach(), "loss/entropy": entropy}
        if scores.truncation is not None:
            found |= {
                name: value / about.tokens
                for name, value in _sums(scores.truncation, mine, inputs.mask_BT)
            }
        return loss, unused, (found, logprobs_bT.detach())

    def _step(
        self, about: About, targets: Targets | SharedTargets, metrics: dict[str, float]
    ) -> dict[str, float]:
        """Clip and step, unless something is not a number."""
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
            whole = targets if isinstance(targets, Targets) else targets.whole
            self._nonfinite.met(
                None if whole is None else whole.rows(about.minibatch), metrics, norm
            )
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


def loss_columns(share: Share, mine: Pack, device: torch.device) -> dict[str, Tensor]:
    """Values of the pack's rows that a loss reads, on the device."""
    index = torch.tensor(share.at(mine.rows), dtype=torch.int64)
    taken = {name: share.sequences.taken(name, one, index) for name, one in share.columns.items()}
    return in_one_copy({name: one for name, one in taken.items() if one is not None}, device)


def loss_inputs(columns: Mapping[str, Tensor], mine: Pack, logprobs_bT: Tensor) -> LossInputs:
    """Inputs of the policy loss for the rows of a pack, as matrices."""
    matrices = {
        name.replace("_N", "_BT"): mine.matrix(one)
        for name, one in columns.items()
        if name.endswith("_N")
    }
    turns_N = columns.get("turns_N")
    if turns_N is not None:
        matrices["turns_BT"] = mine.matrix(turns_N.long() + 1) - 1
    absent: dict[str, Any] = {one.name: None for one in fields(LossInputs)}
    rest = {"advantages_B": columns["advantages_B"], "prompt_ids_B": columns["groups_B"]}
    return LossInputs(**{**absent, "logprobs_BT": logprobs_bT, **matrices, **rest})
