"""Stop texts of a request: ends a response at the first stop that the agent names.

The engine generates past it, as it sees tokens only; a response is cut when it is complete. It
keeps the tokens up to the one that completes the first stop: vLLM's own server would have sampled
the same. Later tokens had no effect and are excluded from the row. The text ends where the stop
begins.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_rl.types import Completion

TAGS = ("<tool_call>", "</tool_call>")
# opening and closing of a tool call, by vLLM's parser; "": the end of the response
CALLS: dict[str | None, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(("hermes", "ernie45", "glm45", "glm47", "granite4", "qwen3_json"), (TAGS,)),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), (TAGS, ("<function=", "</function>"))),
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v31"), (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),)
    ),
    "mistral": (("[TOOL_CALLS]", ""),),
    "llama3_json": (("<|python_tag|>", ""),),
    "phi4_mini_json": (("functools[", ""), ("<|tool_call|>", "<|/tool_call|>")),
    "kimi_k2": (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    "minimax_m2": (("<minimax:tool_call>", "</minimax:tool_call>"),),
    "seed_oss": (("<seed:tool_call>", "</seed:tool_call>"),),
}


def ended(
    completion: Completion,
    stops: Sequence[str],
    *,
    ids: Sequence[int],
    prompt: int,
    decode: Callable[[Sequence[int]], str],
    parser: str | None,
) -> tuple[Completion, str | None]:
    """Return the response up to the first of these stops, and that stop; unchanged if it contains
    none.

    `ids`: its tokens without final stop tokens. A response whose tool calls are cut is text only.
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
    # the stop that is complete first, as in vLLM
    stop = min((one for one in found if one in text), key=lambda one: text.index(one) + len(one))
    cut = completion.first(count, prompt)
    if completion.calls and not _holds_call(decode(ids[count:]), parser):
        return replace(cut, content=(completion.content or "").partition(stop)[0]), stop
    return replace(cut, content=text.partition(stop)[0], calls=()), stop


def _holds_call(rest: str, parser: str | None) -> bool:
    """Return True if text after a stop may contain a tool call, or the end of one."""
    marks = [mark for pair in CALLS.get(parser, (("", ""),)) for mark in pair]
    return any(mark in rest if mark else rest.strip() for mark in marks)
