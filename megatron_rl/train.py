"""The loop. Every rank runs it; rank 0 also drives the sampler and the rewards.

prompt -> rollout -> reward -> group filter -> prox logprobs -> rollout_correction -> advantage -> loss
-> learner step -> weight sync -> next rollout

Shape suffixes: B sequences, T response positions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.advantage import group_advantages
from megatron_rl.checks import read_hf_config
from megatron_rl.driver import Driver, Follower
from megatron_rl.learner.learner import Learner
from megatron_rl.metrics import combine
from megatron_rl.rollout_correction import Correction, apply_conditional_rules, drop_rows, rollout_correction
from megatron_rl.schema import Anchor, Config, LossName, ModelInit
from megatron_rl.types import Batch, Targets
from megatron_rl.weight_sync.probe import check_probe
from megatron_rl.weight_sync.push import WeightSync


def train(config: Config, resolved_yaml: str, run_dir: Path, rank: int) -> None:
    """One run, from loaded weights to the last report."""
    with Driver(config, resolved_yaml, run_dir) if rank == 0 else Follower() as driver:
        with driver.recorder.phase("start"):
            learner = Learner(config, read_hf_config(config))
            load_policy(learner, config)
            sync = WeightSync(learner, driver.sampler, config)
        try:
            loop(config, driver, learner, sync)
        finally:
            sync.close()
            learner.close()


def loop(config: Config, driver: Driver | Follower, learner: Learner, sync: WeightSync) -> None:
    recorder, steps = driver.recorder, config.run.steps
    first = publish(0, config, driver, learner, sync) | evaluate(0, config, driver, learner)
    recorder.log(0, first)
    seen = Progress()
    for step in range(1, steps + 1):
        with recorder.phase("rollout"):
            drawn = learner.broadcast(driver.collect(step))
        batch = drawn.batch
        with recorder.phase("prox"):
            anchor_BT = anchor_logprobs(learner, batch, config)
        with recorder.phase("correction"):
            correction, advantages_B = correct(anchor_BT, batch, config)
        with recorder.phase("update"):
            updates = [learner.update(part) for part in minibatches(batch, anchor_BT, correction, advantages_B, config, step)]
        with recorder.phase("record"):
            if due(step, config.log.record_every, steps):
                driver.record(step, anchor_BT, correction, advantages_B)
        synced = publish(step, config, driver, learner, sync)
        evaluated = evaluate(step, config, driver, learner)
        seen = seen.after(batch)
        recorder.log(
            step, drawn.metrics | correction.metrics | combine(updates) | synced | evaluated | seen.metrics(step, batch)
        )
        stop = learner.broadcast(driver.asked_to_stop() or reached(config, evaluated))
        if stop:
            recorder.note(f"stopping after step {step}: {stop}")
            break


def anchor_logprobs(learner: Learner, batch: Batch, config: Config) -> torch.Tensor:
    """p: the policy's own logprobs before the update. Not computed where nothing looks at them."""
    if config.correction.anchor == Anchor.sampler or config.loss.name == LossName.cross_entropy:
        return batch.sampler_logprobs_BT
    return learner.logprobs(batch)


def correct(anchor_BT: torch.Tensor, batch: Batch, config: Config) -> tuple[Correction, torch.Tensor]:
    """Correction first, so that rejected answers can leave their group's baseline; then the advantages."""
    correction = rollout_correction(anchor_BT, batch.sampler_logprobs_BT, batch.mask_BT, config.correction)
    advantages_B, keep_B = baselines(correction, batch, config)
    correction = apply_conditional_rules(drop_rows(correction, keep_B), advantages_B, config.correction)
    return correction, advantages_B
