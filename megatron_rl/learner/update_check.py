"""Check of a step's updates: what learner and quantized sampler gain, by the learner's own passes;
it may undo them.

The sampler that answers next has the learner's new weights, quantized: a step may vanish there, or
turn around. Some rows of the batch are passed again: by the learner, and as the sampler computes.
MIPU (arXiv 2606.29526) accepts updates by a proxy of what the inference engine has gained; here its
logprobs with the new weights are computed.

B rows that are looked at, T response positions.
"""

import torch
from torch import Tensor

from megatron_rl.batch import Batch, Targets
from megatron_rl.config.schema import UpdateCheckSection
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.shares import SharedTargets
from megatron_rl.learner.state import Snapshot
from megatron_rl.rollout_correction.correction import Correction
from megatron_rl.rollout_correction.estimates import gain


class UpdateCheck:
    """One step's check; every rank makes one before the step's updates."""

    def __init__(
        self, learner: Learner, section: UpdateCheckSection, targets: SharedTargets, version: int
    ) -> None:
        """`version`: the policy's, before the updates."""
        self._learner = learner
        self._limit = section.refuse
        whole = targets.whole
        batch = None if whole is None else self._chosen(whole, section.rows)
        # what answered may have been another policy than the one that is updated
        older = batch is not None and bool(
            (batch.mask_BT & (batch.token_versions_BT != version)).any()
        )
        self._batch = learner.plane.share(batch)
        older = learner.broadcast(older)
        if batch is None:
            self._sampler_BT = torch.zeros(0, 0)
        else:
            self._sampler_BT = batch.sampler_logprobs_BT
        if older:
            self._sampler_BT = self._as_sampler()
        self._before = None if section.refuse is None else Snapshot(learner)

    def _chosen(self, targets: Targets, most: int) -> Batch:
        if targets.advantages_BT is None:
            advantages_BT = targets.advantages_B[:, None]
        else:
            advantages_BT = targets.advantages_BT
        used_BT = targets.mask_BT & (advantages_BT != 0)
        candidates = used_BT.any(dim=1).nonzero().flatten()
        places = (
            torch.linspace(0, max(0, len(candidates) - 1), min(most, len(candidates)))
            .round()
            .long()
        )
        self._rows = candidates[places]  # whole batch, groups being neighbours
        self._advantages_BT = advantages_BT[self._rows]
        return targets.batch.rows(self._rows)

    def judged(self, correction: Correction | None) -> dict[str, float]:
        """Metrics of what the updates gained; puts the old weights back where the sampler has
        clearly become worse.
        """
        if not len(self._batch):
            return {}
        own_BT = self._learner.logprobs_unseen(self._batch)
        its_BT = self._as_sampler()
        found = self._learner.broadcast(
            None if correction is None else self._gains(own_BT, its_BT, correction)
        )
        if self._before is not None and found["update/refused"]:
            self._before.restore()
        return dict(found)

    def _gains(self, own_BT: Tensor, its_BT: Tensor, correction: Correction) -> dict[str, float]:
        width = own_BT.shape[1]  # of the longest of these rows
        source = correction.source
        advantages_BT = self._advantages_BT[:, :width]
        mask_BT, weights_BT = (
            one[self._rows, :width] for one in (correction.mask_BT, correction.weights_BT)
        )
        if source.prox_logprobs_BT is None:
            prox_BT = source.sampler_logprobs_BT
        else:
            prox_BT = source.prox_logprobs_BT
        own, own_error = gain(
            own_BT, prox_BT[self._rows, :width], advantages_BT * weights_BT, mask_BT
        )
        its, its_error = gain(its_BT, self._sampler_BT, advantages_BT, mask_BT)
        found = {"update/sampler_gain": its, "update/sampler_gain_stderr": its_error}
        found |= {"update/learner_gain": own, "update/learner_gain_stderr": own_error}
        if self._limit is not None:
            found["update/refused"] = float(own > 0 and its < -self._limit * its_error)
        return found

    def _as_sampler(self) -> Tensor:
        logprobs_BT = self._learner.expected_logprobs(self._batch)
        assert logprobs_BT is not None, "config/rules.py lets no other formats pass"
        return logprobs_BT
