"""Prompts that vLLM is answering; between two of its steps the process can be asked for other things.

What finishes in a step goes to whoever asked in one message: whole groups, all samples of a prompt.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from megatron_rl.engine.packed import pack, versions

Finished = dict[int, dict[int, list[Any]]]  # by request, by place among its prompts: the samples


class Answering:
    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._open: dict[str, tuple[int, int]] = {}  # by vLLM's name: the request, and the place among its prompts
        self._copies: dict[int, tuple[int, int]] = {}  # by request: of a sample that is drawn once; and candidates
        self._finished: Finished = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self,
        request: int,
        prompts: list[list[int]],
        seeds: list[int],
        samples: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop_token_ids: list[int],
        candidates: int = 0,
    ) -> None:
        """As `LLM.generate` does. `candidates`: see `SamplingParams`."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        candidates = min(candidates, self._engine.model_config.get_vocab_size())
        distinct = 1 if temperature == 0 else samples  # greedy samples are copies of one
        self._copies[request] = samples // distinct, candidates
        try:
            for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                params = SamplingParams(
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
        """Ends the steps that a scheduler which works ahead has begun: what they draw is of the present weights."""
        core = self._engine.engine_core.engine_core
        if not self._open or not core.batch_queue:
            return
        self._engine.sleep(level=0, mode="keep")  # nothing new is scheduled
        while core.batch_queue:
            self.step()
        self._engine.wake_up(tags=["scheduling"])

    def take_finished(self) -> list[tuple[int, dict[str, Any]]]:
        """Of each request what nobody has taken yet, packed; `left`: how many of its prompts are open."""
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
        """After a step that failed: which requests have no answer."""
        failed = list(self._copies)
        with suppress(Exception):  # of every kind: the engine that has failed may not take it either
            self._engine.abort_request(list(self._open))
        self._open, self._copies, self._finished = {}, {}, {}
        return failed
