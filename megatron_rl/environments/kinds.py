"""Kinds of sampled tokens: text, thinking, or a tool call, by the markers that a model writes
around them.

A marker that is one token is looked for among the ids, any other in the text, which is decoded
once. What stands inside a part belongs to it, its markers too; a part that nothing closes goes on
to the end of the answer. The rest is text.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.sampler.client.interface import Completion
from megatron_rl.types import CALL, TEXT, THINKING

# what opens a part, and what closes it; "": nothing
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
TAGS = ("<tool_call>", "</tool_call>")
CALLS: dict[str, tuple[tuple[str, str], ...]] = {  # by vLLM's parser
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
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from the first bytes of a character


class TokenKinds:
    """Tells the tokens of an answer apart, for one model and one parser of tool calls."""

    def __init__(self, tokenizer: FolderTokenizer, parser: str | None) -> None:
        self._decode = tokenizer.decode_all
        template = tokenizer.template()
        pairs = dict.fromkeys(THOUGHTS, THINKING) | dict.fromkeys(CALLS.get(parser or "", ()), CALL)
        ids = {marker: tokenizer.encode(marker) for pair in pairs for marker in pair if marker}
        self._single = {found[0]: marker for marker, found in ids.items() if len(found) == 1}
        spelled = ids.keys() - self._single.values()
        # spelled thinking that the template does not know is no part of the family's format
        known = [
            pair
            for pair in pairs
            if pairs[pair] == CALL or not spelled & {*pair} or pair[1] in template
        ]
        self._opens = {opening: (pairs[opening, closing], closing) for opening, closing in known}
        wanted = sorted(spelled & {marker for pair in known for marker in pair})
        self._spelled = re.compile("|".join(map(re.escape, wanted))) if wanted else None

    def of(self, request: str, sampled: Completion) -> array[int]:
        """The kind of each sampled token; the request's text may end with what opens a part."""
        kinds = array("b", bytes(len(sampled.token_ids)))
        start = 0
        before = request.rstrip()
        inside = next(
            (part for opening, part in self._opens.items() if before.endswith(opening)), None
        )
        for begin, end, marker in [
            *sorted(self._markers(sampled.token_ids)),
            (0, len(kinds), None),
        ]:
            if inside is None:
                inside = self._opens.get(marker or "")
                start = begin
            elif marker in (inside[1], None):
                kinds[start:end] = array("b", [inside[0]]) * (end - start)
                inside = None
        # calls that nothing marks
        if sampled.calls and not (sampled.content or "").strip() and CALL not in kinds:
            return array("b", [CALL if kind == TEXT else kind for kind in kinds])
        return kinds

    def _markers(self, ids: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        """First token, the one behind the last, and what is written there."""
        yield from (
            (place, place + 1, self._single[token])
            for place, token in enumerate(ids)
            if token in self._single
        )
        if self._spelled is None:
            return

        def length(tokens: int) -> int:
            """Characters that so many tokens complete."""
            return len(self._decode(ids[:tokens]).rstrip(UNFINISHED))

        ends = range(len(ids) + 1)
        for found in self._spelled.finditer(self._decode(ids)):
            begin = bisect_right(ends, found.start(), key=length) - 1
            end = bisect_left(ends, found.end(), key=length)
            yield begin, end, found[0]
