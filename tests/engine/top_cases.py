"""Cases of engine_cases: the top logprobs of answers against all logprobs of the same engine."""

from typing import Any

import numpy as np
from in_flight_cases import BEFORE, TOKENS, finish, write
from live_engine import EngineCase, begin

from megatron_rl.engine.engine import Engine
from megatron_rl.types import Completion

MOST = 8
MASS = 0.3
REQUESTS: dict[str, dict[str, Any]] = {
    "all": {},
    "top_k and top_p": {"top_k": 12, "top_p": 0.9, "candidates": 28},
    "temperature": {"temperature": 0.6},
}


class Spied:
    """Logprobs of the whole vocabulary, as the engine's core returns them: by request, [T, V]."""

    def __init__(self, engine: Engine) -> None:
        self.rows: dict[str, list[np.ndarray]] = {}
        self._core = engine.samples._core
        self._get_output = self._core.get_output
        self._core.get_output = self._read

    def _read(self) -> Any:
        outputs = self._get_output()
        for one in outputs.outputs:
            if one.new_logprobs is None:
                continue
            ids = one.new_logprobs.logprob_token_ids[0, 1:]
            row = np.full(len(ids), -np.inf)
            row[ids] = one.new_logprobs.logprobs[0, 1:]
            self.rows.setdefault(one.request_id, []).append(row)
        return outputs

    def end(self) -> list[np.ndarray]:
        self._core.get_output = self._get_output
        return [
            np.stack(rows) for _, rows in sorted(self.rows.items(), key=lambda one: int(one[0]))
        ]


def answers(
    case: EngineCase, engine: Engine, update: dict[str, Any] | None, **request: Any
) -> list[Completion]:
    """In the order of requests; with new weights between two tokens, if there are any."""
    numbers = begin(engine, TOKENS, **request)
    found: dict[int, Any] = {}
    for step in range(4 * TOKENS):
        if step == BEFORE and update is not None:
            engine.start_weight_update()
            engine.update_weights(write(case, update))
            finish(engine)
        found |= dict(engine.samples.step())
    return [found[number] for number in numbers]


def compared(all_TV: np.ndarray, one: Completion) -> dict[str, Any]:
    """A response's top tokens against all logprobs of its tokens."""
    counts_T = np.asarray(one.top_counts)
    ends = counts_T.cumsum()[:-1]
    sets = zip(
        np.split(np.asarray(one.top_ids), ends), np.split(one.top_logprobs, ends), strict=True
    )
    wanted = []
    right = len(counts_T) == len(all_TV) == len(one.token_ids)
    for row, (ids, logprobs) in zip(all_TV, sets, strict=True):
        ordered = np.sort(row)[::-1][:MOST]
        enough = np.exp(ordered).cumsum() >= MASS
        count = int(enough.argmax()) + 1 if enough.any() else MOST
        count = min(count, int(np.isfinite(ordered).sum()))
        wanted.append(count)
        # tied tokens may come in any order
        right &= len(ids) == count and len(set(ids.tolist())) == count
        right &= np.array_equal(logprobs, ordered[:count].astype(np.float16))
        right &= np.array_equal(logprobs, row[ids].astype(np.float16))
    own = all_TV[range(len(all_TV)), one.token_ids]
    kept = iter(one.kept_ids or ())
    supports = [{next(kept) for _ in range(count)} for count in one.kept_counts or ()]
    return {
        "right": bool(right),
        "logprobs": bool(np.array_equal(own.astype(np.float32), np.asarray(one.logprobs))),
        "sums": float(np.abs(np.exp(all_TV).sum(1) - 1).max()),
        "counts": wanted,
        "outside": sum(
            not set(ids.tolist()) <= support
            for ids, support in zip(np.split(np.asarray(one.top_ids), ends), supports, strict=False)
        ),
        "supports": [len(one) for one in supports],
        "versions": len(one.all_versions),
    }


def run_top(case: EngineCase) -> dict[str, Any]:
    vocabulary = case.hf["vocab_size"]
    engine = case.start("live", max_logprobs=vocabulary)
    found: dict[str, Any] = {}
    named = {**REQUESTS, "updated": {}}
    for name, request in named.items():
        second = case.tensors(2) if name == "updated" else None
        case.update(engine, case.tensors(1))
        spied = Spied(engine)
        whole = answers(case, engine, second, **request, top_logprobs=vocabulary)
        rows = spied.end()
        case.update(engine, case.tensors(1))
        top = answers(case, engine, second, **request, top_logprobs=MOST, top_mass=MASS)
        found[name] = {
            "same": [one.token_ids for one in top] == [one.token_ids for one in whole],
            "answers": [compared(*pair) for pair in zip(rows, top, strict=True)],
        }
    engine.shutdown()
    return found
