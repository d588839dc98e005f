"""Kinds of sampled tokens: text, thinking, or a tool call, by the markers that a model writes around them.

A marker that is one token is looked for among the ids, any other in the text, which is decoded once. What stands inside
a part belongs to it, its markers too; a part that nothing closes goes on to the end of the answer. The rest is text.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Protocol

from megatron_rl.sampler.engine import Completion
from megatron_rl.types import CALL, TEXT, THINKING

Pair = tuple[str, str]  # what opens a part, and what closes it; "": nothing
THOUGHTS: tuple[Pair, ...] = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)  # fmt: skip
TAGS: Pair = ("<tool_call>", "</tool_call>")
CALLS: dict[str, tuple[Pair, ...]] = {  # by vLLM's parser
    **dict.fromkeys(("hermes", "ernie45", "glm45", "glm47", "granite4", "qwen3_json"), (TAGS,)),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), (TAGS, ("<function=", "</function>"))),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),)),
    "mistral": (("[TOOL_CALLS]", ""),),
    "llama3_json": (("<|python_tag|>", ""),),
    "phi4_mini_json": (("functools[", ""), ("<|tool_call|>", "<|/tool_call|>")),
    "kimi_k2": (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    "minimax_m2": (("<minimax:tool_call>", "</minimax:tool_call>"),),
    "seed_oss": (("<seed:tool_call>", "</seed:tool_call>"),),
}
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from the first bytes of a character


class Tokens(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, prompt: str) -> list[int]: ...

    def decode_all(self, token_ids: Sequence[int]) -> str: ...

    def template(self) -> str: ...


class TokenKinds:
    """Tells the tokens of an answer apart, for one model and one parser of tool calls."""

    def __init__(self, tokenizer: Tokens, parser: str | None) -> None:
        self._decode, template = tokenizer.decode_all, tokenizer.template()
        calls = CALLS.get(parser or "", ())
        named = {marker for pair in (*THOUGHTS, *calls) for marker in pair if marker}
        ids = {marker: tokenizer.encode(marker) for marker in named}
        self._single = {found[0]: marker for marker, found in ids.items() if len(found) == 1}
        spelled = named - set(self._single.values())
        # thinking that the template does not know is no part of the family's format
        thoughts = [pair for pair in THOUGHTS if not spelled & set(pair) or pair[1] in template]
        self._opens = {opening: (THINKING, closing) for opening, closing in thoughts}
        self._opens |= {opening: (CALL, closing) for opening, closing in calls}
        wanted = spelled & {marker for opening, (_, closing) in self._opens.items() for marker in (opening, closing)}
        self._spelled = re.compile("|".join(map(re.escape, sorted(wanted)))) if wanted else None

    def of(self, request: str, sampled: Completion) -> array[int]:
        """The kind of each sampled token; the request's text may end with what opens a part."""
        kinds = array("b", bytes(len(sampled.token_ids)))
        before = request.rstrip()
        inside = next((part for opening, part in self._opens.items() if before.endswith(opening)), None)
        start = 0
        for begin, end, marker in sorted(self._markers(sampled.token_ids)):
            if inside is None:
                inside, start = self._opens.get(marker), begin
            elif marker == inside[1]:
                _fill(kinds, start, end, inside[0])
                inside = None
        if inside is not None:
            _fill(kinds, start, len(kinds), inside[0])
        if sampled.calls and not (sampled.content or "").strip() and CALL not in kinds:  # calls that nothing marks
            return array("b", [CALL if kind == TEXT else kind for kind in kinds])
        return kinds

    def _markers(self, ids: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        """First token, the one behind the last, and what is written there."""
        for place, token in enumerate(ids):
            if token in self._single:
                yield place, place + 1, self._single[token]
        if self._spelled is None:
            return

        def length(tokens: int) -> int:
            """Characters that so many tokens complete."""
            return len(self._decode(ids[:tokens]).rstrip(UNFINISHED))

        ends = range(len(ids) + 1)
        for found in self._spelled.finditer(self._decode(ids)):
            begin, end = bisect_right(ends, found.start(), key=length) - 1, bisect_left(ends, found.end(), key=length)
            yield begin, end, found[0]


def _fill(kinds: array[int], start: int, end: int, kind: int) -> None:
    kinds[start:end] = array("b", [kind]) * (end - start)
