"""The loop. Every rank runs it; rank 0 also drives the sampler and the rewards.

prompt -> rollout -> reward -> group filter -> prox logprobs -> rollout_correction -> advantage -> loss
-> learner step -> weight sync -> next rollout

Shape suffixes: B sequences, T response positions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rl.advantage import group_advantages
from megatron_rl.config.fleet import distinct_formats
from megatron_rl.config.schema import Anchor, Config, KvCache, ModelInit, RolloutSource
from megatron_rl.driver import Driver, Follower
from megatron_rl.learner.learner import Learner
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.preflight.files import read_hf_config
from megatron_rl.rollout_correction import Correction, apply_conditional_rules, keep_rows, rollout_correction
from megatron_rl.rollout_correction.breakdown import mismatch_by_format
from megatron_rl.rollout_correction.learner_reward import learner_reward
from megatron_rl.runs.metrics import combine
from megatron_rl.types import Batch, Targets
from megatron_rl.weight_sync import probe
from megatron_rl.weight_sync.export import export_hf
from megatron_rl.weight_sync.push import WeightSync


def train(config: Config, resolved_yaml: str, run_dir: Path, rank: int) -> None:
    """One run, from loaded weights to the last report."""
    driving = Driver(config, resolved_yaml, run_dir) if rank == 0 else Follower()
    with ExitStack() as last, driving as driver:
        learner = Learner(config, read_hf_config(config.model.path), dump_dir=run_dir / "dumps")
        # after the driver's last word: a rank that leaves ends the ones that still wait for it
        last.callback(learner.close)
        with closing(WeightSync(learner, driver.sampler, config)) as sync:
            load_policy(learner, config)
            calibrate(learner, driver, config)
            loop(config, driver, learner, sync)
            if config.log.export:
                export_hf(learner, config, run_dir / "model")


def load_policy(learner: Learner, config: Config) -> None:
    if config.model.init == ModelInit.pretrained:
        learner.load_hf(Path(config.model.path))
    else:
        learner.init_random(config.run.seed)
    if config.loss.kl_coef:
        learner.keep_reference()


def calibrate(learner: Learner, driver: Driver | Follower, config: Config) -> None:
    """Smoothing and an FP8 cache have to have seen a forward pass before the first sync: that of the first prompts."""
    if config.quantization.smoothing or config.quantization.kv_cache != KvCache.none:
        learner.logprobs(learner.broadcast(driver.prompt_batch()))


def loop(config: Config, driver: Driver | Follower, learner: Learner, sync: WeightSync, done: int = 0) -> None:
    """Steps after `done` up to run.steps; what `done` steps have made is what the sampler starts with."""
    recorder = driver.recorder
    recorder.log(done, publish(done, config, driver, learner, sync) | evaluate(done, config, driver, learner))
    seen = Seen()
    for step in range(done + 1, config.run.steps + 1):
        with recorder.phase("rollout"):
            batch, drawn = learner.broadcast(driver.collect(step))
        with recorder.phase("prox"):
            anchor_BT = anchor_logprobs(learner, batch, config)
            reference_BT = reference_logprobs(learner, batch, config)
            drawn |= learner_estimate(learner, driver, config)
        with recorder.phase("correction"):
            correction, advantages_B = correct(anchor_BT, batch, config)
        with recorder.phase("record"):
            driver.record(step, correction, advantages_B)
        with recorder.phase("update"):
            parts = minibatches(batch, anchor_BT, reference_BT, correction, advantages_B, config, step)
            updates = combine([learner.update(part) for part in parts])
        synced = publish(step, config, driver, learner, sync)
        evaluated = evaluate(step, config, driver, learner)
        seen = seen.after(batch)
        recorder.log(step, drawn | correction.metrics | updates | synced | evaluated | seen.metrics(batch, step))
        stop = learner.broadcast(driver.asked_to_stop() or reached(config, evaluated))
        if stop:
            recorder.note(f"stopped after step {step}: {stop}")
            break


def anchor_logprobs(learner: Learner, batch: Batch, config: Config) -> torch.Tensor:
    """p: the policy's own logprobs before the update. Not computed where nothing looks at them."""
    if config.correction.anchor == Anchor.sampler or config.rollout.source == RolloutSource.dataset:
        return batch.sampler_logprobs_BT
    return learner.logprobs(batch)


def reference_logprobs(learner: Learner, batch: Batch, config: Config) -> torch.Tensor | None:
    return learner.reference_logprobs(batch) if config.loss.kl_coef else None


def learner_estimate(learner: Learner, driver: Driver | Follower, config: Config) -> dict[str, float]:
    """The mean reward under the learner, over everything that was drawn: a forward pass for dropped groups too."""
    if not config.reward.learner_estimate:
        return {}
    everything = learner.broadcast(driver.everything_drawn())
    prox_BT = learner.logprobs(everything)
    return learner_reward(everything.rewards_B, prox_BT, everything.sampler_logprobs_BT, everything.mask_BT)


def correct(anchor_BT: torch.Tensor, batch: Batch, config: Config) -> tuple[Correction, torch.Tensor]:
    """Correction first, so that rejected answers can leave their group's baseline; then the advantages.

    An answer without a score is in neither the mask nor the baseline, whatever the correction says.
    """
    prox_BT = None if config.correction.anchor == Anchor.sampler else anchor_BT
    correction = rollout_correction(prox_BT, batch.sampler_logprobs_BT, batch.mask_BT, config.correction)
    counted_B = correction.baseline_keep_B(config.correction) & torch.isfinite(batch.rewards_B)
    advantages_B, keep_B = group_advantages(batch.rewards_B, batch.groups_B, counted_B, config.advantage)
    correction = keep_rows(correction, keep_B, config.correction)
    correction = replace(correction, metrics=correction.metrics | mismatch_by_format(prox_BT, batch))
    return apply_conditional_rules(correction, advantages_B, config.correction), advantages_B


def minibatches(
    batch: Batch,
    anchor_BT: torch.Tensor,
    reference_BT: torch.Tensor | None,
    correction: Correction,
    advantages_B: torch.Tensor,
    config: Config,
    step: int,
) -> Iterator[Targets]:
    """The step's optimizer updates: whole groups, shuffled, in `learner.n_minibatches` nearly equal parts."""
    selected_BT = select_by_covariance(anchor_BT, advantages_B, correction.mask_BT, config.loss, config.run.seed + step)
    groups = batch.groups_B.unique().tolist()
    count = min(config.learner.n_minibatches, len(groups))
    if count > 1:
        random.Random(f"{config.run.seed}/{step}").shuffle(groups)
    for part in range(count):
        rows = torch.isin(batch.groups_B, torch.tensor(groups[part::count])).nonzero().flatten()
        yield Targets(
            batch=batch.rows(rows),
            anchor_logprobs_BT=anchor_BT[rows],
            ref_logprobs_BT=None if reference_BT is None else reference_BT[rows],
            advantages_B=advantages_B[rows],
            weights_BT=correction.weights_BT[rows],
            mask_BT=correction.mask_BT[rows],
            denominator_mask_BT=correction.denominator_mask_BT[rows],
            selected_BT=None if selected_BT is None else selected_BT[rows],
        )


def publish(
    step: int, config: Config, driver: Driver | Follower, learner: Learner, sync: WeightSync
) -> dict[str, float]:
    """The policy into the sampler, where it is due; then, where that is due, the proof that it arrived."""
    if step % config.sync.every and step != config.run.steps:  # the last evaluation is of the last policy
        return {}
    with driver.recorder.phase("sync"):
        learner.make_room()
        with driver.syncing():
            metrics = sync.push(step).metrics()
        if due(step // config.sync.every, config.sync.verify_every):
            batch = learner.broadcast(driver.probe_batch(step))
            metrics |= probe.check_formats(
                batch,
                learner.logprobs(batch),
                distinct_formats(config.sampler, config.quantization),
                version=step,
                budget=config.sync.probe_budget,
                vocab=learner.shape.vocab,
                tied=learner.shape.tied,
            )
    return metrics


def evaluate(step: int, config: Config, driver: Driver | Follower, learner: Learner) -> dict[str, float]:
    every = config.eval.every
    if every == 0 or not (due(step, every) or step == config.run.steps):
        return {}
    with driver.recorder.phase("eval"):
        return learner.broadcast(driver.evaluate(step))


def due(step: int, every: int) -> bool:
    """At the start, and then every so many steps; with 0, at the start only."""
    return step == 0 or (every > 0 and step % every == 0)


def reached(config: Config, evaluated: dict[str, float]) -> str | None:
    metric = config.run.stop_metric
    if metric is None or metric not in evaluated or evaluated[metric] < config.run.stop_at:
        return None
    return f"{metric} reached {evaluated[metric]:.3f}, run.stop_at is {config.run.stop_at:g}"


@dataclass(frozen=True)
class Seen:
    """How much has been trained on."""

    samples: int = 0
    tokens: int = 0

    def after(self, batch: Batch) -> Seen:
        return replace(self, samples=self.samples + len(batch), tokens=self.tokens + int(batch.mask_BT.sum()))

    def metrics(self, batch: Batch, step: int) -> dict[str, float]:
        staleness_B = (step - 1 - batch.versions_B).clamp(min=0).float()
        return {
            "progress/samples": self.samples,
            "progress/tokens": self.tokens,
            "rollout/staleness_mean": float(staleness_B.mean()),
            "rollout/staleness_max": float(staleness_B.max()),
        }
