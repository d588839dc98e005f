"""Open samples of one vLLM engine, for engine.py: added, stepped, cancelled, queued anew after
an update if not begun; finished ones with their experts and tool calls. The loop
itself is in service.py.

Which tokens top_k and top_p left to draw from is told from logprobs that were taken after them:
what they cut is -inf. An engine keeps what ties with the last of the k, so that a few more
candidates than k are asked for. Where all of those are finite there may be more, and the position
is as good as unknown.

T tokens of an answer, N candidates of a token, K of them kept; S tokens of an answer's sequence, L
layers, K experts.
"""

import math
import traceback
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, cast

import numpy as np

from megatron_rl.engine.readiness import Readiness
from megatron_rl.engine.tool_calls import ToolCallParser
from megatron_rl.types import Completion, FinishReason

Replies = list[tuple[int, Any]]  # numbers of samples; an exception, or a completion


class Sample:
    """Open sample: its request, and the tokens that vLLM's core has written."""

    def __init__(self, number: int, candidates: int, wanted: dict[str, Any]) -> None:
        self.number = number
        self.wanted = wanted
        self._candidates = candidates
        self.tools = wanted.get("tools")
        self._tokens = array("i")
        self._logprobs = array("f")
        self._versions = array("i")
        # candidates and their logprobs, the sampled token first
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        self._experts: list[np.ndarray] = []  # [S, L, K], as a device engine tells them

    def take(self, output: Any, version: int) -> None:
        """Add the tokens of a step from an output of vLLM's core."""
        new = output.new_token_ids
        told = output.new_logprobs
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)
        if not new:
            return
        self._versions.extend([version] * len(new))
        self._tokens.extend(new)
        if told is None:
            self._logprobs.extend([math.nan] * len(new))
        elif self._candidates:  # copied: they are parts of the whole batch's arrays
            width = self._candidates + 1
            self._rows.append(
                (told.logprob_token_ids[:, :width].copy(), told.logprobs[:, :width].copy())
            )
        else:
            drawn = zip(
                told.logprob_token_ids[:, 0].tolist(),
                told.logprobs[:, 0].tolist(),
                new,
                strict=True,
            )
            self._logprobs.extend(
                [logprob if named == token else math.nan for named, logprob, token in drawn]
            )

    @property
    def token_ids(self) -> list[int]:
        return self._tokens.tolist()

    @property
    def processed(self) -> int:
        """Tokens that the model has read: all but the last, which nothing follows."""
        return len(self.wanted["tokens"]) + max(0, len(self._tokens) - 1)

    def told_experts(self) -> np.ndarray | None:
        if self._experts:
            return np.concatenate(self._experts)[: self.processed]
        return None

    def completed(self, finish: str, now: int, **more: Any) -> Completion:
        """A logprob is NaN if it is missing, or of unknown candidates. `now`: the version of an
        answer without a token.
        """
        columns: dict[str, Any] = {"logprobs": self._logprobs}
        if self._candidates:
            found = drawn_among(self._rows, np.asarray(self._tokens), self._candidates)
            columns = dict(zip(("kept_ids", "kept_counts", "logprobs"), found, strict=True))
        return Completion(
            token_ids=self._tokens,
            finish_reason=cast(FinishReason, finish),
            policy_version=self._versions[0] if self._versions else now,
            versions=self._versions if len(set(self._versions)) > 1 else None,
            **columns,
            **more,
        )


class OpenSamples:
    """Samples that vLLM works on, each a request of its own under its caller's number, and patient
    requests that wait.

    vLLM's core is asked itself: what vLLM makes of its outputs for users would cost a tenth of a
    small model's step.
    """

    def __init__(
        self,
        llm: Any,
        ready: Readiness,
        kept: Callable[[list[tuple[str, int]]], list[np.ndarray | None]] | None,
    ) -> None:
        """`kept`: the experts of requests' first tokens; None: nobody keeps them."""
        self.ready = ready
        self.draining = False  # nothing new begins, so that nothing is open
        self.stands = False  # open samples wait until they are told to go on
        self._held: dict[int, tuple[int | None, dict[str, Any]]] = {}  # patient requests
        self._engine = llm.llm_engine
        self._core = llm.llm_engine.engine_core
        self._open: dict[str, Sample] = {}  # by the core's name, which is never used twice
        self._names: dict[int, str] = {}  # by number
        self._asked = 0
        self._finished: list[tuple[int, Completion]] = []
        self._calls = ToolCallParser(llm.llm_engine.model_config.model)
        # what was asked for last, and vLLM's request for it
        self._last: tuple[Any, Any] | None = None
        self.written = 0  # steps so far
        self.prefilled = 0  # tokens of prompts; of a prefix that was cached, none
        self._kept = kept
        # of cached prefixes: the policy version whose keys and values they are. Others begin on
        # none of them
        self.salt = ""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> bool:
        """True if some are open, or held."""
        return bool(self._open or self._held)

    @property
    def writes(self) -> bool:
        """True if a step would generate tokens: samples are open, and the weights are of one policy
        version.
        """
        return bool(self._open) and not self.stands and self.ready.refusal() is None

    def begin(
        self, number: int, policy_version: int | None = None, patient: bool = False, **wanted: Any
    ) -> None:
        """Begin a sample under this number; see messages.Generate."""
        refusal = self.ready.refusal(policy_version, or_newer=patient)
        if refusal and not patient:
            raise RuntimeError(refusal)
        if refusal or self.draining:
            print(f"sample {number} waits: {refusal or 'modules are to be watched'}", flush=True)
            self._held[number] = policy_version, wanted
        else:
            self._add(number, **wanted)

    def step(self) -> Replies:
        """Generate a token of each sample; return what has finished, and errors, by number."""
        replies: Replies = []
        for number, (version, wanted) in list(self._held.items()):
            if self.draining or self.ready.refusal(version, or_newer=True):
                continue
            del self._held[number]
            try:
                self._add(number, **wanted)
            except Exception as error:
                traceback.print_exc()
                replies.append((number, error))
        if self.writes:
            try:
                self.write()
            except Exception as error:
                traceback.print_exc()
                return [*replies, *((number, error) for number in self._cancel_all())]
        finished = self._finished
        self._finished = []
        return [*replies, *finished]

    def _add(self, number: int, tokens: list[int], seed: int, **wanted: Any) -> None:
        """Queue a sample in vLLM as `LLM.generate` does; see messages.Generate.

        Samples of one prompt come one after the other: what vLLM makes of the first is copied for
        the others, as it does for samples that are asked for together.
        """
        if wanted.get("tools"):
            self._calls.check(**wanted["tools"])
        like = (tokens, wanted, self.salt)
        if self._last is None or self._last[0] != like:
            self._last = like, self._processed(tokens, **wanted)
        request = copy(self._last[1])
        self._asked += 1
        name = request.request_id = request.external_req_id = str(self._asked)
        request.sampling_params = copy(request.sampling_params)
        request.sampling_params.seed = seed
        self._core.add_request(request)
        wanted = {"tokens": tokens, "seed": seed, **wanted}
        self._open[name] = Sample(number, self._clipped(**wanted), wanted)
        self._names[number] = name

    def _processed(
        self, tokens: list[int], candidates: int = 0, tools: Any = None, **wanted: Any
    ) -> Any:
        """vLLM's request for a sample of this prompt."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        # logprobs: beside the sampled token's
        params = SamplingParams(
            **wanted, seed=0, logprobs=self._clipped(candidates), detokenize=False
        )
        prompt: Any = tokens_input(tokens, cache_salt=self.salt)
        supported = self._engine.get_supported_tasks()
        return self._engine.input_processor.process_inputs(
            "sample", prompt, params, supported_tasks=supported
        )

    def _clipped(self, candidates: int = 0, **_: Any) -> int:
        return min(candidates, self._engine.model_config.get_vocab_size())

    def write(self) -> None:
        """A step of vLLM's core."""
        self.written += 1
        outputs = self._core.get_output()
        if outputs.weight_version is None:  # a scheduler that works ahead has only begun a step
            return
        version = int(outputs.weight_version)
        done = []
        for one in outputs.outputs:
            sample = self._open.get(one.request_id)
            if sample is None:
                continue
            sample.take(one, version)
            if one.prefill_stats is not None:
                self.prefilled += (
                    one.prefill_stats.num_prompt_tokens - one.prefill_stats.num_cached_tokens
                )
            if one.finish_reason is not None:
                del self._open[one.request_id], self._names[sample.number]
                done.append((one, sample))
        for (one, sample), experts_SLK in zip(done, self._experts(done), strict=True):
            more = self._tool_calls(sample)
            completed = sample.completed(
                str(one.finish_reason), version, experts_SLK=experts_SLK, **more
            )
            self._finished.append((sample.number, completed))

    def _experts(self, done: Sequence[tuple[Any, Sample]]) -> list[np.ndarray | None]:
        """Experts of samples that have just finished, before others overwrite their slots."""
        if self._kept is not None and done:
            return self._kept([(one.request_id, sample.processed) for one, sample in done])
        return [sample.told_experts() for _, sample in done]

    def _tool_calls(self, sample: Sample) -> dict[str, Any]:
        if not sample.tools:
            return {}
        return self._calls.parsed(
            sample.token_ids, sample.wanted.get("stop_token_ids", []), **sample.tools
        )

    def settle(self) -> None:
        """End the steps that a scheduler which works ahead has begun: their tokens are of the
        present policy version.
        """
        core = self._core.engine_core
        if not self._open or not core.batch_queue:
            return
        self._engine.sleep(level=0, mode="keep")  # nothing new is scheduled
        while core.batch_queue:
            self.write()
        self._engine.wake_up(tags=["scheduling"])

    def cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._held.pop(number, None)
        names = [self._names.pop(number) for number in numbers if number in self._names]
        for name in names:
            del self._open[name]
        self._core.abort_requests(names)

    def _cancel_all(self) -> list[int]:
        """Give up everything after a step that failed; returns the samples that have no answer."""
        failed = list(self._names)
        # of every kind: the engine that has failed may not take it either
        with suppress(Exception):
            self.cancel(failed)
        return failed


def drawn_among(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], tokens_T: np.ndarray, candidates: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Candidates of each token, token after token; their number for each token; its logprob.

    Rows are ids and logprobs: the sampled token, then the candidates, it among them. A position
    that is not known has itself alone, and no logprob.
    """
    none = np.empty((0, candidates + 1), np.float32)
    ids_TN = np.concatenate(
        [none.astype(np.int32), *(ids for ids, _ in rows)], dtype=np.int32, casting="same_kind"
    )
    logprobs_TN = np.concatenate([none, *(logprobs for _, logprobs in rows)])
    logprobs_T = logprobs_TN[:, 0]
    ids_TN = ids_TN[:, 1:]
    kept_TN = np.isfinite(logprobs_TN[:, 1:])
    drawn_T = (kept_TN & (ids_TN == tokens_T[:, None])).any(axis=1)
    unknown_T = ~drawn_T | (kept_TN.sum(axis=1) >= candidates)
    ids_TN[unknown_T, 0] = tokens_T[unknown_T]
    kept_TN[unknown_T] = np.arange(kept_TN.shape[1]) == 0
    counts_T = kept_TN.sum(axis=1, dtype=np.int32)
    return ids_TN[kept_TN], counts_T, np.where(unknown_T, np.float32("nan"), logprobs_T)
