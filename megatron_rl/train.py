"""Training loop on every rank: rollouts, updates, weight sync, evaluation, checkpoints; rank 0
drives sampler, rewards.

prompt -> rollout -> reward -> group filter -> prox logprobs -> correction (rules, advantages,
weights) -> loss -> learner step -> weight sync -> next rollout

Shape suffixes: B rows, N response tokens.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.batch import Batch, Share
from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.saver import Saver
from megatron_rl.config import schema
from megatron_rl.config.schema import Config
from megatron_rl.driver import Driver
from megatron_rl.learner.device import enable_expandable_segments
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules import limits
from megatron_rl.learner.modules.router_replay import check as check_replay
from megatron_rl.learner.profile import dump_on_oom
from megatron_rl.learner.state import LearnerState
from megatron_rl.logs import logger
from megatron_rl.loss.prox_pass import anchored_to_learner, makes_prox_pass
from megatron_rl.models.model import Model
from megatron_rl.processes import heartbeat
from megatron_rl.rank0 import Rank0
from megatron_rl.rollout_correction.estimates import learner_reward
from megatron_rl.step import CorrectedBatch
from megatron_rl.supervision.stop_request import StepAborted
from megatron_rl.tracking.metrics_file import combine
from megatron_rl.tracking.progress import Progress, reached
from megatron_rl.types import Metrics
from megatron_rl.weight_sync import probe
from megatron_rl.weight_sync.export import export_models
from megatron_rl.weight_sync.manifest import UpdateRefused
from megatron_rl.weight_sync.probe_budget import Numerics
from megatron_rl.weight_sync.push import WeightSync

ROUTED_ROWS = 8  # responses of a probe, one request each


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
    driver = Driver(config, resolved_yaml, run_dir) if rank == 0 else None
    with (
        ExitStack() as after_driver,
        ExitStack() as driver_closed,
        Rank0(driver) as rank0,
        dump_on_oom(run_dir / "dumps", rank),
    ):
        driver_closed.callback(on_driver_closed)
        heartbeat.between("start: loading the model")
        enable_expandable_segments(config.sampler.sleep, config.sync.transport)
        model = Model.read(config.model.folder, config.learner, config.model.head_precision)
        learner = Learner(model, config, run_dir / "dumps")
        # after the driver has finished: a rank that leaves ends those that still wait for it
        after_driver.callback(learner.close)
        rank0.connect(learner)
        sync = WeightSync(learner, rank0.only(lambda driver: driver.sampler), config)
        learner.set_smoothing(sync.smoothing)
        with closing(sync):
            saver = Saver(
                run_dir / "checkpoints",
                config.checkpoint,
                LearnerState(learner),
                sync,
            )
            at = load_or_resume(config, rank0, learner, saver)
            loop(config, rank0, learner, sync, saver, at)
            if config.checkpoint.export_hf:
                export_models(
                    learner,
                    config.model.folder,
                    run_dir,
                    config.checkpoint.best,
                    lambda: rank0.ask(Driver.has_time),
                )


def load_or_resume(config: Config, rank0: Rank0, learner: Learner, saver: Saver) -> Progress:
    """Load the initial policy or a checkpoint; return the progress."""
    folder = rank0.ask(lambda driver: str(driver.resumes.path) if driver.resumes else None)
    # the reference is the initial policy; checkpoints of adapters depend on it
    if folder is None or config.loss.needs_reference or config.learner.lora.rank:
        load_policy(learner, config.model, config.run.seed, config.loss.needs_reference)
    if folder is None:
        if config.quantization.smoothing or config.quantization.kv_cache != schema.KvCache.none:
            # both need a forward pass before a sync
            learner.logprobs(rank0.ask(Driver.prompt_batch))
            learner.take_replayed()  # discard: not routed by a sampler
        return Progress()
    found = checkpoints.read(Path(folder))
    saver.load(found)
    return Progress.of(found.step, found.driver)


def load_policy(learner: Learner, model: schema.ModelSection, seed: int, reference: bool) -> None:
    if model.init == schema.ModelInit.pretrained:
        learner.load_hf(model.weights)
    else:
        learner.init_random(seed)
    if reference:
        learner.keep_reference()


def loop(
    config: Config,
    rank0: Rank0,
    learner: Learner,
    sync: WeightSync,
    saver: Saver,
    at: Progress,
) -> None:
    """Run the steps after `at` up to run.steps; the sampler starts with the policy of `at`."""
    try:
        at, stop = sync_and_log(at, config, rank0, learner, sync, saver, first=True)
        while at.step < config.run.steps and not stop:
            with learner.profiler.step(at.step + 1):
                at = train_step(at, config, rank0, learner)
            at, stop = sync_and_log(at, config, rank0, learner, sync, saver)
    except StepAborted as aborted:
        # on every rank: save the state that an aborted step has not changed, unless it is saved
        # already
        stop = str(aborted)
        with rank0.phase("checkpoint"):
            saver.close()
            # rank 0 decides: renaming the folder may have failed although all parts were written
            if rank0.ask(lambda _: at.step > 0 and saver.newest != at.step):
                save_if_due(at, {}, True, rank0, saver)
    saver.close()
    if stop:
        rank0.only(lambda driver: driver.end_early(stop, saver.kept))


def train_step(at: Progress, config: Config, rank0: Rank0, learner: Learner) -> Progress:
    """Run a step: rollouts, prox pass, correction, updates; the same metrics on all ranks."""
    step = at.step + 1
    with rank0.phase("rollout"):
        collected = rank0.ask(lambda driver: driver.collect(step))
        share = learner.split(
            rank0.only(Driver.take_batch), config.learner.n_minibatches, f"{config.run.seed}/{step}"
        )
    with rank0.phase("prox"):
        anchors = anchor_logprobs(learner, share, config)
        reference_N = learner.reference_logprobs(share) if config.loss.needs_reference else None
        if config.reward.learner_estimate:
            collected |= learner_estimate(learner, rank0)
    with rank0.phase("correction"):
        work = CorrectedBatch.corrected(config, share, at.step, *anchors)
        targets = work.targets(reference_N)
        # the last point at which the step can be aborted without a trace
        rank0.ask(Driver.check_time)
    with rank0.phase("update"):
        learner.take_replayed()  # discard the counts of passes before the update
        updates = combine([learner.update(share, targets, rows) for rows in share.minibatches])
        if config.learner.router is not schema.Router.own:
            updates |= check_replay(learner.take_replayed())
    with rank0.phase("correction"):
        work = work.completed(learner.take_own_logprobs())
        seen = at.seen.after(share)
        line = collected | work.metrics() | updates | seen.metrics(share, step)
    with rank0.phase("record"):
        columns = {}
        if due(step, config.log.record_every):
            columns = learner.data_plane.collect(share, work.recorded())
        rank0.only(lambda driver: driver.record(step, columns, work.advantages_B))
    position = rank0.only(lambda driver: driver.position)
    return Progress(step, seen, position, line=line)


def sync_and_log(
    at: Progress,
    config: Config,
    rank0: Rank0,
    learner: Learner,
    sync: WeightSync,
    saver: Saver,
    first: bool = False,
) -> tuple[Progress, str | None]:
    """Sync weights, evaluate, log the step's metrics, save a checkpoint if due; return the reason
    if the run ends here.
    """
    step = at.step
    end = config.run.steps
    saver.snapshot_rng_and_stats()  # as they are now, for a stop before the next snapshot
    rank0.ask(Driver.check_time)
    synced = sync_weights(step, end, config.sync, rank0, learner, sync, first)
    if at.line is None:  # this step's line was logged before the restart
        rank0.only(lambda driver: driver.recorder.skip())
        return at, None
    evaluated = evaluate(step, end, config.eval, rank0)
    line = at.line | synced | evaluated | saver.metrics
    rank0.only(lambda driver: driver.recorder.log(step, line))
    at = replace(at, line=None)
    saver.snapshot_rng_and_stats()
    if step == 0:
        return at, None
    asked = rank0.ask(Driver.asked_to_stop)
    stop = asked or reached(config.run.stop, evaluated)
    with rank0.phase("checkpoint"):
        save_if_due(at, evaluated, bool(stop) or step == end, rank0, saver)
    return at, stop


def anchor_logprobs(
    learner: Learner, share: Share, config: Config
) -> tuple[Tensor | None, Tensor | None]:
    """Return the anchor of the loss ratio, of the response tokens and of the top tokens: p, the
    policy's logprobs before the update; mu where the anchor is not the learner; None if the update's
    own forward pass supplies p, or if nothing reads them.
    """
    if makes_prox_pass(config.correction, config.loss, config.learner, config.rollout):
        if config.correction.reads_top_logprobs:
            return learner.logprobs_of_top(share)
        return learner.logprobs(share), None
    if anchored_to_learner(config.correction, config.rollout):
        return None, None
    return share.batch.sampler_logprobs_N, None


def learner_estimate(learner: Learner, rank0: Rank0) -> Metrics:
    """Return the estimated mean reward of the learner over all samples, dropped groups included."""
    share = learner.split(rank0.only(Driver.drawn_batch))
    return learner_reward(learner.logprobs(share), share)


def sync_weights(
    step: int,
    end: int,
    section: schema.SyncSection,
    rank0: Rank0,
    learner: Learner,
    sync: WeightSync,
    first: bool = False,
) -> Metrics:
    """Sync weights to the sampler and run the logprob probe, each if due."""
    # before any return: a sleeping engine wakes at the next rollouts even without a sync
    learner.release_memory()
    # the last evaluation uses the final policy
    if step % section.every and step != end and not first:
        return {}
    with rank0.phase("sync"):
        try:
            with rank0.syncing():
                report = sync.push(step)
        except UpdateRefused as refused:
            following = min(step + section.every, end)
            if (
                first
                or step == end
                or not rank0.ask(lambda driver: driver.can_skip_sync(following))
            ):
                raise
            logger("sync").warning(f"policy version {step} is skipped: {refused}")
            return {"sync/refused": 1.0}
        metrics = report.metrics() | rank0.ask(Driver.last_sync)
        if report.first_failure:
            logger("sync").warning(
                f"policy version {step} was sent twice; the first time: {report.first_failure}"
            )
        if due(step // section.every, section.probe_every):
            batch, formats = rank0.ask(lambda driver: driver.probe(step))
            logprobs_N = learner.logprobs(batch)
            expected_N = learner.expected_logprobs(batch)
            about = probe_of(step, section, learner, batch, logprobs_N, expected_N)
            metrics |= probe.check_formats(batch, logprobs_N, formats, about)
            metrics |= flips(batch.rows(torch.arange(min(len(batch), ROUTED_ROWS))), rank0, learner)
    return metrics


def probe_of(
    step: int,
    section: schema.SyncSection,
    learner: Learner,
    batch: Batch,
    logprobs_N: Tensor,
    expected_N: Tensor | None,
) -> probe.Probe:
    """Prepare a probe with the expected effect and noise of these weights and tokens."""
    about = probe.Probe(
        step,
        learner.shape.vocab,
        section.budget,
        learner=_numerics(learner.learner),
    )
    if expected_N is not None:
        effect, left = (
            probe.compare(one_N, expected_N, batch.mask_N, math.inf).mean_abs
            for one_N in (logprobs_N, batch.sampler_logprobs_N)
        )
        about = replace(
            about, expected=effect, unexplained=left if learner.mirrors_engine else None
        )
    if section.budget is not None:
        return about
    return replace(
        about, noise=probe.noise(logprobs_N, learner.logprobs_rounded_again(batch), batch.mask_N)
    )


def _numerics(learner: schema.LearnerSection) -> Numerics:
    if limits.fp8(learner) is not None:
        return Numerics.fp8
    if learner.forward is schema.Forward.as_sampler:
        return Numerics.sampler
    if learner.precision is schema.Precision.fp32:
        return Numerics.fp32
    return Numerics.bf16


def flips(batch: Batch, rank0: Rank0, learner: Learner) -> Metrics:
    """Return MoE metrics: share of tokens that the learner's routers send to other experts than the
    engine's, if it reports them.
    """
    if not learner.shape.experts:
        return {}
    layers = learner.shape.layers
    chosen = rank0.ask(lambda driver: driver.routed(batch, layers))
    if chosen is None:
        return {}
    return learner.router_flips(batch, chosen)


def evaluate(step: int, end: int, section: schema.EvalSection, rank0: Rank0) -> Metrics:
    if section.every == 0 or not (due(step, section.every) or step == end):
        return {}
    with rank0.phase("eval"):
        return rank0.ask(lambda driver: driver.evaluate())


def save_if_due(at: Progress, evaluated: Metrics, ending: bool, rank0: Rank0, saver: Saver) -> None:
    """Start a checkpoint if one is due; publish the previous one once it is on disk."""
    saver.settle()
    driver_state = rank0.ask(lambda driver: driver.to_keep(at, evaluated, saver.seconds, ending))
    if driver_state is not None:
        saver.begin(at.step, driver_state)


def due(step: int, every: int) -> bool:
    """Return True at the start and every `every` steps; with 0, at the start only."""
    return step == 0 or (every > 0 and step % every == 0)
