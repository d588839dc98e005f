"""Prompts that vLLM is answering, and their answers as columns, not objects, on their way to whoever asked.

Between two of vLLM's steps the process can be asked for other things. What finishes in a step goes to whoever asked in
one message: whole groups, all samples of a prompt.

Which tokens top_k and top_p left to draw from is told from logprobs that were taken after them: what they cut is -inf.
An engine keeps what ties with the last of the k, so that a few more candidates than k are asked for. Where all of those
are finite there may be more, and the position is as good as unknown.

T tokens of an answer, N candidates of a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rl.types import SamplingParams

Finished = dict[int, dict[int, list[Any]]]  # by request, by place among its prompts: the samples


class OpenPrompts:
    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._open: dict[str, tuple[int, int]] = {}  # by vLLM's name: the request, and the place among its prompts
        self._copies: dict[int, tuple[int, int]] = {}  # by request: of a sample that is drawn once; and candidates
        self._finished: Finished = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: int, prompts: list[list[int]], seeds: list[int], **wanted: Any) -> None:
        """Queue prompts in vLLM as `LLM.generate` does. `wanted`: the fields of this project's SamplingParams."""
        from vllm import SamplingParams as VllmParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(**wanted)
        candidates = min(asked.candidates, self._engine.model_config.get_vocab_size())
        distinct = 1 if asked.temperature == 0 else asked.samples  # greedy samples are copies of one
        self._copies[request] = asked.samples // distinct, candidates
        try:
            for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                params = VllmParams(
                    n=distinct,
                    seed=seed,
                    max_tokens=asked.max_tokens,
                    temperature=asked.temperature,
                    top_p=asked.top_p,
                    top_k=asked.top_k,
                    stop_token_ids=list(asked.stop_token_ids),
                    logprobs=candidates,  # beside the sampled token's
                    flat_logprobs=True,
                    detokenize=False,
                    skip_clone=True,  # nobody else changes them
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                name = f"{request}/{place}"
                self._engine.add_request(name, tokens_input(prompt), params)
                self._open[name] = request, place
        except Exception:
            self.abandon([request])
            raise

    def step(self) -> None:
        for output in self._engine.step():
            if output.finished and output.request_id in self._open:
                request, place = self._open.pop(output.request_id)
                self._finished.setdefault(request, {})[place] = output.outputs

    def settle(self) -> None:
        """End the steps that a scheduler which works ahead has begun: what they draw is of the present weights."""
        core = self._engine.engine_core.engine_core
        if not self._open or not core.batch_queue:
            return
        self._engine.sleep(level=0, mode="keep")  # nothing new is scheduled
        while core.batch_queue:
            self.step()
        self._engine.wake_up(tags=["scheduling"])

    def take_finished(self) -> list[tuple[int, dict[str, Any]]]:
        """What nobody has taken yet of each request, packed; `left`: how many of its prompts are open."""
        finished, self._finished = self._finished, {}
        return [(request, self._packed(request, places)) for request, places in finished.items()]

    def _packed(self, request: int, places: dict[int, list[Any]]) -> dict[str, Any]:
        copies, candidates = self._copies[request]
        completions = [one for samples in places.values() for one in samples for _ in range(copies)]
        left = sum(1 for of, _ in self._open.values() if of == request)
        if not left:
            del self._copies[request]
        now = int(self._engine.get_weight_version())
        return {"places": list(places), "left": left, **pack(completions, candidates), **versions(completions, now)}

    def abandon(self, requests: list[int]) -> None:
        self._engine.abort_request([name for name, (request, _) in self._open.items() if request in requests])
        self._open = {name: about for name, about in self._open.items() if about[0] not in requests}
        for request in requests:
            self._copies.pop(request, None)
            self._finished.pop(request, None)

    def abandon_all(self) -> list[int]:
        """Give up everything after a step that failed; returns the requests that have no answer."""
        failed = list(self._copies)
        with suppress(Exception):  # of every kind: the engine that has failed may not take it either
            self._engine.abort_request(list(self._open))
        self._open, self._copies, self._finished = {}, {}, {}
        return failed


def pack(completions: list[Any], candidates: int = 0) -> dict[str, Any]:
    """Columns instead of objects: lengths, then all tokens and logprobs back to back; NaN where there is none.

    `candidates`: with the tokens that each was drawn among; a logprob counts as missing where those are not known.
    """
    tokens = [np.asarray(completion.token_ids, np.int32) for completion in completions]
    columns: dict[str, Any] = {
        "lengths": [len(tokens_T) for tokens_T in tokens],
        "tokens": b"".join(tokens_T.tobytes() for tokens_T in tokens),
        "finish": [completion.finish_reason or "abort" for completion in completions],
    }
    if candidates:
        found = [_kept(one.logprobs, tokens_T, candidates) for one, tokens_T in zip(completions, tokens, strict=True)]
        logprobs = [logprobs_T for _, logprobs_T in found]
        columns["kept_ids"] = [kept.ids.tobytes() for kept, _ in found]
        columns["kept_counts"] = [kept.counts.tobytes() for kept, _ in found]
    else:
        logprobs = [_logprobs(completion) for completion in completions]
    return columns | {"logprobs": b"".join(logprobs_T.tobytes() for logprobs_T in logprobs)}


def _logprobs(completion: Any) -> np.ndarray:
    flat, token_ids = completion.logprobs, completion.token_ids
    if flat is None:
        return np.full(len(token_ids), np.nan, np.float32)
    if flat.token_ids == list(token_ids):
        return np.asarray(flat.logprobs, np.float32)
    return np.asarray([sampled(flat[i], token) for i, token in enumerate(token_ids)], np.float32)


def _kept(flat: Any, tokens_T: np.ndarray, candidates: int) -> tuple[Kept, np.ndarray]:
    ids_TN = np.asarray(flat.token_ids, np.int32).reshape(len(tokens_T), candidates + 1)
    logprobs_TN = np.asarray(flat.logprobs, np.float32).reshape(ids_TN.shape)
    kept = of_rows(tokens_T, ids_TN, logprobs_TN, candidates)
    return kept, np.where(kept.unknown_T, np.float32("nan"), logprobs_TN[:, 0])


def sampled(position: dict[int, Any] | None, token: int) -> float:
    entry = position.get(token) if position else None
    return float("nan") if entry is None else entry.logprob


def versions(completions: Sequence[Any], now: int) -> dict[str, Any]:
    """Policy version of the first token of each; `spans`: version and tokens, in order, of those with more than one.

    `now`: the version of an answer without a token.
    """
    told = [[(int(span.version), span.end - span.start) for span in one.weight_versions or ()] for one in completions]
    return {
        "versions": [spans[0][0] if spans else now for spans in told],
        "spans": {row: spans for row, spans in enumerate(told) if len(spans) > 1},
    }


@dataclass(frozen=True)
class Kept:
    """What each token of one answer was drawn among."""

    ids: array[int]  # token after token
    counts: array[int]  # of each token; one that is not known has itself alone
    unknown_T: np.ndarray


def of_rows(tokens_T: np.ndarray, ids_TN: np.ndarray, logprobs_TN: np.ndarray, candidates: int) -> Kept:
    """Rows as an embedded engine has them: the sampled token, then the candidates, it among them."""
    return _checked(tokens_T, ids_TN[:, 1:], np.isfinite(logprobs_TN[:, 1:]), candidates)


def of_lists(
    tokens: Sequence[int], found: Iterable[Sequence[tuple[int, float]]], missing: float, candidates: int
) -> Kept:
    """Candidates as a server has them, each once; `missing` stands for -inf."""
    rows = list(found)
    width = max([1, *map(len, rows)])
    ids_TN, kept_TN = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for at, row in enumerate(rows):
        ids_TN[at, : len(row)] = [token for token, _ in row]
        kept_TN[at, : len(row)] = [logprob > missing for _, logprob in row]
    return _checked(np.asarray(tokens, np.int32), ids_TN, kept_TN, candidates)


def _checked(tokens_T: np.ndarray, ids_TN: np.ndarray, kept_TN: np.ndarray, candidates: int) -> Kept:
    drawn_T = (kept_TN & (ids_TN == tokens_T[:, None])).any(axis=1)
    unknown_T = ~drawn_T | (kept_TN.sum(axis=1) >= candidates)
    ids_TN, kept_TN = ids_TN.copy(), kept_TN.copy()
    ids_TN[unknown_T, 0] = tokens_T[unknown_T]
    kept_TN[unknown_T] = np.arange(kept_TN.shape[1]) == 0
    counts_T = kept_TN.sum(axis=1)
    ids_K = ids_TN[kept_TN].astype(np.int32)
    return Kept(array("i", ids_K.tobytes()), array("i", counts_T.astype(np.int32).tobytes()), unknown_T)
