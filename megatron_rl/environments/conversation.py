"""Conversation: exact tokens of a conversation's requests, as a tree whose branches are training
rows.

A request's tokens are those of the turn before, exactly as they were sampled, and those of the
messages added since. Text decides which turn a request extends: the chat template renders the
complete conversation, and if the result begins with the earlier rendering, the request extends that
turn. Otherwise the conversation forks where the texts differ: some templates drop earlier thinking,
some agents rewrite messages. Sampled tokens are never tokenized again for training; a token shared
by several branches is trained in the first of them.
"""

from __future__ import annotations

import re
import secrets
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np

from megatron_rl.data.control_tokens import MARK, marked, plain
from megatron_rl.data.tokenizer import FolderTokenizer, without_stops
from megatron_rl.environments.environment import Message
from megatron_rl.types import Completion, Rollout

# placeholder of a response in a rendered conversation
SENTINEL = "\N{WHITE SQUARE}answer\N{WHITE SQUARE}"


@dataclass(eq=False)
class Turn:
    """Request and the completion sampled for it."""

    number: int
    messages: tuple[Message, ...]
    tools: Sequence[Any]
    text: str  # of the request, as rendered by the template
    parent: Turn | None  # the turn that this one extends
    added: list[int]  # tokens between the parent's end and this turn's response
    sampled: Completion | None = None
    # rendered text including the response, and its end; None: it does not start with `text`
    closed: str | None = None
    stop: str = ""  # the end of the response, as `closed` has it
    trained: bool = False  # by an earlier row

    @property
    def tokens(self) -> list[int]:
        """Return the token ids of the request, earlier turns included."""
        found: list[int] = []
        for one in self.path[:-1]:
            assert one.sampled is not None
            found += [*one.added, *one.sampled.token_ids]
        return found + self.added

    @property
    def path(self) -> list[Turn]:
        found = [self]
        one = self.parent
        while one is not None:
            found.append(one)
            one = one.parent
        return found[::-1]


@dataclass(eq=False)
class Conversation:
    tokenizer: FolderTokenizer
    options: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    # extend the last response even if the template would render it differently now
    appends: bool = False
    turns: list[Turn] = field(default_factory=list)

    def request(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Turn:
        """Add the next turn. Raises the template's errors."""
        text = self._rendered(messages, tools, True)
        done = self._done
        parent = self._before(messages, done) if self.appends else None
        if parent is not None:
            added = self._behind(parent, messages, tools)
        else:
            parent, added = self._continued(text, done)
        turn = Turn(len(self.turns), tuple(messages), tools, text, parent, added)
        self.turns.append(turn)
        return turn

    def answered(self, turn: Turn, sampled: Completion, answer: Message) -> None:
        """Record the completion of a turn, and the message that it adds to the conversation."""
        turn.sampled = sampled
        if self.appends:
            return
        # if the template refuses it, the next turn forks
        closed = self._so_far([*turn.messages, answer], turn.tools)
        if closed.startswith(turn.text):
            # some templates append a final end of text
            ended = self._ends.search(closed, len(turn.text))
            end, behind = (ended[1], closed[ended.end(1) :]) if ended else self._closing(turn)
            turn.closed = closed
            if closed.endswith(end + behind):
                turn.stop = end
                turn.closed = closed[: len(closed) - len(behind)]

    @property
    def leaves(self) -> list[Turn]:
        """Return the last turn of each branch, in order."""
        inner = {id(one.parent) for one in self._done}
        return [one for one in self._done if id(one) not in inner]

    @property
    def _done(self) -> list[Turn]:
        return [one for one in self.turns if one.sampled is not None]

    def rows(self, like: Rollout) -> list[Rollout]:
        """Return the branches as rollouts like this one, each a prompt and all tokens after it:
        sampled tokens are trained in the first branch that has them.
        """
        for turn in self.turns:
            turn.trained = False
        return [_row(leaf, like) for leaf in self.leaves]

    def _before(self, messages: Sequence[Message], done: Sequence[Turn]) -> Turn | None:
        """Return the turn that these messages extend: of several, the longest with the same
        content.
        """
        found: list[Turn] = []
        for one in sorted(
            done,
            key=lambda one: (len(one.messages), one.number),
            reverse=True,
        ):
            n = len(one.messages)
            if found and n < len(found[0].messages):
                break
            if (
                n < len(messages)
                and messages[n]["role"] == "assistant"
                and one.messages == tuple(messages[:n])
            ):
                found.append(one)
        if len(found) < 2:
            return found[0] if found else None
        said = messages[len(found[0].messages)].get("content") or ""
        return next(
            (
                one
                for one in found
                if one.sampled and said in self.tokenizer.decode_all(one.sampled.token_ids)
            ),
            found[0],
        )

    def _continued(self, text: str, done: Sequence[Turn]) -> tuple[Turn | None, list[int]]:
        """Return the parent of this text's turn, and the turn's own tokens: it extends the longest
        earlier text that is a prefix of it, a response's or a request's.
        """
        found = [
            (len(one.closed), 1, one)
            for one in done
            if one.closed is not None and text.startswith(one.closed)
        ]
        found += [(len(one.text), 0, one) for one in self.turns if text.startswith(one.text)]
        if not found:
            return None, self._encoded(text)
        length, answered, longest = max(found, key=lambda each: (*each[:2], each[2].number))
        if answered:
            return longest, self._encoded(self._without_stop(longest, longest.stop) + text[length:])
        return longest.parent, longest.added + self._encoded_again(
            text[length:], self.turns[longest.number :]
        )

    def _behind(self, before: Turn, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Return the tokens of the text that follows the previous turn's response."""
        place = len(before.messages)
        answer = _sentinel()
        # some templates print no text besides calls
        for one in ({**messages[place], **answer}, answer):
            shown = [*messages[:place], one, *messages[place + 1 :]]
            _, found, rest = self._rendered(shown, tools, True).rpartition(answer["content"])
            if found and (stop := self._stop.search(rest)):
                return self._encoded(self._without_stop(before, rest[stop.start() :]))
        raise ValueError(
            "the chat template shows no end of a response: use environment.history=template"
        )

    def _encoded_again(self, text: str, turns: Sequence[Turn]) -> list[int]:
        """Tokenize text after a request that may contain responses of these turns; those keep their
        sampled tokens.

        A response is recognized after the template's generation prompt; the text may hold only an
        end of it, such as the part after thinking.
        """
        opening = self._opening(turns[0])
        if not opening:
            return self._encoded(text)
        tokens = list[int]()
        pending = ""
        left = [one for one in turns if one.sampled is not None]
        for place, piece in enumerate(text.split(opening)):
            stop = self._stop.search(piece)
            end = stop.start() if stop else len(piece)
            pending += opening if place else ""
            for turn in left:
                if end and (ids := self._end_of(turn, piece[:end])):
                    tokens += self._encoded(pending) + ids
                    pending = piece[end:]
                    left = left[left.index(turn) + 1 :]
                    break
            else:
                pending += piece
        return tokens + self._encoded(pending)

    def _closing(self, turn: Turn) -> tuple[str, str]:
        """Return the template's end of a response without stop token, and the text after that
        end.
        """
        answer = _sentinel()
        _, found, rest = self._so_far([*turn.messages, answer], turn.tools).rpartition(
            answer["content"]
        )
        if stop := self._stop.search(rest):
            return stop[0], rest[stop.end() :]
        return (rest, "") if found else ("", "")

    def _opening(self, turn: Turn) -> str:
        """Return the template's text at the start of a response (its generation prompt)."""
        closed = self._so_far(turn.messages, turn.tools)
        if closed and turn.text.startswith(closed):
            return turn.text.removeprefix(closed)
        return ""

    def _end_of(self, turn: Turn, text: str) -> list[int] | None:
        """Return the turn's last sampled tokens that decode to this text; None if none do."""
        assert turn.sampled is not None
        text = plain(text)
        ids = without_stops(turn.sampled.token_ids, self.tokenizer.stop_token_ids)
        # shorter ends have shorter texts
        start = bisect_left(
            range(len(ids)), -len(text), key=lambda at: -len(self.tokenizer.decode_all(ids[at:]))
        )
        if ids[start:] and self.tokenizer.decode_all(ids[start:]) == text:
            return ids[start:]
        return None

    def _without_stop(self, turn: Turn, tail: str) -> str:
        """Return the text that closes a response, without a sampled stop."""
        assert turn.sampled is not None
        ids = turn.sampled.token_ids
        if not ids or ids[-1] not in self.tokenizer.stop_token_ids:
            return tail
        stop = self._stop.match(tail)
        return tail[stop.end() :] if stop else tail

    @cached_property
    def _ends(self) -> re.Pattern[str]:
        """Return the pattern of a conversation's end: the stop of the last response, and the text
        after it.
        """
        stop = self._stop.pattern
        return re.compile(rf"({stop})(?:{stop}|\s)*\Z")

    @cached_property
    def _stop(self) -> re.Pattern[str]:
        """Match any stop that the template has written, as text."""
        stops = [
            text
            for one in self.tokenizer.stop_token_ids
            if (text := self.tokenizer.decode_all([one]))
        ]
        return re.compile(f"(?<!{MARK})(?:{'|'.join(map(re.escape, stops)) or '(?!)'})")

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any], opened: bool) -> str:
        return self.tokenizer.render(messages, self.options, tools=tools, opened=opened)

    def _so_far(self, messages: Sequence[Message], tools: Sequence[Any]) -> str:
        """Return the rendered conversation without a generation prompt; empty if the template
        refuses it.
        """
        try:
            return self._rendered(messages, tools, False)
        except Exception:  # exceptions of jinja
            return ""

    def _encoded(self, text: str) -> list[int]:
        if text:
            return self.tokenizer.encode(marked(text))
        return []


def _sentinel() -> dict[str, str]:
    """Return a response text that no message contains."""
    return {"role": "assistant", "content": SENTINEL + secrets.token_hex(8)}


def _row(leaf: Turn, like: Rollout) -> Rollout:
    path = leaf.path
    columns = defaultdict[str, list[Any]](list)

    def put(**values: Iterable[Any]) -> None:
        for name, more in values.items():
            columns[name].extend(more)

    for turn in path:
        sampled = turn.sampled
        assert sampled is not None
        added = turn.added if turn is not path[0] else []
        n = len(added)
        put(
            token_ids=added,
            logprobs=[0] * n,
            loss_mask=[0] * n,
            turns=[-1] * n,
            versions=[sampled.policy_version] * n,
            kept_ids=added,
            kept_counts=[1] * n,  # the sampled token is its whole support
        )
        n = len(sampled.token_ids)
        put(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            loss_mask=[not turn.trained] * n,
            turns=[turn.number] * n,
            versions=sampled.versions or [sampled.policy_version] * n,
            kept_ids=sampled.kept_ids or (),
            kept_counts=sampled.kept_counts or (),
        )
        turn.trained = True
    more: dict[str, Any] = dict(columns)
    if any(turn.sampled is None or turn.sampled.kept_ids is None for turn in path):
        more |= {"kept_ids": None, "kept_counts": None}
    more |= _top_tokens(path)
    if len(set(columns["versions"])) < 2:
        more["versions"] = None
    own = list(compress(columns["versions"], columns["loss_mask"]))
    return replace(
        like,
        prompt=replace(like.prompt, token_ids=tuple(path[0].added)),
        finish_reason=leaf.sampled.finish_reason if leaf.sampled else "abort",
        policy_version=min(own, default=like.policy_version),
        experts_SLK=_experts(path),
        **more,
    )


def _top_tokens(path: Sequence[Turn]) -> dict[str, Any]:
    """Top tokens of a branch, in arrays; tokens that the policy did not sample have none."""
    counts = array("h")
    ids = array("i")
    logprobs = [np.zeros(0, np.float16)]
    for turn in path:
        sampled = turn.sampled
        if sampled is None or sampled.top_counts is None:
            return {}
        if turn is not path[0]:
            counts.extend([0] * len(turn.added))
        counts.extend(sampled.top_counts)
        ids.extend(sampled.top_ids or ())
        if sampled.top_logprobs is not None:
            logprobs.append(sampled.top_logprobs)
    return {"top_counts": counts, "top_ids": ids, "top_logprobs": np.concatenate(logprobs)}


def _experts(path: Sequence[Turn]) -> np.ndarray | None:
    """Routed experts of a branch's tokens as of each turn's sampling: later prefills may differ."""
    recorded = [
        turn.sampled.experts_SLK
        for turn in path
        if turn.sampled and turn.sampled.experts_SLK is not None
    ]
    if len(recorded) < len(path):
        return None
    found_SLK = recorded[-1].copy()
    for experts_SLK in reversed(recorded[:-1]):
        found_SLK[: len(experts_SLK)] = experts_SLK
    return found_SLK
