"""Training loop on every rank: rollouts, updates, weight sync, evaluation, checkpoints; rank 0
drives sampler, rewards.

prompt -> rollout -> reward -> group filter -> prox logprobs -> rollout_correction -> advantage ->
loss -> learner step -> weight sync -> next rollout

Shape suffixes: B sequences, T response positions.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from megatron_rl.batch import Batch
from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.saver import Saver
from megatron_rl.config import schema
from megatron_rl.config.prox_pass import anchored_to_learner, makes_prox_pass
from megatron_rl.config.schema import Config
from megatron_rl.driver import Driver, Follower
from megatron_rl.learner.device import keep_returnable
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules import limits
from megatron_rl.learner.modules.router_replay import check as check_replay
from megatron_rl.learner.policy import Sections
from megatron_rl.learner.profile import dump_on_oom
from megatron_rl.learner.shares import Shared
from megatron_rl.learner.state import LearnerState
from megatron_rl.models.model import Model
from megatron_rl.rollout_correction.correction import without_stale
from megatron_rl.rollout_correction.estimates import learner_reward
from megatron_rl.runs.metrics_file import combine
from megatron_rl.runs.progress import Progress, reached
from megatron_rl.step import Step
from megatron_rl.survival.stop_request import StepGivenUp, ask_driver
from megatron_rl.weight_sync import probe
from megatron_rl.weight_sync.export import leave_models
from megatron_rl.weight_sync.manifest import UpdateRefused
from megatron_rl.weight_sync.probe_budget import Numerics
from megatron_rl.weight_sync.push import WeightSync

AnyDriver = Driver | Follower
ROUTED_ROWS = 8  # of a probe's answers, one request each


def train(
    config: Config,
    resolved_yaml: str,
    run_dir: Path,
    rank: int,
    on_driver_closed: Callable[[], None] = lambda: None,
) -> None:
    """Run the training, from loaded weights to the last report.

    `on_driver_closed` is called after the driver's last output.
    """
    driving = Driver(config, resolved_yaml, run_dir) if rank == 0 else Follower()
    with (
        ExitStack() as after_driver,
        ExitStack() as driver_closed,
        driving as driver,
        dump_on_oom(run_dir / "dumps", rank),
    ):
        driver_closed.callback(on_driver_closed)
        keep_returnable(config.sampler.sleep, config.sync.transport)
        model = Model.read(config.model.folder, config.learner, config.model.head_precision)
        learner = Learner(model, Sections.of(config), run_dir / "dumps", driver.recorder.note)
        # after the driver's last word: a rank that leaves ends the ones that still wait for it
        after_driver.callback(learner.close)
        sync = WeightSync(learner, driver.sampler, config)
        learner.set_smoothing(sync.smoothing)
        with closing(sync):
            saver = Saver(
                run_dir / "checkpoints",
                config.checkpoint,
                LearnerState(learner),
                sync,
                driver.recorder.note,
            )
            loop(
                config, driver, learner, sync, saver, load_or_resume(config, driver, learner, saver)
            )
            if config.log.export:
                best, has_time = (
                    config.checkpoint.best,
                    lambda: learner.broadcast(driver.has_time()),
                )
                leave_models(
                    learner, config.model.folder, run_dir, best, has_time, driver.recorder.note
                )


def load_or_resume(config: Config, driver: AnyDriver, learner: Learner, saver: Saver) -> Progress:
    """The policy as it is at the start, or as a checkpoint has it."""
    folder = learner.broadcast(str(driver.resumes.path) if driver.resumes else None)
    # the reference is what the run began with; checkpoints of adapters are nothing without it
    if folder is None or config.loss.needs_reference or config.learner.lora.rank:
        load_policy(learner, config.model, config.run.seed, config.loss.needs_reference)
    if folder is None:
        if config.quantization.smoothing or config.quantization.kv_cache != schema.KvCache.none:
            # both have to have seen a pass before a sync
            learner.logprobs(learner.broadcast(driver.prompt_batch()))
            learner.take_replayed()  # of no sampler's
        return Progress()
    found = checkpoints.read(Path(folder))
    saver.load(found)
    return Progress.of(found.step, found.driver)


def load_policy(learner: Learner, model: schema.ModelSection, seed: int, reference: bool) -> None:
    if model.init == schema.ModelInit.pretrained:
        learner.load_hf(Path(model.path))
    else:
        learner.init_random(seed)
    if reference:
        learner.keep_reference()


def loop(
    config: Config,
    driver: AnyDriver,
    learner: Learner,
    sync: WeightSync,
    saver: Saver,
    at: Progress,
) -> None:
    """Steps after `at` up to run.steps; the sampler starts with the policy that `at` has."""
    try:
        at, stop = sync_and_log(at, config, driver, learner, sync, saver, first=True)
        while at.step < config.run.steps and not stop:
            with learner.profiler.step(at.step + 1):
                at = train_step(at, config, driver, learner)
            at, stop = sync_and_log(at, config, driver, learner, sync, saver)
    except (
        StepGivenUp
    ) as given_up:  # by every rank: what the step has not changed is kept, unless it is already
        stop = str(given_up)
        with driver.recorder.phase("checkpoint"):
            saver.close()
            if learner.broadcast(at.step > 0 and saver.newest != at.step):
                save_if_due(at, {}, True, driver, learner, saver)
    saver.close()
    if stop:
        asked = driver.asked_to_stop() is not None
        driver.recorder.end_early(f"{stop}; {saver.kept}" if asked else stop, asked=asked)


def train_step(at: Progress, config: Config, driver: AnyDriver, learner: Learner) -> Progress:
    """Run a step: rollouts, prox pass, correction, updates. Metrics are the driver's alone."""
    recorder = driver.recorder
    step = at.step + 1
    plane = learner.plane
    with recorder.phase("rollout"):
        held, drawn = collect(step, config, driver, learner)
        batch = plane.share(held)
    with recorder.phase("prox"):
        anchor_BT = anchor_logprobs(learner, batch, config)
        if config.loss.needs_reference:
            reference_BT = learner.reference_logprobs(batch)
        else:
            reference_BT = None
        drawn |= learner_estimate(learner, driver, config.reward)
    with recorder.phase("correction"):
        if batch.whole is None:
            work = None
        else:
            work = Step.corrected(config, batch.whole, at.step, anchor_BT)
        # the last moment in which the step can be given up without a trace
        ask_driver(learner, driver.check_time)
    with recorder.phase("update"):
        targets = plane.share_targets(batch, None if work is None else work.targets(reference_BT))
        parts = minibatches(
            batch.groups_B, config.learner.n_minibatches, f"{config.run.seed}/{step}"
        )
        learner.take_replayed()  # of other weights: a reference's, the last sync's
        updates = combine([learner.update(targets, rows) for rows in parts])
        if config.learner.router is not schema.Router.own:
            updates |= check_replay(learner.take_replayed())
    with recorder.phase("correction"):
        own_BT = learner.take_own_logprobs()
        work, found = (None, {}) if work is None else work.finished(own_BT)
    if work is None:
        return Progress(step, at.seen, driver.position)
    with recorder.phase("record"):
        driver.record(step, work.correction, work.advantages_B)
    seen = at.seen.after(work.batch)
    return Progress(
        step, seen, driver.position, line=drawn | found | updates | seen.metrics(work.batch, step)
    )


def collect(
    step: int, config: Config, driver: AnyDriver, learner: Learner
) -> tuple[Batch | None, dict[str, float]]:
    """The step's batch, on the driver."""
    held: list[Batch] = []

    def ask() -> dict[str, float] | None:
        if (found := driver.collect(step)) is None:
            return None
        batch, drawn = found
        batch, stale = without_stale(batch, config.correction, step - 1)
        held.append(batch)
        return drawn | stale

    drawn = ask_driver(learner, ask)
    return (held[0] if held else None), drawn


def sync_and_log(
    at: Progress,
    config: Config,
    driver: AnyDriver,
    learner: Learner,
    sync: WeightSync,
    saver: Saver,
    first: bool = False,
) -> tuple[Progress, str | None]:
    """Sync weights, evaluate, log the step's metrics, save a checkpoint where due; why the run ends
    here, if so.
    """
    recorder = driver.recorder
    step = at.step
    end = config.run.steps
    saver.snapshot_rng_and_stats()
    ask_driver(learner, driver.check_time)
    synced = sync_weights(step, end, config.sync, driver, learner, sync, first)
    if at.line is None:  # by an attempt before this one
        recorder.skip()
        return at, None
    evaluated = evaluate(step, end, config.eval, driver, learner)
    recorder.log(step, at.line | synced | evaluated | saver.metrics)
    at = replace(at, line=None)
    saver.snapshot_rng_and_stats()
    if step == 0:
        return at, None
    stop = learner.broadcast(driver.asked_to_stop() or reached(config.run.stop, evaluated))
    with recorder.phase("checkpoint"):
        save_if_due(at, evaluated, bool(stop) or step == end, driver, learner, saver)
    return at, stop


def anchor_logprobs(learner: Learner, batch: Shared, config: Config) -> torch.Tensor | None:
    """p: the policy's own logprobs before the update. None where the update's forward pass gives
    them in time.
    """
    if makes_prox_pass(config.correction, config.loss, config.learner, config.rollout):
        return learner.logprobs(batch)
    if batch.whole is None or anchored_to_learner(config.correction, config.rollout):
        return None
    return batch.whole.sampler_logprobs_BT


def learner_estimate(
    learner: Learner, driver: AnyDriver, reward: schema.RewardSection
) -> dict[str, float]:
    """Mean reward under the learner, over all samples; dropped groups get a forward pass too."""
    if not reward.learner_estimate:
        return {}
    shared = learner.plane.share(driver.drawn_batch())
    prox_BT = learner.logprobs(shared)
    drawn = shared.whole
    if drawn is None:
        return {}
    if drawn.samples_B is None:
        sessions_B2 = None
    else:
        sessions_B2 = torch.stack((drawn.groups_B, drawn.samples_B), dim=1)
    return learner_reward(
        drawn.rewards_B, prox_BT, drawn.sampler_logprobs_BT, drawn.mask_BT, sessions_B2
    )


def minibatches(groups_B: torch.Tensor, count: int, seed: str) -> Iterator[torch.Tensor]:
    """Rows of the step's optimizer updates: whole groups, shuffled, in `count` like parts."""
    groups = groups_B.unique().tolist()
    count = min(count, len(groups))
    if count > 1:
        random.Random(seed).shuffle(groups)
    for part in range(count):
        yield torch.isin(groups_B, torch.tensor(groups[part::count])).nonzero().flatten()


def sync_weights(
    step: int,
    end: int,
    section: schema.SyncSection,
    driver: AnyDriver,
    learner: Learner,
    sync: WeightSync,
    first: bool = False,
) -> dict[str, float]:
    """Sync weights to the sampler where that is due, and probe them where that is."""
    learner.make_room()  # without a sync the engine wakes for its next answers
    # the last evaluation is of the last policy
    if step % section.every and step != end and not first:
        return {}
    with driver.recorder.phase("sync"):
        try:
            with driver.syncing():
                report = sync.push(step)
        except UpdateRefused as refused:
            if (
                first
                or step == end
                or not learner.broadcast(driver.goes_on_without(min(step + section.every, end)))
            ):
                raise
            driver.recorder.note(f"sync     policy version {step} is left out: {refused}")
            return {"sync/refused": 1.0}
        metrics = report.metrics() | (driver.last_sync() or {})
        if report.first_failure:
            driver.recorder.note(
                f"sync     policy version {step} was sent twice; the first time: "
                f"{report.first_failure}"
            )
        if due(step // section.every, section.verify_every):
            batch, formats = ask_driver(learner, lambda: driver.probe(step))
            logprobs_BT = learner.logprobs(batch)
            expected_BT = learner.expected_logprobs(batch)
            about = probe_of(step, section, learner, batch, logprobs_BT, expected_BT)
            metrics |= probe.check_formats(batch, logprobs_BT, formats, about)
            metrics |= flips(
                batch.rows(torch.arange(min(len(batch), ROUTED_ROWS))), driver, learner
            )
    return metrics


def probe_of(
    step: int,
    section: schema.SyncSection,
    learner: Learner,
    batch: Batch,
    logprobs_BT: torch.Tensor,
    expected_BT: torch.Tensor | None,
) -> probe.Probe:
    """Prepare a probe with the expected effect and noise of these weights and tokens."""
    about = probe.Probe(
        step,
        learner.shape.vocab,
        section.budget,
        learner=_numerics(learner.learner),
    )
    if expected_BT is not None:
        effect, left = (
            probe.compare(one_BT, expected_BT, batch.mask_BT, math.inf).mean_abs
            for one_BT in (logprobs_BT, batch.sampler_logprobs_BT)
        )
        about = replace(
            about, expected=effect, unexplained=left if learner.mirrors_engine else None
        )
    if section.budget is not None:
        return about
    return replace(
        about, noise=probe.noise(logprobs_BT, learner.logprobs_rounded_again(batch), batch.mask_BT)
    )


def _numerics(learner: schema.LearnerSection) -> Numerics:
    if limits.fp8(learner) is not None:
        return Numerics.fp8
    if learner.forward is schema.Forward.as_sampler:
        return Numerics.sampler
    if learner.precision is schema.Precision.fp32:
        return Numerics.fp32
    return Numerics.bf16


def flips(batch: Batch, driver: AnyDriver, learner: Learner) -> dict[str, float]:
    """MoE metrics: how often the learner's routers choose other experts than the engine's, where it
    reports its own.
    """
    if not learner.shape.experts:
        return {}
    chosen = ask_driver(learner, lambda: driver.routed(batch, learner.shape.layers))
    if chosen is None:
        return {}
    return learner.router_flips(batch, chosen)


def evaluate(
    step: int, end: int, section: schema.EvalSection, driver: AnyDriver, learner: Learner
) -> dict[str, float]:
    if section.every == 0 or not (due(step, section.every) or step == end):
        return {}
    with driver.recorder.phase("eval"):
        return ask_driver(learner, lambda: driver.evaluate(step))


def save_if_due(
    at: Progress,
    evaluated: dict[str, float],
    ending: bool,
    driver: AnyDriver,
    learner: Learner,
    saver: Saver,
) -> None:
    """A checkpoint, where one is due; and the name of the one before, once it is on disk."""
    saver.settle()
    about = learner.broadcast(driver.to_keep(at, evaluated, saver.seconds, ending))
    if about is not None:
        saver.begin(at.step, about)


def due(step: int, every: int) -> bool:
    """At the start, and then every so many steps; with 0, at the start only."""
    return step == 0 or (every > 0 and step % every == 0)
