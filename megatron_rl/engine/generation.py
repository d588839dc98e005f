"""Open samples of one vLLM engine, for engine.py: add, step, cancel, requeue after an update;
finished ones with their experts and tool calls. The loop itself is in service.py.

S tokens of a response's sequence, L layers, K experts.
"""

import math
import traceback
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, cast

import numpy as np

from megatron_rl.engine.candidates import CandidateRequest, Candidates
from megatron_rl.engine.readiness import Readiness
from megatron_rl.engine.tool_calls import ToolCallParser
from megatron_rl.files import JsonObject
from megatron_rl.logs import logger
from megatron_rl.types import Completion, FinishReason

# fields of a request that vLLM does not read
OWN = frozenset({"candidates", "top_logprobs", "top_mass", "tools"})
Replies = list[tuple[int, Any]]  # (sample number, exception or completion)


class Sample:
    """Open sample: its request, and the tokens generated so far."""

    def __init__(self, number: int, request: CandidateRequest, wanted: JsonObject) -> None:
        self.number = number
        self.wanted = wanted
        self._candidates = Candidates(request) if request.count else None
        self.tools = wanted.get("tools")
        self._tokens = array("i")
        self._logprobs = array("f")
        self._versions = array("i")
        self._experts: list[np.ndarray] = []  # [S, L, K], as reported by an engine on GPUs

    def take(self, output: Any, version: int) -> None:
        """Add the tokens of a step from an output of vLLM's core."""
        new = output.new_token_ids
        new_logprobs = output.new_logprobs
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)
        if not new:
            return
        self._versions.extend([version] * len(new))
        self._tokens.extend(new)
        if self._candidates is not None:
            self._candidates.add(new, new_logprobs)
        elif new_logprobs is None:
            self._logprobs.extend([math.nan] * len(new))
        else:
            drawn = zip(
                new_logprobs.logprob_token_ids[:, 0].tolist(),
                new_logprobs.logprobs[:, 0].tolist(),
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
        """Return the number of tokens that the model has processed: all but the last, which has no
        successor.
        """
        return len(self.wanted["tokens"]) + max(0, len(self._tokens) - 1)

    def expert_choices(self) -> np.ndarray | None:
        if self._experts:
            return np.concatenate(self._experts)[: self.processed]
        return None

    def completed(self, finish: str, now: int, **more: Any) -> Completion:
        """Return the completion. A logprob is NaN if it is missing, or if its candidates are
        unknown. `now`: the version of a response without a token.
        """
        columns: JsonObject = {"logprobs": self._logprobs}
        if self._candidates is not None:
            columns = self._candidates.columns()
        return Completion(
            token_ids=self._tokens,
            finish_reason=cast(FinishReason, finish),
            policy_version=self._versions[0] if self._versions else now,
            versions=self._versions if len(set(self._versions)) > 1 else None,
            **columns,
            **more,
        )


class OpenSamples:
    """Samples in progress, each a vLLM request under its caller's number, and patient requests that
    wait.

    Calls vLLM's core directly: vLLM's output processing would cost a tenth of a small model's step.
    """

    def __init__(
        self,
        llm: Any,
        ready: Readiness,
        kept: Callable[[list[tuple[str, int]]], list[np.ndarray | None]] | None,
    ) -> None:
        """`kept`: reads the experts of requests' first tokens; None if they are not recorded."""
        self.ready = ready
        self.draining = False  # no new samples are started
        self.paused = False  # open samples are paused until `resume`
        self._held: dict[int, tuple[int | None, JsonObject]] = {}  # patient requests
        self._engine = llm.llm_engine
        self._core = llm.llm_engine.engine_core
        self._open: dict[str, Sample] = {}  # by the core's name, which is never reused
        self._names: dict[int, str] = {}  # by number
        self._asked = 0
        self._finished: list[tuple[int, Completion]] = []
        self._calls = ToolCallParser(llm.llm_engine.model_config.model)
        # the last request's parameters, and vLLM's request for them
        self._last: tuple[Any, Any] | None = None
        self.written = 0  # steps so far
        self.prefilled = 0  # prompt tokens, without those of cached prefixes
        self._kept = kept
        # policy version of cached prefixes; samples of other versions do not use them
        self.salt = ""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def waiting(self) -> bool:
        """True if samples are open or waiting."""
        return bool(self._open or self._held)

    @property
    def writes(self) -> bool:
        """True if a step would generate tokens: samples are open, and the weights are of one policy
        version.
        """
        return bool(self._open) and not self.paused and self.ready.refusal() is None

    def begin(
        self, number: int, policy_version: int | None = None, patient: bool = False, **wanted: Any
    ) -> None:
        """Start a sample under this number; see messages.Generate."""
        refusal = self.ready.refusal(policy_version, or_newer=patient)
        if refusal and not patient:
            raise RuntimeError(refusal)
        if refusal or self.draining:
            logger("engine").info(
                f"sample {number} waits: {refusal or 'modules are to be watched'}"
            )
            self._held[number] = policy_version, wanted
        else:
            self._add(number, **wanted)

    def step(self) -> Replies:
        """Generate a token of each sample; return finished ones, and errors, by number."""
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

        Consecutive samples of one prompt share a copy of its processed request, as vLLM does for
        `n` > 1.
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
        self._open[name] = Sample(number, self._requested(**wanted), wanted)
        self._names[number] = name

    def _processed(self, tokens: list[int], **wanted: Any) -> Any:
        """Return vLLM's request for a sample of this prompt."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        # logprobs besides the sampled token's
        logprobs = self._requested(**wanted).count
        given = {name: value for name, value in wanted.items() if name not in OWN}
        params = SamplingParams(**given, seed=0, logprobs=logprobs, detokenize=False)
        prompt: Any = tokens_input(tokens, cache_salt=self.salt)
        supported = self._engine.get_supported_tasks()
        return self._engine.input_processor.process_inputs(
            "sample", prompt, params, supported_tasks=supported
        )

    def _requested(
        self, candidates: int = 0, top_logprobs: int = 0, top_mass: float = 1.0, **_: Any
    ) -> CandidateRequest:
        vocabulary = self._engine.model_config.get_vocab_size()
        return CandidateRequest(
            min(candidates, vocabulary), min(top_logprobs, vocabulary), top_mass
        )

    def write(self) -> None:
        """Run a step of vLLM's core."""
        self.written += 1
        outputs = self._core.get_output()
        if outputs.weight_version is None:  # an asynchronous scheduler has only started a step
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
        """Read the experts of samples that have just finished, before their slots are
        overwritten.
        """
        if self._kept is not None and done:
            return self._kept([(one.request_id, sample.processed) for one, sample in done])
        return [sample.expert_choices() for _, sample in done]

    def _tool_calls(self, sample: Sample) -> JsonObject:
        if not sample.tools:
            return {}
        return self._calls.parsed(
            sample.token_ids, sample.wanted.get("stop_token_ids", []), **sample.tools
        )

    def settle(self) -> None:
        """Finish the steps that an asynchronous scheduler has started: their tokens are of the
        current policy version.
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
        """Cancel everything after a failed step; return the samples without a response."""
        failed = list(self._names)
        # any exception: the failed engine may not accept it either
        with suppress(Exception):
            self.cancel(failed)
        return failed
