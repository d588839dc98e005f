"""The loop. Every rank runs it; rank 0 also drives the sampler and the rewards.

prompt -> rollout -> reward -> group filter -> prox logprobs -> rollout_correction -> advantage -> loss
-> learner step -> weight sync -> next rollout

Shape suffixes: B sequences, T response positions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from megatron_rl.config.fleet import distinct_formats, is_fleet
from megatron_rl.config.schema import (
    Anchor,
    Config,
    EvalSection,
    KvCache,
    LossConfig,
    ModelInit,
    ModelSection,
    QuantizationSection,
    RewardSection,
    RolloutSource,
    RunSection,
    Sleep,
    SyncSection,
)
from megatron_rl.driver import Driver, Follower
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.saver import Saver
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.models.model import Model
from megatron_rl.rollout_correction import Correction, correct
from megatron_rl.rollout_correction.breakdown import mismatch_by_format
from megatron_rl.rollout_correction.learner_reward import learner_reward
from megatron_rl.runs import checkpoints
from megatron_rl.runs.metrics import combine
from megatron_rl.types import Batch, Targets
from megatron_rl.weight_sync import probe
from megatron_rl.weight_sync.export import export_hf
from megatron_rl.weight_sync.push import WeightSync


def train(
    config: Config, resolved_yaml: str, run_dir: Path, rank: int, said: Callable[[], None] = lambda: None
) -> None:
    """One run, from loaded weights to the last report; after the driver's last word, `said` is called."""
    driving = Driver(config, resolved_yaml, run_dir) if rank == 0 else Follower()
    with ExitStack() as last, ExitStack() as word, driving as driver:
        word.callback(said)
        model = Model.read(config.model.folder, config.learner)
        learner = Learner(
            model,
            run=config.run,
            learner=config.learner,
            optim=config.optim,
            loss=config.loss,
            correction=config.correction,
            rollout=config.rollout,
            quantization=config.quantization,
            engine_sleeps=config.sampler.sleep != Sleep.none,
            dump_dir=run_dir / "dumps",
            note=driver.recorder.note,
        )
        # after the driver's last word: a rank that leaves ends the ones that still wait for it
        last.callback(learner.close)
        sync = WeightSync(
            learner,
            driver.sampler,
            distinct_formats(config.sampler, config.quantization),
            quantization=config.quantization,
            sync=config.sync,
            engines=config.sampler,
            fleet=is_fleet(config.sampler),
        )
        with closing(sync):
            saver = Saver(run_dir / "checkpoints", config.checkpoint, learner, sync, driver.recorder.note)
            done, seen = begin(config, driver, learner, saver)
            loop(config, driver, learner, sync, saver, done, seen)
            saver.close()
            if config.log.export:
                export_hf(learner, config.model.folder, run_dir / "model")


def begin(config: Config, driver: Driver | Follower, learner: Learner, saver: Saver) -> tuple[int, Seen | None]:
    """The policy as it is at the start, or as a checkpoint has it; the steps that are done, and what they have seen."""
    folder = learner.broadcast(str(driver.resumes.path) if driver.resumes else None)
    if folder is None or config.loss.kl_coef:  # the reference is what the run began with
        load_policy(learner, config.model, config.run.seed, config.loss.kl_coef)
    if folder is None:
        calibrate(learner, driver, config.quantization)
        return 0, None
    found = checkpoints.read(Path(folder))
    saver.load(found)
    return found.step, Seen(**found.driver["seen"])


def load_policy(learner: Learner, model: ModelSection, seed: int, kl_coef: float) -> None:
    if model.init == ModelInit.pretrained:
        learner.load_hf(Path(model.path))
    else:
        learner.init_random(seed)
    if kl_coef:
        learner.keep_reference()


def calibrate(learner: Learner, driver: Driver | Follower, quantization: QuantizationSection) -> None:
    """Smoothing and an FP8 cache have to have seen a forward pass before the first sync: that of the first prompts."""
    if quantization.smoothing or quantization.kv_cache != KvCache.none:
        learner.logprobs(learner.broadcast(driver.prompt_batch()))


def loop(
    config: Config,
    driver: Driver | Follower,
    learner: Learner,
    sync: WeightSync,
    saver: Saver,
    done: int = 0,
    seen: Seen | None = None,
) -> None:
    """Steps after `done` up to run.steps; what `done` steps have made is what the sampler starts with.

    `seen`: by a run that goes on, whose line for `done` is there already.
    """
    recorder, end, seed = driver.recorder, config.run.steps, config.run.seed
    synced = publish(done, end, config.sync, driver, learner, sync)
    if seen is None:
        recorder.log(done, synced | evaluate(done, end, config.eval, driver, learner))
    else:
        recorder.skip()
    seen = seen or Seen()
    for step in range(done + 1, end + 1):
        with recorder.phase("rollout"):
            batch, drawn = learner.broadcast(driver.collect(step))
        with recorder.phase("prox"):
            anchor_BT = anchor_logprobs(learner, batch, config.correction.anchor, config.rollout.source)
            reference_BT = reference_logprobs(learner, batch, config.loss.kl_coef)
            drawn |= learner_estimate(learner, driver, config.reward)
        with recorder.phase("correction"):
            correction, advantages_B = correct(anchor_BT, batch, config.correction, config.advantage)
            drawn |= mismatch_by_format(correction.source.prox_logprobs_BT, batch)
        with recorder.phase("record"):
            driver.record(step, correction, advantages_B)
        with recorder.phase("update"):
            targets = join(
                batch, anchor_BT, reference_BT, correction, advantages_B, config.loss, config.run.seed + step
            )
            parts = minibatches(targets, config.learner.n_minibatches, f"{seed}/{step}")
            updates = combine([learner.update(part) for part in parts])
        synced = publish(step, end, config.sync, driver, learner, sync)
        evaluated = evaluate(step, end, config.eval, driver, learner)
        seen = seen.after(batch)
        recorder.log(step, drawn | correction.metrics | updates | synced | evaluated | seen.metrics(batch, step))
        stop = learner.broadcast(driver.asked_to_stop() or reached(config.run, evaluated))
        with recorder.phase("checkpoint"):
            keep(step, seen, evaluated, bool(stop) or step == end, driver, learner, saver)
        if stop:
            recorder.end_early(stop, asked=driver.asked_to_stop() is not None)
            break


def anchor_logprobs(learner: Learner, batch: Batch, anchor: Anchor, source: RolloutSource) -> torch.Tensor:
    """p: the policy's own logprobs before the update. Not computed where nothing looks at them."""
    if anchor == Anchor.sampler or source == RolloutSource.dataset:
        return batch.sampler_logprobs_BT
    return learner.logprobs(batch)


def reference_logprobs(learner: Learner, batch: Batch, kl_coef: float) -> torch.Tensor | None:
    return learner.reference_logprobs(batch) if kl_coef else None


def learner_estimate(learner: Learner, driver: Driver | Follower, reward: RewardSection) -> dict[str, float]:
    """The mean reward under the learner, over everything that was drawn: a forward pass for dropped groups too."""
    if not reward.learner_estimate:
        return {}
    everything = learner.broadcast(driver.drawn_batch())
    prox_BT = learner.logprobs(everything)
    return learner_reward(everything.rewards_B, prox_BT, everything.sampler_logprobs_BT, everything.mask_BT)


def join(
    batch: Batch,
    anchor_BT: torch.Tensor,
    reference_BT: torch.Tensor | None,
    correction: Correction,
    advantages_B: torch.Tensor,
    loss: LossConfig,
    seed: int,
) -> Targets:
    """All that the step's updates need. A covariance loss selects among the tokens that are trained on."""
    return Targets(
        batch=batch,
        anchor_logprobs_BT=anchor_BT,
        ref_logprobs_BT=reference_BT,
        advantages_B=advantages_B,
        weights_BT=correction.weights_BT,
        mask_BT=correction.mask_BT,
        denominator_mask_BT=correction.denominator_mask_BT,
        selected_BT=select_by_covariance(anchor_BT, advantages_B, correction.mask_BT, loss, seed),
    )


def minibatches(targets: Targets, count: int, seed: str) -> Iterator[Targets]:
    """The step's optimizer updates: whole groups, shuffled, in `count` nearly equal parts."""
    groups = targets.batch.groups_B.unique().tolist()
    count = min(count, len(groups))
    if count > 1:
        random.Random(seed).shuffle(groups)
    for part in range(count):
        yield targets.rows(torch.isin(targets.batch.groups_B, torch.tensor(groups[part::count])).nonzero().flatten())


def publish(
    step: int, end: int, section: SyncSection, driver: Driver | Follower, learner: Learner, sync: WeightSync
) -> dict[str, float]:
    """The policy into the sampler, where it is due; then, where that is due, the proof that it arrived."""
    if step % section.every and step != end:  # the last evaluation is of the last policy
        return {}
    with driver.recorder.phase("sync"):
        learner.make_room()
        with driver.syncing():
            report = sync.push(step)
        metrics = report.metrics()
        if report.first_failure:
            driver.recorder.note(
                f"sync     policy version {step} was sent twice; the first time: {report.first_failure}"
            )
        if due(step // section.every, section.verify_every):
            batch, formats = learner.broadcast(driver.probe(step))
            about = probe.Probe(step, learner.shape.vocab, learner.shape.tied, section.probe_budget)
            metrics |= probe.check_formats(batch, learner.logprobs(batch), formats, about)
    return metrics


def evaluate(
    step: int, end: int, section: EvalSection, driver: Driver | Follower, learner: Learner
) -> dict[str, float]:
    if section.every == 0 or not (due(step, section.every) or step == end):
        return {}
    with driver.recorder.phase("eval"):
        return learner.broadcast(driver.evaluate(step))


def keep(
    step: int,
    seen: Seen,
    evaluated: dict[str, float],
    ending: bool,
    driver: Driver | Follower,
    learner: Learner,
    saver: Saver,
) -> None:
    """A checkpoint, where one is due; and the name of the one before, once it is on disk."""
    saver.settle()
    about = learner.broadcast(driver.to_keep(step, evaluated, ending))
    if about is not None:
        about["driver"]["seen"] = asdict(seen)
        saver.begin(step, about)


def due(step: int, every: int) -> bool:
    """At the start, and then every so many steps; with 0, at the start only."""
    return step == 0 or (every > 0 and step % every == 0)


def reached(run: RunSection, evaluated: dict[str, float]) -> str | None:
    for metric, least in (run.stop or {}).items():
        if metric in evaluated and evaluated[metric] >= least:
            return f"{metric} reached {evaluated[metric]:.3f}, run.stop is {least:g}"
    return None


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
