"""The fleet sampler: N vLLM servers over HTTP behind the protocol of one sampler.

Servers are started by the run on this machine's loopback interface, under a key that is made for the run, or they
are given by address (other nodes of a Slurm job) together with a key. What is here waits for its answers; requests,
watching, restarts and re-syncs live on an event loop in a thread of its own (servers.py).
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_rl.config.schema import Format
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.processes.pulse import waiting
from megatron_rl.quantization.formats import BY_FORMAT
from megatron_rl.sampler.engine_settings import WORKER_EXTENSION, EngineSettings
from megatron_rl.sampler.fleet.dispatch import Dispatcher, Done, Job
from megatron_rl.sampler.fleet.replica import Replica
from megatron_rl.sampler.fleet.server_process import server_settings
from megatron_rl.sampler.fleet.servers import EventLoopThread, Servers
from megatron_rl.sampler.protocol import NOT_RUNNING, BaseSampler, SamplerError, SamplerStats, answer_all, request_seed
from megatron_rl.types import Prompt, Rollout, SamplingParams, written

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
REQUEST_KEY, START_KEY = "sampler.request_timeout_s", "sampler.start_timeout_s"


class FleetSampler(BaseSampler):
    """See protocol.Sampler. Threads may share it.

    `note` receives a line whenever a server goes or comes back. Only the thread that has launched the sampler passes
    lines on, and only it says for whom the process waits: neither is made for several.
    """

    def __init__(
        self,
        settings: EngineSettings,
        hf_folder: Path,
        log_dir: Path,
        *,
        note: Callable[[str], None] = lambda line: None,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        super().__init__()
        self.stats = SamplerStats()
        self._settings, self._hf_folder, self._log_dir = settings, hf_folder, log_dir
        self._note, self._notes = note, queue.SimpleQueue[str]()
        self._worker_extension = worker_extension
        self._owner, self._counting = threading.get_ident(), threading.Lock()
        self._loop: EventLoopThread | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._servers: Servers | None = None
        self._starting = False  # launched, and nobody has waited for it yet

    def launch(self) -> None:
        """Start the servers without waiting for them."""
        self._owner = threading.get_ident()
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-rl-fleet-")
        self._loop = EventLoopThread("fleet")
        try:
            started = server_settings(
                self._settings, self._hf_folder, Path(self._folder.name), self._log_dir, self._worker_extension
            )
            vocabulary = ModelShape.from_hf(read_hf_config(self._hf_folder)).vocab
            self._servers = Servers(self._settings, vocabulary, self._notes.put)
            self._loop.call(self._servers.open(started))
        except BaseException:
            self.close()
            raise
        self._starting = True

    def wait_ready(self) -> None:
        if not self._starting:
            return
        self._starting = False
        try:
            self.ask(lambda servers: servers.first_starts())
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, first_group: int, step: int
    ) -> list[Rollout]:
        return answer_all(self.answering(params, seed=seed), prompts, first_group) if prompts else []

    def answering(self, params: SamplingParams, *, seed: int, step: int = 0) -> FleetAnswering:
        self.wait_ready()
        return FleetAnswering(self.ask, self._count, self.ask(lambda servers: servers.dispatcher(params)), seed)

    def _count(self, tokens: int, seconds: float, retried: int, restarts: int) -> None:
        with self._counting:
            self.stats = SamplerStats(
                self.stats.tokens + tokens, self.stats.seconds + seconds, self.stats.retried + retried, restarts
            )

    def activations(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        raise SamplerError("a fleet's servers do not show their modules: use the embedded engine (replicas: 0)")

    def routed_experts(self, sequences: Sequence[Sequence[int]]) -> list[bytes]:
        """Servers are not asked."""
        return [b""] * len(sequences)

    def updating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._on_all(lambda one: one.call_workers("init_weight_transfer_engine", init_info=init_info))

    def start_weight_update(self) -> None:
        self.wait_ready()
        self.ask(lambda servers: servers.updates.begin())

    def update_weights(self, update_info: Any) -> None:
        """Have every server verify the update; one that refuses it refuses it for all."""
        updates = _by_format(update_info, self._settings.formats)
        self.ask(lambda servers: servers.updates.stage(updates))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Every server loads what it verified. Until the next update it is what restarted servers receive."""
        self._serve(self.ask(lambda servers: servers.updates.finish()), weight_version, "fleet")

    def sleep(self, level: int = 1) -> None:
        self._on_all(lambda one: one.post(f"/sleep?level={level}"))

    def wake(self, tags: list[str] | None = None) -> None:
        """`tags`: `weights`, `kv_cache`; None takes memory back for both."""
        query = "&".join(f"tags={tag}" for tag in tags or [])
        self._on_all(lambda one: one.post(f"/wake_up?{query}" if query else "/wake_up"))

    def health(self) -> dict[str, Any]:
        self.wait_ready()
        return self.ask(lambda servers: servers.health())

    def close(self) -> None:
        """End the servers that were started here; safe to call twice and in any state."""
        if self._loop is not None:
            if self._servers is not None:
                self._loop.call(self._servers.shut())
            self._loop.stop()
            self._loop = None
        if self._servers is not None:
            self._servers.end_processes()
            self._servers = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        self._pass_on_notes()

    def ask(self, ask: Callable[[Servers], Coroutine[Any, Any, T]]) -> T:
        """Ask the servers something, on their event loop; wait for the answer."""
        if self._loop is None or self._servers is None:
            raise SamplerError(NOT_RUNNING)
        section = self._settings.sampler
        limit_s, key = max((section.request_timeout_s, REQUEST_KEY), (section.start_timeout_s, START_KEY))
        elsewhere = bool(section.fleet.addresses)
        try:
            with waiting("server", limit_s, key, elsewhere=elsewhere):
                return self._loop.call(ask(self._servers), self._pass_on_notes)
        finally:
            self._pass_on_notes()

    def _on_all(self, ask: Callable[[Replica], Any]) -> None:
        self.wait_ready()
        self.ask(lambda servers: servers.updates.on_all(ask))

    def _pass_on_notes(self) -> None:
        while threading.get_ident() == self._owner and not self._notes.empty():
            self._note(self._notes.get())


class FleetAnswering:
    """See protocol.Answering."""

    def __init__(
        self,
        ask: Callable[[Callable[[Any], Any]], Any],
        count: Callable[[int, float, int, int], None],
        dispatcher: Dispatcher,
        seed: int,
    ) -> None:
        """`ask`: the servers, on their event loop. `count`: tokens, seconds, prompts that went elsewhere, restarts."""
        self._ask, self._count, self._dispatcher, self._seed = ask, count, dispatcher, seed
        self._open: dict[int, Prompt] = {}  # by group
        self._since = 0.0  # open, and not counted yet
        self._retried = 0
        self._closed = False

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        groups = dict(enumerate(prompts, first_group))
        if not self._open:
            self._since = time.perf_counter()
        self._open |= groups
        jobs = [
            Job(group, prompt.token_ids, request_seed(self._seed, group), f"prompt {prompt.id}")
            for group, prompt in groups.items()
        ]
        self._ask(lambda servers: servers.add(self._dispatcher, jobs))

    def finished(self) -> list[list[Rollout]]:
        done, restarts = self._ask(lambda servers: servers.finished(self._dispatcher))
        groups = [_rollouts(self._open.pop(one.job.number), one) for one in done]
        now, retried = time.perf_counter(), self._dispatcher.retried
        tokens = sum(len(rollout.token_ids) for group in groups for rollout in group)
        if groups:
            self._count(tokens, now - self._since, retried - self._retried, restarts)
        self._since, self._retried = now, retried
        return groups

    def close(self) -> None:
        """Safe to call twice, from another thread, and after the sampler's own end."""
        if not self._closed:
            self._closed = True
            with suppress(SamplerError):  # the sampler itself has ended
                self._ask(lambda servers: servers.give_up(self._dispatcher))


def _rollouts(prompt: Prompt, done: Done) -> list[Rollout]:
    return [
        Rollout(
            prompt=prompt,
            group=done.job.number,
            sample=sample,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            loss_mask=written(len(answer.token_ids)),
            finish_reason=answer.finish_reason,
            policy_version=answer.oldest if answer.token_ids else done.version,
            format=done.format.value,
            kept_ids=answer.kept.ids if answer.kept else None,
            kept_counts=answer.kept.counts if answer.kept else None,
            versions=answer.versions,
        )
        for sample, answer in enumerate(done.answers)
    ]


def _by_format(update_info: Any, formats: Sequence[Format]) -> dict[Format, dict[str, Any]]:
    if BY_FORMAT in update_info:
        return {Format(name): info for name, info in update_info[BY_FORMAT].items()}
    return dict.fromkeys(formats, update_info)
