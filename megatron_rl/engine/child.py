"""The process that owns vLLM's engine: `python -m megatron_rl.engine.child FD PARENT_PID`.

Answers one request at a time from the socket FD. Lives exactly as long as its parent: the kernel kills it when
the parent dies, and the end of the socket's stream does the same where the kernel does not. It ignores Ctrl-C
and USR1: its parent decides what they mean.
"""

from __future__ import annotations

import gc
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from megatron_rl.engine.kept import of_rows
from megatron_rl.engine.readiness import TAGS, Readiness
from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.processes.process import die_with_parent, end_own_group, leave_to_the_driver, rare_collections
from megatron_rl.processes.stacks import show_on_request
from megatron_rl.weight_sync.file_transport import BACKGROUND
from megatron_rl.weight_sync.manifest import WeightSyncError


def read_requests(channel: Channel, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """A thread, so that the parent's end is noticed in the middle of a long generation."""
    try:
        while True:
            requests.put(channel.receive())
    except ChannelClosed:
        end_own_group()


class Engine:
    """vLLM behind the handful of calls that a sampler needs; each public method is a request."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        with rare_collections():  # vLLM imports most of itself when it makes an engine
            from vllm import LLM

            # in every process of the engine before it chooses kernels; workers import it themselves
            import megatron_rl.engine.receiver  # noqa: F401

            self.llm = LLM(**arguments)
        self.ready = Readiness()
        # the first generation loads and compiles for seconds: let that be part of the start
        self.generate([[0]], [0], samples=2, max_tokens=2, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=[])
        gc.collect()
        gc.freeze()  # the engine's own objects live as long as it does: no collection needs to visit them

    def shutdown(self) -> None:
        """Ends the workers in good order: shared memory that they hold outlives a killed process."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def health(self) -> dict[str, Any]:
        ready = self.ready
        return {
            "policy_version": ready.policy_version,
            "torn": ready.torn,
            "asleep": sorted(ready.asleep),
            "refusal": ready.refusal(),
            "building": any(self.llm.collective_rpc("weight_update_building")),  # new weights, beside the present ones
            "pid": os.getpid(),
        }

    def generate(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        samples: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop_token_ids: list[int],
        candidates: int = 0,
        policy_version: int | None = None,
    ) -> dict[str, Any]:
        """`policy_version`: the one that the caller believes is served. `candidates`: see `SamplingParams`."""
        from vllm import SamplingParams

        refusal = self.ready.refusal(policy_version)
        if refusal:
            raise RuntimeError(refusal)
        candidates = min(candidates, self.llm.llm_engine.model_config.get_vocab_size())
        distinct = 1 if temperature == 0 else samples  # greedy samples are copies of one
        params = [
            SamplingParams(
                n=distinct,
                seed=seed,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                stop_token_ids=stop_token_ids,
                logprobs=candidates,  # beside the sampled token's
                flat_logprobs=True,
                detokenize=False,
                skip_clone=True,  # nobody else changes them
            )
            for seed in seeds
        ]
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        completions = [c for output in outputs for c in sorted(output.outputs, key=lambda c: c.index)]
        return pack([c for c in completions for _ in range(samples // distinct)], candidates)

    def routed_experts(self, sequences: list[list[int]], policy_version: int) -> list[bytes]:
        """Of each sequence, [tokens, layers, experts of a token] as int32; nothing where the engine cannot tell."""
        from vllm import SamplingParams

        refusal = self.ready.refusal(policy_version)
        if refusal:
            raise RuntimeError(refusal)
        if not self.llm.llm_engine.vllm_config.model_config.enforce_eager:
            return [b""] * len(sequences)
        layers = self.llm.llm_engine.model_config.get_total_num_hidden_layers()
        params, found = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), []
        for tokens in sequences:
            prompt: Any = {"prompt_token_ids": tokens}
            self.llm.collective_rpc("watch_routes")
            try:
                self.llm.generate([prompt], params, use_tqdm=False)
            finally:
                told = self.llm.collective_rpc("seen_routes", args=(len(tokens), layers))
            found.append(told[0])  # ranks of an engine route alike
        return found

    def activations(self, tokens: list[int], policy_version: int) -> dict[str, Any]:
        """What the modules put out for a sequence (engine/activations.py), and the logprobs of its tokens."""
        from vllm import SamplingParams

        config = self.llm.llm_engine.vllm_config
        refusal = self.ready.refusal(policy_version) or unwatchable(
            config.model_config.enforce_eager, config.parallel_config.tensor_parallel_size
        )
        if refusal:
            raise RuntimeError(refusal)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        prompt: Any = {"prompt_token_ids": tokens}
        self.llm.collective_rpc("watch_activations")
        try:
            (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        finally:
            (values,) = self.llm.collective_rpc("seen_activations")
        told = output.prompt_logprobs or []
        return {"values": values, "logprobs": [_sampled(told[i], tokens[i]) for i in range(1, len(tokens))]}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._on_workers("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self.ready.begin_update()
        with self._abandoned_on_failure():
            self._on_workers("abort_weight_update")
            self._on_workers("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.ready.beside = bool(update_info.get(BACKGROUND))
        with self._abandoned_on_failure(abort=True):
            self._on_workers("update_weights", update_info=update_info)

    def finish_weight_update(self) -> dict[str, Any]:
        with self._abandoned_on_failure(abort=True):
            self._on_workers("await_weight_update")
        self.ready.beside = False
        with self._abandoned_on_failure():
            self._on_workers("finish_weight_update")
        states, torn = self._worker_states()
        if torn:
            self.ready.abandon_update(torn=True)
            raise RuntimeError(f"the engine's workers disagree after an update: {states}")
        self.llm.reset_prefix_cache()
        self.ready.complete_update(states[0]["policy_version"])
        return max(states, key=lambda state: state["load_s"])

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
        self.ready.fall_asleep(level)
        self.llm.sleep(level=level)

    def wake(self, tags: list[str] | None = None) -> None:
        """Once wholly awake, it has to hold what it held before, or what a sync has brought since."""
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


def pack(completions: list[Any], candidates: int = 0) -> dict[str, Any]:
    """Columns instead of objects: lengths, then all tokens and logprobs back to back; NaN where there is none."""
    if candidates:
        return _pack_kept(completions, candidates)
    lengths = [len(completion.token_ids) for completion in completions]
    tokens = np.empty(sum(lengths), dtype=np.int32)
    logprobs = np.full(sum(lengths), np.nan, dtype=np.float32)
    start = 0
    for completion, length in zip(completions, lengths, strict=True):
        stop = start + length
        tokens[start:stop] = completion.token_ids
        flat = completion.logprobs
        if flat is not None and flat.token_ids == list(completion.token_ids):
            logprobs[start:stop] = flat.logprobs
        elif flat is not None:
            logprobs[start:stop] = [_sampled(flat[i], token) for i, token in enumerate(completion.token_ids)]
        start = stop
    return {
        "lengths": lengths,
        "tokens": tokens.tobytes(),
        "logprobs": logprobs.tobytes(),
        "finish": [completion.finish_reason or "abort" for completion in completions],
    }


def _pack_kept(completions: list[Any], candidates: int) -> dict[str, Any]:
    """With the tokens that each was drawn among; a logprob counts as missing where those are not known."""
    logprobs, found = [], []
    for completion in completions:
        tokens_T = np.asarray(completion.token_ids, np.int32)
        flat = completion.logprobs
        ids_TN = np.asarray(flat.token_ids, np.int32).reshape(len(tokens_T), candidates + 1)
        logprobs_TN = np.asarray(flat.logprobs, np.float32).reshape(ids_TN.shape)
        found.append(of_rows(tokens_T, ids_TN, logprobs_TN, candidates))
        logprobs.append(np.where(found[-1].unknown_T, np.float32("nan"), logprobs_TN[:, 0]))
    return {
        "lengths": [len(completion.token_ids) for completion in completions],
        "tokens": np.concatenate([np.asarray(one.token_ids, np.int32) for one in completions]).tobytes(),
        "logprobs": np.concatenate(logprobs).astype(np.float32).tobytes(),
        "finish": [completion.finish_reason or "abort" for completion in completions],
        "kept_ids": [one.ids.tobytes() for one in found],
        "kept_counts": [one.counts.tobytes() for one in found],
    }


def _sampled(position: dict[int, Any] | None, token: int) -> float:
    entry = position.get(token) if position else None
    return float("nan") if entry is None else entry.logprob


def unwatchable(eager: bool, ranks: int) -> str:
    """Why the modules of an engine cannot be watched; empty where they can."""
    if not eager:
        return "a compiled engine shows nothing of its modules: set sampler.vllm={enforce_eager: true}"
    if ranks > 1:
        return f"the modules of an engine are watched on one rank, this has {ranks}: set sampler.tensor_parallel=1"
    return ""


REQUESTS: dict[str, Callable[..., Any]] = {
    name: getattr(Engine, name)
    for name in (
        "health", "generate", "activations", "routed_experts", "init_weight_transfer_engine", "start_weight_update",
        "update_weights", "finish_weight_update", "sleep", "wake",
    )
}  # fmt: skip


def answer(channel: Channel, request: dict[str, Any], call: Callable[[], Any]) -> bool:
    start = time.perf_counter()
    try:
        reply = {"id": request["id"], "value": call(), "seconds": time.perf_counter() - start}
    except Exception as error:
        traceback.print_exc()
        reply = {"id": request["id"], "error": {"type": type(error).__name__, "message": str(error)}}
    channel.send(reply)
    return "error" not in reply


def serve(channel: Channel) -> None:
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(channel, requests), daemon=True).start()
    engine: Any = None

    def start(arguments: dict[str, Any]) -> dict[str, Any]:
        nonlocal engine
        engine = Engine(arguments)
        return engine.health()

    first = requests.get()
    if not answer(channel, first, lambda: start(first["arguments"])):
        return
    while True:
        request = requests.get()
        if request["method"] == "shutdown":
            engine.shutdown()
            os._exit(0)
        answer(channel, request, partial(REQUESTS[request["method"]], engine, **request["arguments"]))


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    leave_to_the_driver()
    show_on_request()
    try:
        serve(Channel(socket.socket(fileno=descriptor)))
    except ChannelClosed:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        end_own_group()  # workers included; nothing here is worth an orderly shutdown's seconds


if __name__ == "__main__":
    main()
