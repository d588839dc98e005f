"""The embedded sampler: an engine that this process owns, in a child process of its own.

A child, because vLLM and Megatron each want the process's threads, distributed state and signal handlers for
themselves. The child is started in its own session, so that Ctrl-C in a terminal reaches the parent alone.

On a GPU the same code runs with other engine arguments (`model_folder.engine_arguments`, `sampler.vllm`); that
has not been run yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatron_rl.channel import Channel, ChannelClosed
from megatron_rl.config.schema import Config
from megatron_rl.process import SHORT_SPIN
from megatron_rl.sampler import model_folder
from megatron_rl.sampler.protocol import SamplerError, SamplerStats
from megatron_rl.sampler.shared_memory import remove_segments, segments_of_session
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

LOG_LINES_SHOWN = 15
CLOSE_GRACE_S = 3.0
WORKERS_GRACE_S = 4.0
TRACKER_GRACE_S = 1.0

# a learner's rendezvous and thread limits are not the engine's; credentials are nobody's here
_DROPPED_VARIABLES = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
        "MASTER_PORT", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_SPINCOUNT",
        "GOMP_CPU_AFFINITY", "MKL_NUM_THREADS", "WANDB_API_KEY", "HF_TOKEN",
    }
)  # fmt: skip
_ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the child itself
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
} | SHORT_SPIN


class EmbeddedSampler:
    """See protocol.Sampler. Start it from a thread that outlives it: the kernel ties the child to that thread."""

    def __init__(
        self,
        config: Config,
        hf_folder: Path,
        log_dir: Path,
        *,
        worker_extension: str = model_folder.WORKER_EXTENSION,
    ) -> None:
        self.policy_version = NO_VERSION
        self.last_sync: dict[str, Any] = {}  # verify_s, load_s and bytes of the engine's last accepted update
        self.log_path = log_dir / "sampler.log"
        self._config = config
        self._hf_folder = hf_folder
        self._worker_extension = worker_extension
        self._stats = SamplerStats()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._requests = 0
        self._starting = False  # launched, and nobody has waited for it yet
        self._segments: set[str] = set()  # shared memory of the engine's processes

    @property
    def stats(self) -> SamplerStats:
        return self._stats

    def start(self) -> None:
        """Start the child and wait until its engine answers."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start the child without waiting for it: the learner can start meanwhile."""
        self.policy_version = NO_VERSION
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-rl-engine-")
        folder = model_folder.write_engine_folder(self._hf_folder, Path(self._folder.name), self._config)
        arguments = model_folder.engine_arguments(self._config, folder, self._worker_extension)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "megatron_rl.engine.child", str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env=engine_environment()
                    | thread_binding(self._config.sampler.tensor_parallel)
                    | visible_devices(self._config.sampler.devices),
                    start_new_session=True,
                )
        finally:
            theirs.close()
        self._channel = Channel(ours)
        self._post("start", arguments)
        self._starting = True

    def wait_ready(self) -> None:
        if self._starting:
            self._starting = False
            self._answer("start", self._config.sampler.start_timeout_s, "sampler.start_timeout_s")
            self._note_segments()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, first_group: int, step: int
    ) -> list[Rollout]:
        if not prompts:
            return []
        start = time.perf_counter()
        answer = self._call(
            "generate",
            prompts=[prompt.token_ids for prompt in prompts],
            seeds=[request_seed(seed, first_group + i) for i in range(len(prompts))],
            samples=params.samples,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            stop_token_ids=params.stop_token_ids,
            policy_version=self.policy_version,
        )
        rollouts = self._unpack(answer, prompts, params.samples, first_group)
        self._count(rollouts, answer, time.perf_counter() - start)
        return rollouts

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.last_sync = self._call("finish_weight_update")
        self.policy_version = self.last_sync["policy_version"]
        if weight_version is not None and weight_version != str(self.policy_version):
            raise WeightSyncError(f"the engine loaded policy version {self.policy_version}, not {weight_version}")

    def pause(self) -> None:
        self._call("pause")

    def resume(self) -> None:
        self._call("resume")

    def sleep(self, level: int = 1) -> None:
        self._call("sleep", level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        self._call("wake", tags=tags)

    def health(self) -> dict[str, Any]:
        return self._call("health")

    def close(self) -> None:
        """Stop the child and its workers; safe to call twice and in any state."""
        self._note_segments()
        if self._channel is not None:
            self._ask_workers_to_end()
            self._channel.close()  # the child kills its group at the end of the stream
            self._channel = None
        if self._process is not None:
            self._reap(self._process)
            self._process = None
            remove_segments(self._segments)
            self._segments = set()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> EmbeddedSampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str, **arguments: Any) -> Any:
        self.wait_ready()
        self._post(method, arguments)
        return self._answer(method, self._config.sampler.request_timeout_s, "sampler.request_timeout_s")

    def _post(self, method: str, arguments: dict[str, Any]) -> None:
        if self._channel is None:
            raise SamplerError("the sampler is not running: it was never started, was closed, or failed before")
        self._requests += 1
        try:
            self._channel.send({"id": self._requests, "method": method, "arguments": arguments})
        except ChannelClosed:
            raise self._failure(f"the sampler's process ended before `{method}`") from None

    def _answer(self, method: str, timeout_s: float, key: str) -> Any:
        """Wait for the reply; every way in which none comes ends the child and names its log."""
        if self._channel is None:
            raise SamplerError("the sampler is not running: it was closed, or failed before")
        try:
            reply = self._channel.receive(timeout_s)
        except TimeoutError:
            raise self._failure(f"the sampler did not answer `{method}` within {key}={timeout_s:g}") from None
        except ChannelClosed:
            raise self._failure(f"the sampler's process ended during `{method}`") from None
        except BaseException:
            self.close()  # an interrupt in mid-answer leaves a stream that cannot be read on
            raise
        if "error" in reply:
            raise self._error(method, reply["error"])
        return reply["value"]

    def _error(self, method: str, error: dict[str, str]) -> Exception:
        if error["type"] == WeightSyncError.__name__:
            return WeightSyncError(error["message"])
        message = f"`{method}` failed in the sampler: {error['type']}: {error['message']}"
        if method == "start":
            return self._failure(message)
        return SamplerError(f"{message} (log: {self.log_path})")

    def _failure(self, message: str) -> SamplerError:
        """Close, and put the end of the child's log under the message."""
        process = self._process
        self.close()
        code = "" if process is None or process.returncode is None else f" (exit status {process.returncode})"
        return SamplerError(f"{message}{code}. The end of {self.log_path}:\n{log_tail(self.log_path)}")

    def _note_segments(self) -> None:
        """Only workers share memory; which of it is theirs can be seen while they live."""
        if self._process is not None and self._config.sampler.tensor_parallel > 1:
            self._segments |= segments_of_session(self._process.pid)

    def _ask_workers_to_end(self) -> None:
        """Workers of a larger engine share memory that only they release; a single process needs no such wait."""
        if self._config.sampler.tensor_parallel == 1 or self._process is None or self._channel is None:
            return
        try:
            self._channel.send({"id": 0, "method": "shutdown", "arguments": {}})
            self._process.wait(WORKERS_GRACE_S)
        except (ChannelClosed, subprocess.TimeoutExpired):
            pass  # it is ended anyway

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session's leader may be gone, its workers not yet
        process.wait(CLOSE_GRACE_S)

    def _unpack(
        self, answer: dict[str, Any], prompts: Sequence[Prompt], samples: int, first_group: int
    ) -> list[Rollout]:
        tokens = np.frombuffer(answer["tokens"], dtype=np.int32).tolist()
        logprobs = np.frombuffer(answer["logprobs"], dtype=np.float32).tolist()
        rollouts = []
        start = 0
        for row, (length, finish) in enumerate(zip(answer["lengths"], answer["finish"], strict=True)):
            index, sample = divmod(row, samples)
            stop = start + length
            rollouts.append(
                Rollout(
                    prompt=prompts[index],
                    group=first_group + index,
                    sample=sample,
                    token_ids=tuple(tokens[start:stop]),
                    logprobs=tuple(logprobs[start:stop]),
                    loss_mask=(True,) * length,
                    finish_reason=finish,
                    policy_version=self.policy_version,
                    format=self._config.quantization.format.value,
                )
            )
            start = stop
        return rollouts

    def _count(self, rollouts: list[Rollout], answer: dict[str, Any], seconds: float) -> None:
        before = self._stats
        missing = int(np.isnan(np.frombuffer(answer["logprobs"], dtype=np.float32)).sum())
        self._stats = SamplerStats(
            requests=before.requests + len(rollouts),
            tokens=before.tokens + sum(answer["lengths"]),
            seconds=before.seconds + seconds,
            missing_logprobs=before.missing_logprobs + missing,
            truncated=before.truncated + answer["finish"].count("length"),
        )


def request_seed(seed: int, group: int) -> int:
    """A seed per group, the same for the same run seed; vLLM derives one per sample from it."""
    digest = blake2b(f"{seed}/{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # leaves room to count samples upwards in 63 bits


def engine_environment() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    return inherited | _ENGINE_VARIABLES


def thread_binding(workers: int) -> dict[str, str]:
    """Cores for each worker of an engine on a host: vLLM by itself wants a memory node per worker."""
    name = "VLLM_CPU_OMP_THREADS_BIND"
    cores = sorted(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else []
    if workers == 1 or len(cores) < workers or name in os.environ:
        return {}
    share = len(cores) // workers
    groups = [cores[i * share : (i + 1) * share] for i in range(workers)]
    return {name: "|".join(",".join(map(str, group)) for group in groups)}


def visible_devices(wanted: str | None) -> dict[str, str]:
    """The engine's GPUs. They are counted among those that this process sees, as CUDA counts them."""
    if wanted is None:
        return {}
    name = "CUDA_VISIBLE_DEVICES"
    seen = [device for device in os.environ.get(name, "").split(",") if device]
    chosen = [int(device) for device in wanted.split(",")]
    if seen and max(chosen) >= len(seen):
        raise SamplerError(f"sampler.devices: {wanted!r}, but this job sees {len(seen)} GPUs ({name}={','.join(seen)})")
    return {name: ",".join(seen[device] if seen else str(device) for device in chosen)}


def log_tail(path: Path, lines: int = LOG_LINES_SHOWN) -> str:
    """The last lines of a log, reading at most its last 64 KiB."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - (64 << 10)))
        return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
