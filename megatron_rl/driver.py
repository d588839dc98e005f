"""Driver: rank 0's side of train.py's loop.

It samples, scores, evaluates, records, decides when to save and stop, and provides samples to
compare sampler and learner. Other ranks request its results: rank0.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from megatron_rl.batch import Batch, collate
from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.resume import refuse_other_data
from megatron_rl.config.evaluation import held_out
from megatron_rl.config.fleet import describe_sampler, distinct_formats
from megatron_rl.config.sampling import TopLogprobsSection
from megatron_rl.config.schema import Config, Format
from megatron_rl.data.prompts import FolderTokenizer, PromptOrder, load_dataset, load_held_out
from megatron_rl.distributed import waited_for
from megatron_rl.evaluation import Evaluator
from megatron_rl.learner.achieved import Achieved, memory_peaks
from megatron_rl.logs import logger
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import detect
from megatron_rl.preflight.roles import roles
from megatron_rl.processes import heartbeat
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rollout.async_batches import AsyncBatches, Gate, SyncBatches
from megatron_rl.rollout.collect import (
    Collector,
    DatasetResponses,
    ResponseSource,
    Scorer,
    sampling_params,
)
from megatron_rl.rollout.sleep_schedule import SleepSchedule
from megatron_rl.rollout_correction.correction import without_stale
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler, SamplerStats
from megatron_rl.supervision.stop_request import StopRequest
from megatron_rl.tracking.alarms import Alarms
from megatron_rl.tracking.console import choose
from megatron_rl.tracking.progress import Progress, SaveSchedule
from megatron_rl.tracking.record import Recorder
from megatron_rl.types import NO_EXPERT, NOTHING, Metrics, Rollout, Scored
from megatron_rl.weight_sync.probe_budget import PROBE_PROMPTS, PROBE_TOKENS

if TYPE_CHECKING:
    from megatron_rl.environments.sessions import Sessions

PROBE_SAMPLES = 1
CALIBRATION_PROMPTS = 64


class Driver:
    """Driver on rank 0: opens recorder, sampler and rewards, and closes all of them on any exit."""

    def __init__(self, config: Config, resolved_yaml: str, run_dir: Path) -> None:
        self._config = config
        self._stack = ExitStack()
        self._scored: list[Scored] = []
        self._drawn: list[Scored] = []
        self._batch: Batch | None = None
        self._seen = SamplerStats()
        self._formats = distinct_formats(config.sampler, config.quantization)
        sampled = not config.rollout.supervised
        machine = detect(config.run.device)
        model = Model.read(config.model.folder, config.learner)
        devices = roles(model.layout, config.sampler, machine.gpus).gpus
        peak = machine.gpu.tflops if machine.gpu else None
        recorder = Recorder(
            config.log,
            resolved_yaml,
            run_dir,
            config.run.steps,
            if_exists=config.run.if_exists,
            alarms=Alarms(config.log.alarms, self._formats, sampled),
            rates=Achieved(model, devices, peak, sampled),
        )
        self.recorder = self._stack.enter_context(recorder)
        try:
            self._stop = self._stack.enter_context(StopRequest(recorder.clock, recorder.run.path))
            after = recorder.run.resumes_after
            self.resumes = None
            if after is not None:
                path = checkpoints.path_of(recorder.run.checkpoints, after)
                self.resumes = checkpoints.read(path)
            self._saves = SaveSchedule(config.checkpoint, self.resumes)
            self._open(run_dir)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _open(self, run_dir: Path) -> None:
        heartbeat.between("start: reading data")
        config = self._config
        folder = config.model.folder
        tokenizer = FolderTokenizer(folder)
        train = load_dataset(
            "train",
            config.data,
            tokenizer,
            config.rollout.max_prompt_tokens,
            needs_answer=config.reward.needs_answer or config.rollout.supervised,
        )
        where = ", ".join(config.data.sources("train"))
        self._data = train.checksum
        logger("data").info(f"train: {where}: {train.describe()}")
        if self.resumes:
            refuse_other_data(
                self.resumes.driver.data,
                self._data,
                config.run.resume_allow,
                where,
            )
        # once the sampler and the rewards are closed
        after_all = self._stack.enter_context(ExitStack())
        rewards = RewardPool(config.reward, config.run.variables)
        self._stack.callback(rewards.close)
        heartbeat.between("start: starting reward workers")
        rewards.start()
        heartbeat.between("start: starting engines")
        self._scorer = Scorer(config.reward, rewards, tokenizer)
        log_dir = run_dir / "logs" / f"attempt_{self.recorder.run.attempt}"
        self.sampler = Sampler(EngineSettings.from_config(config), folder, log_dir)
        self._stack.callback(self.sampler.close)
        self.sampler.launch()
        self._sleep_schedule = SleepSchedule(self.sampler, config.sampler.sleep)
        self.position = self.resumes.driver.position if self.resumes else 0
        self._sessions = self._open_sessions(tokenizer)
        self._batches = self._open_batches(PromptOrder(train, config.run.seed, self.position))
        after_all.callback(self._batches.join)
        self._stack.callback(self._batches.stop)
        self._evaluators = self._open_sets(tokenizer, rewards)
        logger("sampler").info(f"starting {describe_sampler(config.sampler, config.quantization)}")
        # idle servers are given a prompt each, so that the probe meets every one
        engines = config.sampler.engines
        self._probe_prompts = train.prompts[: max(PROBE_PROMPTS, engines)]
        self._calibration = train.prompts[:CALIBRATION_PROMPTS]
        most = min(config.rollout.max_response_tokens, PROBE_TOKENS)
        short = replace(
            config.rollout,
            samples_per_prompt=PROBE_SAMPLES,
            max_response_tokens=most,
            top_logprobs=TopLogprobsSection(),  # none
        )
        self._probe_params = sampling_params(short, tokenizer.stop_token_ids)
        # vLLM has sized its memory; from now on the learner may allocate freely
        self._sleep_schedule.sleep()

    def _open_sessions(self, tokenizer: FolderTokenizer) -> Sessions | None:
        """The sampler of whole conversations, where the recipe has an environment."""
        if self._config.environment.name is None:
            return None
        from megatron_rl.environments.sessions import opened

        return self._stack.enter_context(opened(self._config, tokenizer, self.sampler))

    def _open_batches(self, order: PromptOrder) -> AsyncBatches | SyncBatches:
        config = self._config
        answers: ResponseSource = self._answers
        if config.rollout.supervised:
            answers = DatasetResponses(self._scorer.tokenizer)
        gate = None
        if config.rollout.max_staleness:
            gate = Gate(answers, config.rollout)
        self._collector = Collector(
            config.rollout,
            order,
            gate or answers,
            self._scorer,
            rebaseline=config.correction.rebaseline,
            seed=config.run.seed,
        )
        if gate is None:
            return SyncBatches(self._collector)
        return AsyncBatches(
            self._collector,
            gate,
            config.rollout,
            config.run.steps,
            lambda: self.sampler.policy_version,
        )

    @property
    def _answers(self) -> Sessions | Sampler:
        return self._sessions or self.sampler

    def _open_sets(self, tokenizer: FolderTokenizer, rewards: RewardPool) -> list[Evaluator]:
        """Open the held-out sets; those with the run's reward share its workers."""
        config = self._config
        evaluators = []
        pools = {str(config.reward.name): rewards}
        for one in held_out(config):
            name = str(one.reward.name)
            found = load_held_out(
                one,
                config.data,
                tokenizer,
                config.rollout.max_prompt_tokens,
            )
            logger("data").info(f"{one.name or 'eval'}: {one.path}: {found.describe()}")
            if name not in pools:
                own = RewardPool(one.reward, config.run.variables)
                self._stack.callback(own.close)
                own.start()
                pools[name] = own
            scorer = Scorer(one.reward, pools[name], tokenizer)
            evaluators.append(Evaluator(one, found.prompts, self._answers, scorer))
        return evaluators

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Context of a sync: sleeping engines wake in the right order, and responses in flight are
        drained if necessary.
        """
        with self._batches.updating(), self._sleep_schedule.syncing(), self.sampler.updating():
            yield

    def last_sync(self) -> Metrics:
        """Engines' pause during the last sync, and the bytes that one of their ranks read."""
        timings = self.sampler.last_sync
        return {
            "sync/pause_s": timings["pause_s"],
            "sync/read_bytes": float(timings["nbytes"]),
        }

    def can_skip_sync(self, step: int) -> bool:
        """True if this step gets a batch although the sampler refused its weights."""
        return self._batches.can_skip_sync(step)

    def collect(self, step: int) -> Metrics:
        """Collect the step's batch, for `take_batch`; its metrics."""
        self._stop.begin(step)
        with waited_for(), self._stop.waiting():
            self._sleep_schedule.wake()
            collected = self._batches.take(step)
            self._sleep_schedule.sleep()
        self._scored = collected.scored
        self._drawn = collected.drawn
        self._ordinals = collected.ordinals
        self.position = collected.ordinals[1]
        self.recorder.spans(collected.spans)
        self._batch, stale = without_stale(
            collate(collected.scored), self._config.correction, step - 1
        )
        return {
            **collected.metrics,
            "rollout/trained_tokens": int(self._batch.lengths_B.sum()),
            **memory_peaks(),
            **self._engine_news(),
            **stale,
        }

    def take_batch(self) -> Batch:
        """The batch collected last; it is kept no longer."""
        batch = self._batch
        assert batch is not None
        self._batch = None
        return batch

    def _engine_news(self) -> Metrics:
        """Counts of engine restarts and retried requests since the last step."""
        before = self._seen
        self._seen = self.sampler.stats
        news: Metrics = {"rollout/restarts": self._seen.restarts - before.restarts}
        if self._config.sampler.engines > 1:
            news["rollout/retried"] = self._seen.retried - before.retried
        return news

    def drawn_batch(self) -> Batch:
        """All of the step's rollouts, those of dropped groups included."""
        return collate(self._drawn)

    def prompt_batch(self) -> Batch:
        """The first prompts, as rows with empty responses."""
        rows = (
            Rollout(**vars(NOTHING), prompt=prompt, group=group, sample=0, loss_mask=())
            for group, prompt in enumerate(self._calibration)
        )
        return collate([Scored(one, reward=0.0) for one in rows])

    def probe(self, step: int) -> tuple[Batch, Sequence[Format]]:
        """Sample fresh, unscored responses; return them and the sampler's formats."""
        with waited_for(), self._stop.waiting():
            self._sleep_schedule.wake()
            fresh = self.sampler.generate(self._probe_prompts, self._probe_params, seed=step)
        return collate([Scored(one, reward=0.0) for one in fresh]), self._formats

    def routed(self, batch: Batch, layers: int) -> Tensor | None:
        """Return the experts that the engine chooses at each token, as in `Batch.experts_PLK`; None
        if not reported.
        """
        sequences = [part.tolist() for part in batch.tokens_P.split(batch.lengths_B.tolist())]
        with waited_for(), self._stop.waiting():
            routed = self.sampler.routed_experts(sequences, layers)
        if not routed:
            return None
        chosen_PLK = torch.full((len(batch.tokens_P), *routed[0].shape[1:]), NO_EXPERT)
        for part, one in zip(chosen_PLK.split(batch.lengths_B.tolist()), routed, strict=True):
            part[: len(one)] = torch.as_tensor(one)
        return chosen_PLK

    def evaluate(self) -> Metrics:
        with waited_for(), self._stop.waiting():
            self._sleep_schedule.wake()
            metrics: Metrics = {}
            for each in self._evaluators:
                metrics |= each.evaluate()
            return metrics

    def check_time(self) -> None:
        """Abort the step if the time left does not suffice for the next phase."""
        self._stop.check()

    def asked_to_stop(self) -> str | None:
        return self._stop.reason or self.recorder.alarms.stop

    def has_time(self) -> bool:
        return self._stop.has_time()

    def to_keep(
        self, progress: Progress, evaluated: Metrics, save_s: float | None, ending: bool
    ) -> dict[str, Any] | None:
        """Rank 0's part of a checkpoint; None if none is due. `save_s`: seconds of a save."""
        self._stop.save_s = save_s
        about = self._saves.due(progress.step, progress.kept(), evaluated, ending)
        if about:
            about["driver"]["data"] = self._data
        return about

    def record(self, step: int, columns: Mapping[str, Tensor | None], advantages_B: Tensor) -> None:
        """Write the step's ledger line; and its rollouts, where there are columns of them."""
        trained = {one.rollout.group for one in self._scored}
        self.recorder.ledger(step, self._ordinals, sorted(trained))
        if not columns:
            return
        scored = self._scorer.whole(self._scored)
        # none if the sampler is the anchor
        chosen = choose(scored, columns["prox_logprobs_N"])
        self.recorder.rollouts(
            step,
            scored,
            pieces={place: self._scorer.pieces(scored[place]) for place in chosen},
            advantages_B=advantages_B,
            truths=[one.rollout.prompt.answer for one in scored],
            **columns,
        )

    def end_early(self, reason: str, kept: str) -> None:
        """Note why the run ends early, and, after a stop request, the state that was saved."""
        asked = self.asked_to_stop() is not None
        self.recorder.end_early(f"{reason}; {kept}" if asked else reason, asked=asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        heartbeat.between("end: closing engines and reward workers")
        self._stack.__exit__(*error)
