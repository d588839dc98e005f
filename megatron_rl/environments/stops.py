"""Stops of a request: where an answer ends before the policy has ended it, by text that the agent
has named.

The engine samples on, as it sees tokens alone; an answer is cut when it is complete. It keeps the
tokens up to the one that completes the first stop: those are what has ended it, and what vLLM's own
server would have sampled. What comes behind has had no effect and is no part of the row. The text
ends where the stop begins.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_rl.sampler.client.interface import Completion
from megatron_rl.types import CALL


def ended(
    completion: Completion,
    stops: Sequence[str],
    *,
    ids: Sequence[int],
    kinds: Sequence[int],
    prompt: int,
    decode: Callable[[Sequence[int]], str],
) -> tuple[Completion, str | None]:
    """The answer as it ends at the first of these stops, and which one that is; as it is where it
    holds none.

    `ids`: its tokens, less the stop tokens at their end. An answer whose tool calls are cut is text
    alone.
    """
    whole = decode(ids)
    found = [one for one in stops if one in whole]
    if not found:
        return completion, None

    def has_one(count: int) -> bool:
        text = decode(ids[:count])
        return any(one in text for one in found)

    count = bisect_left(range(len(ids)), True, key=has_one)
    text = decode(ids[:count])
    # the one that is complete first, as vLLM has it
    stop = min((one for one in found if one in text), key=lambda one: text.index(one) + len(one))
    cut = completion.first(count, prompt)
    if completion.calls and CALL not in kinds[count:]:
        return replace(cut, content=(completion.content or "").partition(stop)[0]), stop
    return replace(cut, content=text.partition(stop)[0], calls=()), stop
