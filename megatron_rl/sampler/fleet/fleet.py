"""The fleet sampler: N vLLM servers over HTTP behind the protocol of one sampler.

Servers are started by the run on this machine's loopback interface, under a key that is made for the run, or they
are given by address (other nodes of a Slurm job) together with a key. A synchronous facade: requests, watching,
restarts and re-syncs live on an event loop in a thread of its own (dispatch.py, supervisor.py).
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_rl.config.fleet import KEY_VARIABLE, replica_formats
from megatron_rl.config.schema import Config, Format
from megatron_rl.quantization.formats import BY_FORMAT
from megatron_rl.sampler import model_folder
from megatron_rl.sampler.embedded import request_seed
from megatron_rl.sampler.fleet.dispatch import Dispatched, Dispatcher, Done, Job
from megatron_rl.sampler.fleet.event_loop import EventLoopThread
from megatron_rl.sampler.fleet.replica import Replica
from megatron_rl.sampler.fleet.server_process import ServerPlan, server_plans
from megatron_rl.sampler.fleet.supervisor import FleetState, Supervisor
from megatron_rl.sampler.fleet.update import FleetUpdates
from megatron_rl.sampler.protocol import SamplerError, SamplerStats
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

KEY_BYTES = 32
SHUT_S = 5.0


class FleetSampler:
    """See protocol.Sampler. `say` receives a line whenever a server goes or comes, from the calling thread."""

    def __init__(
        self,
        config: Config,
        hf_folder: Path,
        log_dir: Path,
        *,
        say: Callable[[str], None] = lambda line: None,
        worker_extension: str = model_folder.WORKER_EXTENSION,
    ) -> None:
        self.policy_version = NO_VERSION
        self.last_sync: dict[str, Any] = {}  # of the slowest server's last accepted update
        self._config, self._hf_folder, self._log_dir = config, hf_folder, log_dir
        self._say, self._news = say, queue.SimpleQueue[str]()
        self._worker_extension = worker_extension
        self._stats = SamplerStats()
        self._loop: EventLoopThread | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._state: FleetState | None = None
        self._supervisors: list[Supervisor] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = False
        self._paused = False
        self._fleet_updates: FleetUpdates | None = None

    @property
    def stats(self) -> SamplerStats:
        return self._stats

    @property
    def replicas(self) -> list[Replica]:
        return [supervisor.replica for supervisor in self._supervisors]

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the servers without waiting for them."""
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-rl-fleet-")
        self._loop = EventLoopThread("fleet")
        try:
            plans = server_plans(
                self._config, self._hf_folder, Path(self._folder.name), self._log_dir, self._worker_extension
            )
            self._loop.call(self._open(plans))
        except BaseException:
            self.close()
            raise
        self._starting = True

    def wait_ready(self) -> None:
        if not self._starting:
            return
        self._starting = False
        try:
            self._call(self._first_starts())
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, first_group: int, step: int
    ) -> list[Rollout]:
        if not prompts:
            return []
        self.wait_ready()
        if self._paused:
            raise SamplerError("the sampler is paused: resume it before generating")
        start = time.perf_counter()
        jobs = [Job(prompt.token_ids, request_seed(seed, first_group + i)) for i, prompt in enumerate(prompts)]
        dispatched: Dispatched = self._call(self._dispatch(jobs, params))
        rollouts = [
            rollout
            for i, (prompt, done) in enumerate(zip(prompts, dispatched.done, strict=True))
            for rollout in _rollouts(prompt, first_group + i, done, self.policy_version)
        ]
        self._count(rollouts, dispatched, time.perf_counter() - start)
        return rollouts

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._everywhere(lambda one: one.call_workers("init_weight_transfer_engine", init_info=init_info))

    def start_weight_update(self) -> None:
        self.wait_ready()
        self._call(self._updates().begin())

    def update_weights(self, update_info: Any) -> None:
        """Have every server verify the update; one that refuses it refuses it for all."""
        self._call(
            self._updates().stage(
                _by_format(update_info, replica_formats(self._config.sampler, self._config.quantization))
            )
        )

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Every server loads what it verified. Until the next update it is what restarted servers receive."""
        self.last_sync = self._call(self._updates().finish())
        self.policy_version = self.last_sync["policy_version"]
        if weight_version is not None and weight_version != str(self.policy_version):
            raise WeightSyncError(f"the fleet loaded policy version {self.policy_version}, not {weight_version}")

    def pause(self) -> None:
        self._everywhere(lambda one: one.post("/pause?mode=wait"))
        self._paused = True

    def resume(self) -> None:
        self._everywhere(lambda one: one.post("/resume"))
        self._paused = False

    def sleep(self, level: int = 1) -> None:
        self._everywhere(lambda one: one.post(f"/sleep?level={level}"))

    def wake(self, tags: list[str] | None = None) -> None:
        """`tags`: `weights`, `kv_cache`; None takes memory back for both."""
        query = "&".join(f"tags={tag}" for tag in tags or [])
        self._everywhere(lambda one: one.post(f"/wake_up?{query}" if query else "/wake_up"))

    def health(self) -> dict[str, Any]:
        self.wait_ready()
        return self._call(self._health())

    def close(self) -> None:
        """End the servers that were started here; safe to call twice and in any state."""
        if self._loop is not None:
            self._loop.call(self._shut())
            self._loop.stop()
            self._loop = None
        for replica in self.replicas:
            if replica.process is not None:
                replica.process.end()
                replica.process = None
        self._supervisors = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        self._pass_on_news()

    def __enter__(self) -> FleetSampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, coroutine: Any) -> Any:
        if self._loop is None:
            coroutine.close()
            raise SamplerError("the sampler is not running: it was never started, was closed, or failed before")
        try:
            return self._loop.call(coroutine)
        finally:
            self._pass_on_news()

    def _pass_on_news(self) -> None:
        while not self._news.empty():
            self._say(self._news.get())

    def _everywhere(self, ask: Callable[[Replica], Any]) -> None:
        self.wait_ready()
        self._call(self._updates().on_all(ask))

    async def _open(self, plans: Sequence[ServerPlan | None]) -> None:
        sampler, fleet = self._config.sampler, self._config.sampler.fleet
        self._state = FleetState(
            start_timeout_s=sampler.start_timeout_s,
            probe_every_s=fleet.probe_every_s,
            restarts=fleet.restarts,
            longest=model_folder.max_sequence_tokens(self._config),
            say=self._news.put,
        )
        own_key, given_key = secrets.token_urlsafe(KEY_BYTES), os.environ.get(KEY_VARIABLE, "")
        addresses = [""] * fleet.replicas + [address.rstrip("/") for address in fleet.addresses]
        for index, (plan, format, address) in enumerate(
            zip(plans, replica_formats(self._config.sampler, self._config.quantization), addresses, strict=True)
        ):
            key = given_key if plan is None else own_key
            name = f"server {index} ({format.value}{f', {address}' if address else ''})"
            replica = Replica(name, format, address, key, sampler.request_timeout_s)
            self._supervisors.append(Supervisor(replica, plan, self._state, key))
        for supervisor in self._supervisors:
            supervisor.start_process()
        self._fleet_updates = FleetUpdates(self.replicas, self._state)
        self._tasks = [asyncio.create_task(supervisor.run()) for supervisor in self._supervisors]

    async def _first_starts(self) -> None:
        """All of them: a server that is missing from the beginning is a mistake, not an accident."""
        await asyncio.gather(*(supervisor.first_start for supervisor in self._supervisors))

    async def _dispatch(self, jobs: Sequence[Job], params: SamplingParams) -> Dispatched:
        state = self._opened()
        return await Dispatcher(
            self.replicas,
            jobs,
            params,
            version=state.version,
            max_sequences=self._config.sampler.max_sequences,
            patience_s=state.start_timeout_s,
            changed=state.changed,
            on_gone=state.gone,
        ).run()

    async def _shut(self) -> None:
        """Stop watching, and hang up. The servers themselves are ended afterwards."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SHUT_S)
        for supervisor in self._supervisors:
            supervisor.first_start.cancel()
            await supervisor.replica.close()

    async def _health(self) -> dict[str, Any]:
        return {
            "policy_version": self._opened().version,
            "torn": False,
            "paused": self._paused,
            "replicas": [
                {
                    "name": one.name,
                    "ready": one.ready and await one.is_healthy(),
                    "policy_version": one.version,
                    "reason": one.lost or one.reason,
                    "pid": one.process.pid if one.process else None,
                }
                for one in self.replicas
            ],
        }

    def _opened(self) -> FleetState:
        if self._state is None:
            raise SamplerError("the sampler is not running: start it first")
        return self._state

    def _updates(self) -> FleetUpdates:
        if self._fleet_updates is None:
            raise SamplerError("the sampler is not running: start it first")
        return self._fleet_updates

    def _count(self, rollouts: list[Rollout], dispatched: Dispatched, seconds: float) -> None:
        before, state = self._stats, self._opened()
        self._stats = replace(
            before,
            requests=before.requests + len(rollouts),
            tokens=before.tokens + sum(len(one.token_ids) for one in rollouts),
            seconds=before.seconds + seconds,
            missing_logprobs=before.missing_logprobs + sum(math.isnan(lp) for one in rollouts for lp in one.logprobs),
            truncated=before.truncated + sum(one.finish_reason == "length" for one in rollouts),
            retried=before.retried + dispatched.retried,
            restarts=state.restarted,
        )


def _by_format(update_info: Any, formats: Sequence[Format]) -> dict[Format, dict[str, Any]]:
    if BY_FORMAT in update_info:
        return {Format(name): info for name, info in update_info[BY_FORMAT].items()}
    return dict.fromkeys(formats, update_info)


def _rollouts(prompt: Prompt, group: int, done: Done, version: int) -> list[Rollout]:
    return [
        Rollout(
            prompt=prompt,
            group=group,
            sample=sample,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            loss_mask=(True,) * len(answer.token_ids),
            finish_reason=answer.finish_reason,
            policy_version=answer.version if answer.token_ids else version,
            format=done.format.value,
        )
        for sample, answer in enumerate(done.answers)
    ]
