"""vLLM behind what a sampler asks of an engine: answers, what its modules put out, updates of its weights, sleep."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rl.engine.generation import OpenPrompts, sampled
from megatron_rl.engine.readiness import TAGS, Readiness
from megatron_rl.processes.process import rare_collections
from megatron_rl.weight_sync.file_transport import BACKGROUND
from megatron_rl.weight_sync.manifest import WeightSyncError

ALONE = ("activations", "routed_experts")  # requests that nothing else may run beside
LOOK_EVERY_S = 0.02  # at the new weights that are being built while answers are written
Replies = list[tuple[int, Any]]  # numbers of requests; an exception, or what has finished


class Engine:
    """vLLM behind the handful of calls that a sampler needs; each public method is a request."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        with rare_collections():  # vLLM imports most of itself when it makes an engine
            from vllm import LLM

            # in every process of the engine before it chooses kernels; workers import it themselves
            import megatron_rl.engine.receiver  # noqa: F401

            self.llm = LLM(**arguments)
        self.ready = Readiness()
        self.answering = OpenPrompts(self.llm)
        self._held: dict[int, tuple[int | None, dict[str, Any]]] = {}  # patient requests
        self._draining = False  # nothing new begins, so that nothing is open
        self._look_again_at = 0.0
        self.llm.llm_engine.set_weight_version(str(self.ready.policy_version))
        # the first generation loads and compiles for seconds: let that be part of the start
        self.answering.add(0, [[0]], [0], samples=2, max_tokens=2)
        while not self.answering.take_finished():
            self.answering.step()
        gc.collect()
        gc.freeze()  # the engine's own objects live as long as it does: no collection needs to visit them

    def shutdown(self) -> None:
        """End the workers in good order: shared memory that they hold outlives a killed process."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.answering
        gc.collect()

    def health(self) -> dict[str, Any]:
        ready = self.ready
        return {
            "policy_version": ready.policy_version,
            "torn": ready.torn,
            "asleep": sorted(ready.asleep),
            "refusal": ready.refusal(),
            "building": any(self.llm.collective_rpc("weight_update_building")),  # new weights, beside the present ones
            "open": len(self.answering),  # prompts
            "pid": os.getpid(),
        }

    @property
    def writes(self) -> bool:
        """Whether a step would write anything: prompts are open, and the weights are of one version."""
        return len(self.answering) > 0 and self.ready.refusal() is None

    def must_wait(self, method: str) -> bool:
        """Whether a request has to wait while answers are written."""
        if method in ALONE:  # modules that are watched see whatever runs
            self._draining = self.writes
            return self._draining
        return method in ("await_weight_update", "finish_weight_update") and self.writes and self._is_building()

    def generate(self, request: int, policy_version: int | None = None, patient: bool = False, **wanted: Any) -> None:
        """Begin to answer, under the number of the request.

        `policy_version`: the one that the caller believes is served. `patient`: a newer one is as good, and what
        cannot be answered now waits until a sync or a wake has changed that.
        """
        refusal = self.ready.refusal(policy_version, or_newer=patient)
        if refusal and not patient:
            raise RuntimeError(refusal)
        if refusal or self._draining:
            print(f"request {request} waits: {refusal or 'modules are to be watched'}", flush=True)
            self._held[request] = policy_version, wanted
        else:
            self.answering.add(request, **wanted)

    def step(self) -> Replies:
        """Write a token of each answer; what has finished, and what has gone wrong, for each request."""
        replies = self._begin_held() if self._held and not self._draining else []
        if self.writes:
            try:
                self.answering.step()
            except Exception as error:
                traceback.print_exc()
                return [*replies, *((request, error) for request in self.answering.abandon_all())]
        return replies + self.answering.take_finished()

    def _begin_held(self) -> Replies:
        failed: Replies = []
        for request, (version, wanted) in list(self._held.items()):
            if self.ready.refusal(version, or_newer=True):
                continue
            del self._held[request]
            try:
                self.answering.add(request, **wanted)
            except Exception as error:
                traceback.print_exc()
                failed.append((request, error))
        return failed

    def abandon(self, requests: list[int]) -> None:
        """Give up what is open of these requests."""
        for request in requests:
            self._held.pop(request, None)
        self.answering.abandon(requests)

    def _is_building(self) -> bool:
        if time.monotonic() < self._look_again_at:
            return True
        self._look_again_at = time.monotonic() + LOOK_EVERY_S
        return any(self.llm.collective_rpc("weight_update_building"))

    def routed_experts(self, sequences: list[list[int]], policy_version: int) -> list[bytes]:
        """[tokens, layers, experts of a token] of each sequence as int32; empty where the engine cannot tell."""
        refusal = self.ready.refusal(policy_version)
        if refusal:
            raise RuntimeError(refusal)
        if not self.llm.llm_engine.vllm_config.model_config.enforce_eager:
            return [b""] * len(sequences)
        layers = self.llm.llm_engine.model_config.get_total_num_hidden_layers()
        # ranks of an engine route alike
        return [self._watched("routes", tokens, len(tokens), layers)[0] for tokens in sequences]

    def activations(self, tokens: list[int], policy_version: int) -> dict[str, Any]:
        """What the modules put out for a sequence (engine/hooks.py), and the logprobs of its tokens."""
        config = self.llm.llm_engine.vllm_config
        refusal = self.ready.refusal(policy_version) or unwatchable(
            config.model_config.enforce_eager, config.parallel_config.tensor_parallel_size
        )
        if refusal:
            raise RuntimeError(refusal)
        values, told = self._watched("activations", tokens, prompt_logprobs=0)
        return {"values": values, "logprobs": [sampled(told[i], tokens[i]) for i in range(1, len(tokens))]}

    def _watched(self, what: str, tokens: list[int], *arguments: int, **params: Any) -> tuple[bytes, list[Any]]:
        """What the first worker has seen of a sequence, and the logprobs of its tokens where those were asked for."""
        from vllm import SamplingParams

        prompt: Any = {"prompt_token_ids": tokens}
        self.llm.collective_rpc(f"watch_{what}")
        try:
            asked = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **params)
            (output,) = self.llm.generate([prompt], asked, use_tqdm=False)
        finally:
            seen = self.llm.collective_rpc(f"seen_{what}", args=arguments)
        told: Any = output.prompt_logprobs or []
        return seen[0], told

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._on_workers("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self.ready.begin_update()
        with self._abandoned_on_failure():
            self._on_workers("abort_weight_update")
            self._on_workers("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.ready.beside = bool(update_info.get(BACKGROUND))
        if not self.ready.beside:
            self.answering.settle()
        with self._abandoned_on_failure(abort=True):
            self._on_workers("update_weights", update_info=update_info)

    def await_weight_update(self) -> None:
        """Wait until the new weights can be made the live ones; raise where they cannot."""
        with self._abandoned_on_failure(abort=True):
            self._on_workers("await_weight_update")

    def finish_weight_update(self, keep_cache: bool = False) -> dict[str, Any]:
        """Open answers go on with the new weights; `keep_cache`: from the keys and values that they have."""
        self.await_weight_update()
        self.ready.beside = False
        self.answering.settle()
        with self._abandoned_on_failure():
            self._on_workers("finish_weight_update")
        states, torn = self._worker_states()
        if torn:
            self.ready.abandon_update(torn=True)
            raise RuntimeError(f"the engine's workers disagree after an update: {states}")
        version = states[0]["policy_version"]
        if not keep_cache or not self.answering:
            self._reset_prefix_cache()
        self.llm.llm_engine.set_weight_version(str(version))
        self.ready.complete_update(version)
        return max(states, key=lambda state: state["load_s"])

    def _reset_prefix_cache(self) -> None:
        reset = False
        try:
            reset = self.llm.reset_prefix_cache(reset_running_requests=len(self.answering) > 0)
        finally:
            if not reset:
                self.ready.abandon_update(torn=True)
        if not reset:
            raise RuntimeError(
                "the engine's prefix cache could not be reset after an update, since blocks of it are still in use: "
                "answers would begin on keys and values of the old weights"
            )

    @contextmanager
    def _abandoned_on_failure(self, abort: bool = False) -> Iterator[None]:
        """A step of an update. `abort`: the workers still hold what has arrived, and have to drop it."""
        try:
            yield
        except Exception:
            if abort:
                self._on_workers("abort_weight_update")
            self.ready.abandon_update(torn=self._worker_states()[1])
            raise

    def _worker_states(self) -> tuple[list[dict[str, Any]], bool]:
        """What each worker holds, and whether together that is no version at all."""
        states: list[dict[str, Any]] = self.llm.collective_rpc("weight_sync_state")
        versions = {state["policy_version"] for state in states}
        return states, len(versions) > 1 or any(state["torn"] for state in states)

    def _on_workers(self, method: str, **arguments: Any) -> None:
        """Call a method of every worker; the first failure is raised here."""
        answers = self.llm.collective_rpc("guarded_call", args=(method, arguments))
        for kind, message in filter(None, answers):
            raise WeightSyncError(message) if kind == WeightSyncError.__name__ else RuntimeError(f"{kind}: {message}")

    def sleep(self, level: int) -> None:
        if self.answering or self._held:
            raise RuntimeError("answers are being written: wait for them, or give them up, before the engine sleeps")
        self.ready.fall_asleep(level)
        self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        """Wake parts of the engine. Wholly awake, it has to hold what it held, or what a sync has brought since."""
        tags = list(tags or TAGS)
        asleep = [tag for tag in tags if tag in self.ready.asleep]
        self.ready.wake(tags)
        if asleep:
            self.llm.wake_up(tags=asleep)
        if asleep and not self.ready.asleep and not self.ready.discarded:
            self._check_awake()

    def _check_awake(self) -> None:
        states, torn = self._worker_states()
        lost = [state for state in states if not state["intact"]]
        if torn or lost or states[0]["policy_version"] != self.ready.policy_version:
            self.ready.torn = True
            raise RuntimeError(
                f"the engine woke with other versions or scales than policy version {self.ready.policy_version} had: "
                f"{(lost or states)[0]}. Sync again"
            )


def unwatchable(eager: bool, ranks: int) -> str:
    """Why the modules of an engine cannot be watched; empty where they can."""
    if not eager:
        return "a compiled engine shows nothing of its modules: set sampler.vllm={enforce_eager: true}"
    if ranks > 1:
        return f"the modules of an engine are watched on one rank, this has {ranks}: set sampler.tensor_parallel=1"
    return ""
