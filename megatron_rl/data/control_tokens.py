"""Control tokens of a tokenizer, kept apart from text of messages that spells them: such text
forges no turn.

Messages are marked before a chat template renders them, so that the rendered text shows who has
written what. It is encoded by a second tokenizer, which knows the control tokens by other names,
and text that spells one as text.
"""

import json
import re
import secrets
from collections.abc import Container, Iterable, Mapping
from functools import cached_property
from itertools import groupby
from typing import Any

ESCAPE = "\N{SYMBOL FOR ESCAPE}"  # printable: templates that quote a text leave it as it is
MARK = f"{ESCAPE};"  # no control token begins behind it, or holds it
LITERAL = f"{ESCAPE},"  # the character itself
# tokens that are not special may be words, or blanks, which are text
SPELLING = re.compile(r"[^\w\s].*[^\w\s]", re.DOTALL)
# parts of a response, which the policy's own messages hold
PARTS = re.compile("think|call|python_tag", re.IGNORECASE)
# some templates make control tokens of them, such as <|user|>
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation")


class Marked(str):
    """Text in which marks show what spells a control token and is none."""


def marked(text: str) -> str:
    """Return a rendered text, or a part of one, as what it is encoded as."""
    return Marked(text) if ESCAPE in text else text


def plain(text: str) -> str:
    """Return a rendered text without its marks."""
    return text.replace(MARK, "").replace(LITERAL, ESCAPE)


class ControlTokens:
    """The special tokens of a tokenizer, and others that are no words."""

    def __init__(self, backend: Any, stop_token_ids: Container[int]) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        ids = {
            one.content: id
            for id, one in self._added.items()
            if one.special or SPELLING.fullmatch(one.content)
        }
        self._parts = {
            text for text, id in ids.items() if PARTS.search(text) and id not in stop_token_ids
        }
        self._names = {text: secrets.token_hex(16) for text in ids}  # which no message can spell
        self._texts = "\n".join(ids).lower()
        spelled = _any_of(ids)
        begin = _any_of({text[:end] for text in ids for end in range(1, len(text))})
        end = _any_of({text[start:] for text in ids for start in range(1, len(text))})
        self._written = re.compile(f"(?<!{MARK})({spelled})")
        self._spelled = re.compile(spelled, re.IGNORECASE)
        self._in_part = re.compile(rf"{spelled}|(?<!\S)(?={end})|(?={begin}\s*\Z)", re.IGNORECASE)

    def mark(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Mark text in messages that spells a control token, alone or beside the template's."""
        found = []
        for one in messages:
            spared = self._parts if one.get("role") == "assistant" else ()
            found.append(
                {
                    key: self.mark_texts(value, spared, value not in ROLES)
                    for key, value in one.items()
                }
            )
        return found

    def mark_texts(self, value: Any, spared: Container[str] = (), whole: bool = False) -> Any:
        """Mark the texts of a JSON value. `whole`: also a text that is part of a control token."""
        if isinstance(value, Mapping):
            return {self.mark_texts(key): self.mark_texts(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_texts(one) for one in value]
        if not isinstance(value, str):
            return value
        text = _apart(value, self._in_part, spared)
        core = value.strip().lower()
        if whole and core and core in self._texts:
            return re.sub(r"(?=\S)", MARK, text, count=1)
        return text

    def rendered(self, text: str) -> str:
        """Clean a rendered template: keep the marks only where they are needed."""
        if ESCAPE not in text:
            return text
        parts = self._written.split(text)
        parts[::2] = [_apart(plain(one), self._spelled) for one in parts[::2]]
        return marked("".join(parts))

    def encode(self, text: Marked) -> list[int]:
        """Return the token ids of a text."""
        second, ids = self._second
        named = plain(self._written.sub(lambda found: self._names[found[0]], text))
        (encoding,) = second.encode_batch_fast([named], add_special_tokens=False)  # without the GIL
        return [ids.get(one, one) for one in encoding.ids]

    @cached_property
    def _second(self) -> tuple[Any, dict[int, int]]:
        """A tokenizer with other names for control tokens, and the map of its ids to the first."""
        names = {
            json.dumps(one, ensure_ascii=False): json.dumps(name)
            for one, name in self._names.items()
        }
        described = re.sub(
            _any_of(names),
            lambda found: names[found[0]],
            self._backend.to_str(),
        )
        second = type(self._backend).from_str(described)
        ids = {
            second.token_to_id(self._names.get(one.content, one.content)): id
            for id, one in self._added.items()
        }
        return second, ids


def _apart(text: str, pattern: re.Pattern[str], spared: Container[str] = ()) -> str:
    """Return a text with a mark before all that the pattern finds."""
    escaped = text.replace(ESCAPE, LITERAL)
    return pattern.sub(lambda found: found[0] if found[0] in spared else MARK + found[0], escaped)


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern of these texts, the longest first, that looks at no character twice."""
    groups = groupby(sorted(texts, reverse=True), key=lambda text: text[:1])
    parts = [
        re.escape(first) + _any_of(text[1:] for text in group) if first else ""
        for first, group in groups
    ]
    return f"(?:{'|'.join(parts) if parts else '(?!)'})"
