"""vLLM engine in its process: carries out generation, weight updates, reads of modules' outputs,
sleep.
"""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_rl.engine.generation import OpenSamples
from megatron_rl.engine.readiness import KEEPS_EXPERTS, TAGS, Readiness
from megatron_rl.files import JsonObject
from megatron_rl.processes.process import rare_collections
from megatron_rl.weight_sync.file_transport import BACKGROUND
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.wire import BACKEND_PREFIX

LOOK_EVERY_S = 0.02  # poll for weights that are being built while responses are generated


class Engine:
    """vLLM behind the calls that a sampler needs: requests (messages.py), and queries of the
    service loop.
    """

    def __init__(self, arguments: JsonObject) -> None:
        with rare_collections():  # vLLM imports most of itself when it makes an engine
            from vllm import LLM

            # in every engine process before it chooses kernels; workers import it themselves
            import megatron_rl.engine.receiver  # noqa: F401

            keeps = arguments.pop(KEEPS_EXPERTS, False)
            self.llm = LLM(**arguments)
        model = self.llm.llm_engine.model_config
        self.vocabulary = model.get_vocab_size()
        self.longest = model.max_model_len
        self.transport = arguments["weight_transfer_config"]["backend"].removeprefix(BACKEND_PREFIX)
        cache = self.llm.llm_engine.vllm_config.cache_config
        self._cache_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self.ready = Readiness()
        if keeps:
            self.llm.collective_rpc(
                "keep_choices", args=(model.get_total_num_hidden_layers(), model.get_num_experts())
            )
        self.samples = OpenSamples(self.llm, self.ready, self._kept_experts if keeps else None)
        self._look_again_at = 0.0
        self._stamp(self.ready.policy_version)
        # the first generation loads and compiles for seconds: make it part of the start
        for seed in (0, 1):
            self.samples.begin(seed, tokens=[0], seed=seed, max_tokens=2)
        while self.samples:
            self.samples.write()
        self.samples.step()  # results are discarded
        gc.collect()
        # the engine's own objects are permanent: exclude them from garbage collection
        gc.freeze()

    def shutdown(self) -> None:
        """End the workers in order: the shared memory that they hold outlives a killed process."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.samples
        gc.collect()

    def status(self) -> JsonObject:
        ready = self.ready
        return {
            "policy_version": ready.policy_version,
            "incomplete": ready.incomplete,
            "asleep": sorted(ready.asleep),
            "refusal": ready.refusal(),
            # new weights are being built beside the live ones
            "building": any(self.llm.collective_rpc("weight_update_building")),
            "open": len(self.samples),
            "longest": self.longest,  # tokens of prompt and response together
            "cache_tokens": self._cache_tokens,
            "prefilled": self.samples.prefilled,
            "written": self.samples.written,  # increases while the engine works
            "pid": os.getpid(),
        }

    @property
    def broken(self) -> bool:
        """Return True once one of its workers has ended."""
        core: Any = self.llm.llm_engine.engine_core
        return bool(getattr(core.engine_core.model_executor, "is_failed", False))

    def must_wait(self, method: str) -> bool:
        """Return True if a request has to wait while samples are drawn."""
        if method == "values":  # hooks on modules would record other requests, too
            self.samples.draining = self.samples.writes
            return self.samples.draining
        return (
            method in ("await_weight_update", "finish_weight_update")
            and self.samples.writes
            and self._is_building()
        )

    def resume(self) -> None:
        """Resume open samples."""
        self.samples.paused = False

    def forget_version(self) -> None:
        """Forget the version of the loaded weights, so that an engine accepts any version of the
        next run.
        """
        self._on_workers("abort_weight_update")
        self._on_workers("forget_version")
        self.samples.paused = False
        self.ready = self.samples.ready = Readiness()
        self._reset_prefix_cache()
        self._stamp(self.ready.policy_version)

    def _stamp(self, version: int) -> None:
        """Set the policy version of new tokens and prefixes."""
        self.llm.llm_engine.set_weight_version(str(version))
        self.samples.salt = str(version)

    def values(self, kind: str, sequences: list[list[int]], policy_version: int) -> list[Any]:
        """Return outputs of the modules for each sequence: "activations" or "routed_experts"."""
        refusal = self.ready.refusal(policy_version)
        if refusal:
            raise RuntimeError(refusal)
        if kind == "activations":
            return [self._activations(one) for one in sequences]
        return self._routes(sequences)

    def _is_building(self) -> bool:
        if time.monotonic() < self._look_again_at:
            return True
        self._look_again_at = time.monotonic() + LOOK_EVERY_S
        return any(self.llm.collective_rpc("weight_update_building"))

    def _routes(self, sequences: list[list[int]]) -> list[bytes]:
        """Return the experts [tokens, layers, experts of a token] of each sequence as int32; empty
        in a compiled engine, which hides its routers.
        """
        if not self.llm.llm_engine.vllm_config.model_config.enforce_eager:
            return [b""] * len(sequences)
        layers = self.llm.llm_engine.model_config.get_total_num_hidden_layers()
        # all ranks of an engine route alike
        return [self._watched("routes", tokens, len(tokens), layers)[0] for tokens in sequences]

    def _kept_experts(self, wanted: list[tuple[str, int]]) -> list[np.ndarray | None]:
        experts: list[list[np.ndarray | None]] = self.llm.collective_rpc(
            "cached_choices", args=(wanted,)
        )
        return experts[0]

    def _activations(self, tokens: list[int]) -> JsonObject:
        """Return outputs of the modules for a sequence (engine/hooks.py), and the logprobs of its
        tokens (preflight/engine.py: requirements).
        """
        values, rows = self._watched("activations", tokens, prompt_logprobs=0)
        logprobs = [row[token].logprob for row, token in zip(rows[1:], tokens[1:], strict=True)]
        return {"values": values, "logprobs": logprobs}

    def _watched(
        self, what: str, tokens: list[int], *arguments: int, **params: Any
    ) -> tuple[bytes, list[Any]]:
        """Record a sequence on the first worker; also the logprobs of its tokens if `params`
        asks for them.
        """
        from vllm import SamplingParams

        # disable the prefix cache: modules do not run for cached tokens, here of the same sequence
        # in an earlier request
        prompt: Any = {
            "prompt_token_ids": tokens,
            "cache_salt": f"watched at {time.monotonic_ns()}",
        }
        self.llm.collective_rpc(f"watch_{what}")
        try:
            asked = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **params)
            (output,) = self.llm.generate([prompt], asked, use_tqdm=False)
        finally:
            seen = self.llm.collective_rpc(f"observed_{what}", args=arguments)
        rows: Any = output.prompt_logprobs or []
        return seen[0], rows

    def init_weight_transfer_engine(self, init_info: JsonObject) -> None:
        self._on_workers("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self.ready.begin_update()
        with self._abandoned_on_failure():
            self._on_workers("abort_weight_update")
            self._on_workers("start_weight_update")

    def update_weights(self, update_info: JsonObject) -> None:
        self.ready.beside = bool(update_info.get(BACKGROUND))
        if not self.ready.beside:
            self.samples.settle()
        with self._abandoned_on_failure(abort=True):
            self._on_workers("update_weights", update_info=update_info)

    def await_weight_update(self) -> None:
        """Wait until the new weights can be made the live ones; raise where they cannot."""
        with self._abandoned_on_failure(abort=True):
            self._on_workers("await_weight_update")

    def abort_weight_update(self) -> None:
        """Drop an update that other engines refused: the previous version stays live."""
        self._on_workers("abort_weight_update")
        self.ready.abandon_update(incomplete=self._worker_states()[1])
        self.samples.paused = False

    def finish_weight_update(self, pause: bool = False) -> JsonObject:
        """Load the update; open samples resume with the new weights, and their keys and values are
        recomputed.

        `pause`: they resume only when `resume` is called, as no token may be of weights that
        another engine could not load.
        """
        self.await_weight_update()
        self.ready.beside = False
        self.samples.settle()
        with self._abandoned_on_failure():
            self._on_workers("finish_weight_update")
        states, incomplete = self._worker_states()
        if incomplete:
            self.ready.abandon_update(incomplete=True)
            raise RuntimeError(f"the engine's workers disagree after an update: {states}")
        version = states[0]["policy_version"]
        self._reset_prefix_cache()
        self._stamp(version)
        self.ready.complete_update(version)
        self.samples.paused = pause
        return max(states, key=lambda state: state["load_s"])

    def _reset_prefix_cache(self) -> None:
        reset = False
        try:
            reset = self.llm.reset_prefix_cache(reset_running_requests=len(self.samples) > 0)
        finally:
            if not reset:
                self.ready.abandon_update(incomplete=True)
        if not reset:
            raise RuntimeError(
                "the engine's prefix cache could not be reset after an update, since blocks of it "
                "are still in use: responses would start from keys and values of the old weights"
            )

    @contextmanager
    def _abandoned_on_failure(self, abort: bool = False) -> Iterator[None]:
        """Mark the update as abandoned on failure. `abort`: workers have to drop received tensors,
        too.
        """
        try:
            yield
        except Exception:
            if abort:
                self._on_workers("abort_weight_update")
            self.ready.abandon_update(incomplete=self._worker_states()[1])
            raise

    def _worker_states(self) -> tuple[list[JsonObject], bool]:
        """Return the state of each worker, and True if the weights are of no single version."""
        states: list[JsonObject] = self.llm.collective_rpc("weight_sync_state")
        versions = {state["policy_version"] for state in states}
        return states, len(versions) > 1 or any(state["incomplete"] for state in states)

    def _on_workers(self, method: str, **arguments: Any) -> None:
        """Call a method of every worker; raise the first failure."""
        answers = self.llm.collective_rpc("guarded_call", args=(method, arguments))
        for kind, message in filter(None, answers):
            raise (
                WeightSyncError(message)
                if kind == WeightSyncError.__name__
                else RuntimeError(f"{kind}: {message}")
            )

    def sleep(self, level: int) -> None:
        if self.samples.waiting:
            raise RuntimeError(
                "responses are being generated: wait for them, or cancel them, before the engine "
                "sleeps"
            )
        self.ready.fall_asleep(level)
        self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        """Wake parts of the engine. Fully awake, it must hold the weights from before the sleep, or
        of a later sync.
        """
        tags = list(tags or TAGS)
        asleep = [tag for tag in tags if tag in self.ready.asleep]
        self.ready.wake(tags)
        if asleep:
            self.llm.wake_up(tags=asleep)
        if asleep and not self.ready.asleep and not self.ready.discarded:
            self._check_awake()

    def _check_awake(self) -> None:
        states, incomplete = self._worker_states()
        lost = [state for state in states if not state["intact"]]
        if incomplete or lost or states[0]["policy_version"] != self.ready.policy_version:
            self.ready.incomplete = True
            raise RuntimeError(
                "the engine woke with other versions or scales than policy version "
                f"{self.ready.policy_version} had: {(lost or states)[0]}. Sync again"
            )
