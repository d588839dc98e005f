"""Driver of vLLM's step loop: queues, steps, renews and cancels samples, and encodes the finished ones as bytes.

Which tokens top_k and top_p left to draw from is told from logprobs that were taken after them: what they cut is -inf.
An engine keeps what ties with the last of the k, so that a few more candidates than k are asked for. Where all of those
are finite there may be more, and the position is as good as unknown.

T tokens of an answer, N candidates of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import numpy as np


class OpenSamples:
    """What vLLM works on: each sample a request of its own, under the number that its caller has given it."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._open: dict[str, dict[str, Any]] = {}  # by vLLM's name: what was asked for
        self._finished: list[tuple[int, dict[str, Any]]] = []
        self._last: tuple[Any, Any] | None = None  # what was asked for last, and vLLM's request for it
        self.written = 0  # steps that have written something
        self.prefilled = 0  # tokens of prompts; of a prefix that was cached, none
        # of cached prefixes: the policy version whose keys and values they are. Others begin on none of them
        self.salt = ""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, number: int, tokens: list[int], seed: int, **wanted: Any) -> None:
        """Queue a sample in vLLM as `LLM.generate` does; see messages.Generate.

        Samples of one prompt come one after the other: what vLLM makes of the first is copied for the others, as it
        does for samples that are asked for together.
        """
        like = (tokens, wanted, self.salt)
        if self._last is None or self._last[0] != like:
            self._last = like, self._processed(tokens, **wanted)
        request = copy(self._last[1])
        request.request_id, request.sampling_params = str(number), copy(request.sampling_params)
        request.sampling_params.seed = seed
        self._engine.input_processor.assign_request_id(request)
        self._engine.output_processor.add_request(request, None, None, 0)
        self._engine.engine_core.add_request(request)
        self._open[str(number)] = {"tokens": tokens, "seed": seed, **wanted}

    def _processed(self, tokens: list[int], candidates: int = 0, **wanted: Any) -> Any:
        """vLLM's request for a sample of this prompt."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **wanted,
            seed=0,
            logprobs=self._clipped(candidates),  # beside the sampled token's
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: Any = tokens_input(tokens, cache_salt=self.salt)
        supported = self._engine.get_supported_tasks()
        return self._engine.input_processor.process_inputs("sample", prompt, params, supported_tasks=supported)

    def _clipped(self, candidates: int = 0, **_: Any) -> int:
        return min(candidates, self._engine.model_config.get_vocab_size())

    def step(self) -> None:
        self.written += 1
        for output in self._engine.step():
            if output.finished and output.request_id in self._open:
                candidates = self._clipped(**self._open.pop(output.request_id))
                self.prefilled += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
                now = int(self._engine.get_weight_version())
                self._finished.append((int(output.request_id), completed(output.outputs[0], candidates, now)))

    def settle(self) -> None:
        """End the steps that a scheduler which works ahead has begun: what they draw is of the present weights."""
        core = self._engine.engine_core.engine_core
        if not self._open or not core.batch_queue:
            return
        self._engine.sleep(level=0, mode="keep")  # nothing new is scheduled
        while core.batch_queue:
            self.step()
        self._engine.wake_up(tags=["scheduling"])

    def renew(self) -> None:
        """Queue samples that are not begun anew: the prefixes that they will share are of the new weights."""
        queued = self._engine.engine_core.engine_core.scheduler.waiting
        names = [str(one.request_id).partition("-")[0] for one in queued if not one.num_computed_tokens]
        begun = [self._open.pop(name) for name in names]
        self._engine.abort_request(names)
        for name, wanted in zip(names, begun, strict=True):
            self.add(int(name), **wanted)

    def take_finished(self) -> list[tuple[int, dict[str, Any]]]:
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, numbers: Sequence[int]) -> None:
        names = [str(number) for number in numbers if str(number) in self._open]
        self._engine.abort_request(names)
        for name in names:
            del self._open[name]

    def cancel_all(self) -> list[int]:
        """Give up everything after a step that failed; returns the samples that have no answer."""
        failed = [int(name) for name in self._open]
        with suppress(Exception):  # of every kind: the engine that has failed may not take it either
            self._engine.abort_request(list(self._open))
        self._open.clear()
        return failed


def completed(sample: Any, candidates: int, now: int) -> dict[str, Any]:
    """One sample as it travels: arrays as bytes; NaN for a logprob that is missing, or whose candidates are not known.

    `spans`: policy version and number of tokens, in order. `now`: the version of an answer without a token.
    """
    tokens_T = np.asarray(sample.token_ids, np.int32)
    answer: dict[str, Any] = {
        "tokens": tokens_T.tobytes(),
        "finish": sample.finish_reason or "abort",
        "spans": [(int(one.version), one.end - one.start) for one in sample.weight_versions or ()] or [(now, 0)],
    }
    if candidates:
        ids_K, counts_T, logprobs_T = drawn_among(sample.logprobs, tokens_T, candidates)
        answer |= {"kept_ids": ids_K.tobytes(), "kept_counts": counts_T.tobytes()}
    else:
        logprobs_T = _logprobs(sample)
    return answer | {"logprobs": logprobs_T.tobytes()}


def _logprobs(completion: Any) -> np.ndarray:
    flat, token_ids = completion.logprobs, completion.token_ids
    if flat is None:
        return np.full(len(token_ids), np.nan, np.float32)
    if flat.token_ids == list(token_ids):
        return np.asarray(flat.logprobs, np.float32)
    return np.asarray([sampled(flat[i], token) for i, token in enumerate(token_ids)], np.float32)


def sampled(position: dict[int, Any] | None, token: int) -> float:
    entry = position.get(token) if position else None
    return float("nan") if entry is None else entry.logprob


def drawn_among(flat: Any, tokens_T: np.ndarray, candidates: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each token was drawn among, token after token; how many that are of each; and its logprob.

    Rows of `flat` are the sampled token, then the candidates, it among them. A position that is not known has itself
    alone, and no logprob.
    """
    ids_TN = np.array(flat.token_ids, np.int32).reshape(len(tokens_T), candidates + 1)
    logprobs_TN = np.asarray(flat.logprobs, np.float32).reshape(ids_TN.shape)
    logprobs_T, ids_TN, kept_TN = logprobs_TN[:, 0], ids_TN[:, 1:], np.isfinite(logprobs_TN[:, 1:])
    drawn_T = (kept_TN & (ids_TN == tokens_T[:, None])).any(axis=1)
    unknown_T = ~drawn_T | (kept_TN.sum(axis=1) >= candidates)
    ids_TN[unknown_T, 0] = tokens_T[unknown_T]
    kept_TN[unknown_T] = np.arange(kept_TN.shape[1]) == 0
    counts_T = kept_TN.sum(axis=1, dtype=np.int32)
    return ids_TN[kept_TN], counts_T, np.where(unknown_T, np.float32("nan"), logprobs_T)
