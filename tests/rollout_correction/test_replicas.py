"""Replicas that correct their own rows: weights, masks, advantages and metrics of the whole batch.

Shape legend: N response tokens, B rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from matrices import batch_of

from megatron_rl.batch import Batch, Share
from megatron_rl.config.schema import (
    AdvantageConfig,
    CorrectionConfig,
    Estimator,
    LossConfig,
    RejectRule,
    WeightConfig,
)
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.rollout_correction.breakdown import (
    mismatch_by_age,
    mismatch_by_format,
    mismatch_in_sessions,
)
from megatron_rl.rollout_correction.correction import correct

ROWS = 24
COLUMNS = 31
NEGATIVE = RejectRule(level="token", stat="k3", high=0.05, when="negative_advantage")
CORRECTIONS = {
    "tis": CorrectionConfig(weight=WeightConfig(high=1.1)),
    "normalized": CorrectionConfig(weight=WeightConfig(high=1.1, normalize=True)),
    "normalized rows": CorrectionConfig(
        weight=WeightConfig(level="sequence", high=1.5, normalize=True)
    ),
    "turns": CorrectionConfig(weight=WeightConfig(level="turn", high=1.2)),
    "prefixes": CorrectionConfig(weight=WeightConfig(level="prefix", high=1.2)),
    "sample size": CorrectionConfig(weight=WeightConfig(high=None, target_ess=0.9)),
    "budget": CorrectionConfig(reject=[RejectRule(level="token", stat="m2", budget=0.03)]),
    "budget of rows": CorrectionConfig(
        reject=[RejectRule(level="sequence", stat="k3", reduce="mean", budget=0.02)]
    ),
    "rebaselined": CorrectionConfig(
        reject=[RejectRule(level="sequence", stat="abs", reduce="max", high=1.6), NEGATIVE],
        rebaseline=True,
        renormalize=True,
    ),
    "zero where there is no ratio": CorrectionConfig(non_finite="zero"),
}


@dataclass
class Threads:
    """Replicas that are threads, which meet in each sum."""

    count: int
    local: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.count, timeout=60)
        self.given: list[Any] = [None] * self.count

    @property
    def place(self) -> int:
        return self.local.place

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        self.given[self.place] = values
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        found = self.gather(values)
        assert len({(one.dtype, one.shape) for one in found}) == 1
        return torch.stack(found).sum(dim=0)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(values)).amax(dim=0)

    def run(self, work: Callable[[], Any]) -> list[Any]:
        def start(place: int) -> Any:
            self.local.place = place
            try:
                return work()
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(start, range(self.count)))


def sessions() -> tuple[Batch, torch.Tensor]:
    """Groups of four sessions with up to two branches, faults of the sampler, two formats."""
    random = torch.Generator().manual_seed(2)
    mask_BT = torch.rand(ROWS, COLUMNS, generator=random) < 0.9
    mask_BT[5] = False
    mu_BT = -2 * torch.rand(ROWS, COLUMNS, generator=random)
    prox_BT = mu_BT + 0.15 * torch.randn(ROWS, COLUMNS, generator=random)
    mu_BT[3, 4] = torch.nan
    rewards_B = torch.rand(ROWS // 2, generator=random).repeat_interleave(2)
    rewards_B[8:10] = torch.nan
    batch = batch_of(
        mask_BT,
        mu_BT,
        rewards_B=rewards_B,
        groups_B=torch.arange(ROWS) // 8,
        samples_B=torch.arange(ROWS) // 2 % 4,
        versions_B=torch.arange(ROWS) % 3,
        formats_B=torch.arange(ROWS) % 2,
        turns_BT=(torch.arange(COLUMNS) // 5 - 1).int().expand(ROWS, COLUMNS),
        credit_BT=torch.randn(ROWS, COLUMNS, generator=random),
    )
    return batch, prox_BT.reshape(-1)


def shared(batch: Batch, replicas: Threads) -> Share:
    """Rows of a group, and even of a session, on several replicas. The last of four replicas has a
    single row, that of five none.
    """
    rows = torch.arange(ROWS)
    owners_B = rows % max(1, replicas.count - 1)
    if replicas.count < 5:
        owners_B[7] = replicas.count - 1
    rows_of = [(owners_B == place).nonzero().flatten() for place in range(replicas.count)]
    return Share(batch.rows(rows_of[replicas.place]), batch.table, rows_of, replicas)


def measured(count: int, config: CorrectionConfig, estimator: Estimator) -> list[dict[str, Any]]:
    """Return the results of each replica, with tokens in the order of the whole batch."""
    batch, prox_N = sessions()
    replicas = Threads(count)

    def work() -> dict[str, Any]:
        share = shared(batch, replicas)
        tokens_N = batch.responses.at_tokens(torch.isin(torch.arange(ROWS), share.own))
        own_N = prox_N[tokens_N]
        found, advantages_B, _ = correct(share, own_N, config, AdvantageConfig(estimator=estimator))
        selected = {
            name: select_by_covariance(
                share,
                own_N,
                found.advantages_B,
                found.mask_N,
                LossConfig(name=name, params={"cov_fraction": 0.1}),
                seed=3,
            )
            for name in ("clip_cov", "kl_cov")
        }
        return {
            "tokens": tokens_N,
            "advantages": advantages_B,
            "weights": found.weights_N,
            "mask": found.mask_N,
            "denominators": found.denominator_mask_N,
            **selected,
            "metrics": found.metrics
            | mismatch_by_age(own_N, share, 2)
            | mismatch_by_format(own_N, share)
            | mismatch_in_sessions(own_N, share),
        }

    return replicas.run(work)


@pytest.mark.parametrize("estimator", [Estimator.grpo, Estimator.reinforce_pp])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_whole_batch_s(name: str, estimator: Estimator) -> None:
    (whole,) = measured(1, CORRECTIONS[name], estimator)
    assert whole["mask"].any() and len(whole["metrics"]) > 40
    for count in (2, 4, 5):
        for found in measured(count, CORRECTIONS[name], estimator):
            own_N = found["tokens"]
            assert torch.equal(found["advantages"], whole["advantages"])
            for column in ("mask", "denominators", "clip_cov", "kl_cov"):
                assert torch.equal(found[column], whole[column][own_N]), column
            torch.testing.assert_close(
                found["weights"], whole["weights"][own_N], rtol=1e-6, atol=0.0
            )
            assert found["metrics"] == pytest.approx(whole["metrics"], rel=1e-6, abs=1e-7)
