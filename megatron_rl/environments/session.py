"""Session: one conversation of policy and environment; makes its tool calls, records turns, tokens
and rewards. Its `PolicyClient`, which sends requests to the engines, serves agents too: they run
the conversation themselves (agent.py).
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from megatron_rl.config.schema import EnvironmentSection
from megatron_rl.data.tokenizer import FolderTokenizer, Messages, without_stops
from megatron_rl.environments.conversation import Conversation, Turn
from megatron_rl.environments.pool import EnvironmentFailed, EnvironmentProcess
from megatron_rl.environments.stops import CALLS, ended
from megatron_rl.files import JsonObject
from megatron_rl.processes.threads import in_thread
from megatron_rl.rewards.user_process import as_json
from megatron_rl.sampler.sampler import TurnClient
from megatron_rl.types import Completion, SessionTurn, ToolFormat

T = TypeVar("T")
MOST_CALLS = 16  # of one response; further calls get an error
WORKERS = 4  # threads that render and tokenize, for all sessions
MOST_CHARACTERS = 64  # of a token: longer texts are not encoded


@dataclass(frozen=True)
class Rules:
    """Settings that all sessions of a run share."""

    section: EnvironmentSection
    response_tokens: int
    context_tokens: int
    options: Mapping[str, Any]  # of the chat template
    parser: str | None  # of tool calls
    # prepended to conversations without a system message of their own
    system: str | None = None
    workers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WORKERS))


@dataclass(eq=False)
class Transcript:
    """State of a conversation so far."""

    conversation: Conversation
    turns: list[SessionTurn] = field(default_factory=list)
    end: str = "error"
    error: str | None = None
    counts: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, float] = field(default_factory=dict)
    answer: str = ""
    format: str = ""
    reward: float | None = None

    @property
    def messages(self) -> str:
        """Return the messages of the last branch as JSON, without its last response, which is in
        `answer`.
        """
        leaves = self.conversation.leaves
        if leaves:
            return json.dumps(leaves[-1].messages, ensure_ascii=False)
        return "[]"


@dataclass(frozen=True)
class PolicyResponse:
    """Response of the policy in one turn."""

    number: int
    asked: int  # tokens of its request
    completion: Completion
    message: JsonObject  # the response as a message of the conversation
    text: str
    stop: str | None = None  # the agent's stop text at which the response was cut


class ContextFull(Exception):
    """The conversation has reached its token limit."""


class TemplateError(Exception):
    """The chat template refuses the conversation."""


class PolicyClient:
    """The policy's side of a session: sends requests to the engines, records their responses.

    Templates and tokenizers work in threads, so that a long conversation does not block the others.
    """

    def __init__(
        self, engines: TurnClient, tokenizer: FolderTokenizer, rules: Rules, seeds: Any, key: str
    ) -> None:
        """`seeds`: seed of each turn, by its number."""
        self.transcript = Transcript(
            Conversation(tokenizer, rules.options, appends=rules.section.history == "append")
        )
        self.rules = rules
        self._engines = engines
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._key = key
        self._order = asyncio.Lock()

    async def answer(self, messages: Messages, tools: Sequence[Any]) -> PolicyResponse:
        """The policy's response. Raises ContextFull if it has no space, or TemplateError."""
        async with self.turn_response(messages, tools) as response:
            return response

    @asynccontextmanager
    async def turn_response(
        self,
        messages: Messages,
        tools: Sequence[Any],
        max_tokens: int | None = None,
        stops: Sequence[str] = (),
        most_calls: int | None = None,
    ) -> AsyncIterator[PolicyResponse]:
        """The policy's response: a turn if the block ends well, otherwise an unread response.

        Nothing extends an unread response, and no row holds it.
        """
        transcript = self.transcript
        rules = self.rules
        turn, tokens = await self.apart(partial(self._request, messages, tools))
        if tools and rules.parser:
            format = ToolFormat(rules.parser, json.dumps(tools))
        else:
            format = None
        most = min(
            rules.context_tokens - len(tokens),
            rules.response_tokens,
            max_tokens or rules.response_tokens,
        )
        asked = {
            "max_tokens": most,
            "seed": self._seeds(turn.number),
            "key": self._key,
            "tools": format,
        }
        try:
            completion = await self._engines.ask(tokens, **asked)
            response = await self.apart(
                partial(self._answered, turn, len(tokens), completion, stops, most_calls)
            )
            turn.sampled = response.completion
            yield response
        except BaseException:
            self.unread(turn)
            raise
        transcript.format = completion.format
        transcript.answer = response.text

    def unread(self, turn: Turn) -> None:
        """Forget a response that was never read; one that a later turn extends was read."""
        if not any(one.parent is turn for one in self.transcript.conversation.turns):
            turn.sampled = None
            self.transcript.counts["answers_unread"] += 1

    async def apart(self, work: Callable[[], T]) -> T:
        """Run work in a thread, in order within a session; started work always finishes."""

        async def begun() -> T:
            async with self._order, self.rules.workers:
                return await asyncio.wrap_future(in_thread("conversation", work))

        return await asyncio.shield(asyncio.ensure_future(begun()))

    def leave_unread(self) -> None:
        """Drop the turns whose responses were never read, and renumber the others."""
        transcript = self.transcript
        read = [one for one in transcript.conversation.turns if one.sampled is not None]
        transcript.turns = [transcript.turns[one.number] for one in read]
        for number, turn in enumerate(read):
            turn.number = number
        transcript.conversation.turns = read

    def _request(self, messages: Messages, tools: Sequence[Any]) -> tuple[Turn, list[int]]:
        """Return the next turn, and the tokens of its request."""
        conversation = self.transcript.conversation
        try:
            turn = conversation.request(messages, tools)
        except Exception as error:  # exceptions of jinja
            raise TemplateError(
                f"the chat template does not take these messages: {str(error)[:300]}"
            ) from error
        tokens = turn.tokens
        most = self.rules.context_tokens
        if len(tokens) >= most:
            conversation.turns.remove(turn)
            raise ContextFull(
                f"{len(tokens)} tokens leave no room for a response: rollout.max_context_tokens={most}"
            )
        return turn, tokens

    def _answered(
        self,
        turn: Turn,
        asked: int,
        completion: Completion,
        stops: Sequence[str],
        most_calls: int | None,
    ) -> PolicyResponse:
        """Return the message of a response in the conversation; no turn extends it yet."""
        ids = without_stops(completion.token_ids, self._tokenizer.stop_token_ids)
        decode = self._tokenizer.decode_all
        completion, stop = ended(
            completion, stops, ids=ids, prompt=asked, decode=decode, parser=self.rules.parser
        )
        message: JsonObject = {"role": "assistant", "content": completion.content}
        if completion.content is None:
            message["content"] = decode(ids)
        if completion.calls:
            message["tool_calls"] = [
                {
                    # nine characters, as Mistral's template requires
                    "id": f"call{turn.number:02d}{place:03d}",
                    "type": "function",
                    "function": {"name": one.name, "arguments": read_arguments(one.arguments)},
                }
                for place, one in enumerate(completion.calls[:most_calls])
            ]
        self.transcript.conversation.answered(turn, completion, message)
        turn.sampled = None  # until the response is read
        (text,) = self._tokenizer.decode([completion.token_ids])
        return PolicyResponse(
            turn.number,
            asked,
            completion,
            message,
            text if stop is None else message["content"],
            stop,
        )


def read_arguments(text: str) -> Any:
    """Parse a call's arguments: a mapping, or the text itself if it is none."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()  # unpaired surrogates cannot be encoded
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def size_of(value: Any) -> float:
    """Count the bytes of a value as JSON."""
    try:
        return len(as_json(value))
    except RecursionError:
        return math.inf


class EnvironmentSession:
    """Conversation with an environment: run to its end, or turn by turn by the caller."""

    def __init__(
        self,
        policy: PolicyClient,
        process: EnvironmentProcess,
        rules: Rules,
        tokenizer: FolderTokenizer,
    ) -> None:
        self._policy = policy
        self._process = process
        self._rules = rules
        self._tokenizer = tokenizer
        self._limit_s = rules.section.tool_timeout_s
        self.messages: list[JsonObject] = []
        self._tools: Sequence[Any] = ()

    async def play(self, row: Mapping[str, Any]) -> None:
        transcript = self._policy.transcript
        await self.begin(row)
        for _ in range(self._rules.section.max_turns):
            try:
                response = await self.answer()
            except ContextFull:
                transcript.end = "length"
                break
            except TemplateError as refused:
                if not transcript.turns:
                    raise EnvironmentFailed(str(refused)) from None
                transcript.end = (
                    "refused"  # such as parallel calls, if the template supports only one
                )
                break
            step, more = await self._follow(response)
            transcript.turns.append(step)
            cut = response.completion.finish_reason == "length"
            if cut or more is None:
                transcript.end = "length" if cut else "done"
                break
            self.add(more)
        else:
            transcript.end = "turns"
        last = (await self._process.ask({"do": "close"}, self._limit_s))["reward"]
        if last is not None and transcript.turns:
            transcript.turns[-1] = replace(
                transcript.turns[-1], reward=(transcript.turns[-1].reward or 0.0) + last
            )
        rewards = [one.reward for one in transcript.turns if one.reward is not None]
        transcript.reward = sum(rewards) if rewards else None

    async def begin(self, row: Mapping[str, Any]) -> None:
        """Return the first messages, and the tools."""
        begun = await self._process.ask({"do": "reset", "row": dict(row)}, self._limit_s)
        self.messages = list(begun["messages"])
        self._tools = begun["tools"]
        if self._rules.system is not None and not any(
            one["role"] == "system" for one in self.messages
        ):
            self.messages.insert(0, {"role": "system", "content": self._rules.system})

    async def answer(self) -> PolicyResponse:
        """Return the policy's next response; see PolicyClient.answer. Refuses oversized requests
        early.
        """
        if size_of([self.messages, self._tools]) > MOST_CHARACTERS * max(
            self._rules.context_tokens, 4096
        ):
            raise ContextFull
        response = await self._policy.answer(self.messages, self._tools)
        self.messages.append(response.message)
        return response

    def add(self, messages: Messages) -> list[JsonObject]:
        """Add messages to the conversation; return them as the policy will read them."""
        added = [self._cut(dict(one)) for one in messages]
        self.messages += added
        return added

    async def called(self, response: PolicyResponse) -> list[JsonObject]:
        """Make the calls of a response; return the tool messages, empty if there are no calls."""
        message, content = response.message, response.message["content"]
        if not self._tools:
            return []
        if calls := message.get("tool_calls"):
            return [await self._called(place, call) for place, call in enumerate(calls)]
        begun = any(opening in content for opening, _ in CALLS.get(self._rules.parser, ()))
        # a malformed call, which the parser has left in the text
        if begun and response.completion.finish_reason != "length":
            self._policy.transcript.counts["calls_unread"] += 1
            return [{"role": "tool", "content": "error: the tool call could not be read"}]
        return []

    async def _follow(
        self, response: PolicyResponse
    ) -> tuple[SessionTurn, list[JsonObject] | None]:
        """Record the turn and return the messages to add; None if the session is over."""
        transcript = self._policy.transcript
        completion = response.completion
        begun = time.perf_counter()
        about: JsonObject = {
            "tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
        }
        if more := await self.called(response):
            calls = len(response.message.get("tool_calls", []))
            return SessionTurn(
                tool_calls=calls, tool_seconds=time.perf_counter() - begun, **about
            ), more
        answer = {
            "text": transcript.answer,
            "content": response.message["content"],
            "turn": response.number,
            "finish_reason": completion.finish_reason,
            "token_ids": list(completion.token_ids),
        }
        step = await self._process.ask({"do": "step", "answer": answer}, self._limit_s)
        transcript.numbers |= step["numbers"]
        about |= {"reward": step["reward"], "advantage": step["advantage"]}
        after = None if step["done"] else step["messages"]
        return SessionTurn(tool_seconds=time.perf_counter() - begun, **about), after

    async def _called(self, place: int, call: JsonObject) -> JsonObject:
        """Make a tool call; return its message."""
        counts = self._policy.transcript.counts
        function = call["function"]
        reply: JsonObject
        if place >= MOST_CALLS:
            reply = {"text": f"error: more than {MOST_CALLS} calls at once", "failed": True}
        elif not isinstance(function["arguments"], dict):
            reply = {"text": "error: the arguments are not a JSON object", "failed": True}
        else:
            asked = {"do": "tool", "name": function["name"], "arguments": function["arguments"]}
            reply = await self._process.ask(asked, self._limit_s)
        counts["calls"] += 1
        counts["calls_failed"] += reply["failed"]
        counts["calls_late"] += reply.get("late", False)
        return {
            "role": "tool",
            "name": function["name"],
            "tool_call_id": call["id"],
            "content": reply["text"],
        }

    def _cut(self, message: JsonObject) -> JsonObject:
        """Truncate a message of the turn to `environment.max_observation_tokens`, with a note."""
        most = self._rules.section.max_observation_tokens
        cut = {
            key: value[:most] if isinstance(value, str) else value for key, value in message.items()
        }
        if (size := size_of(cut)) > MOST_CHARACTERS * most:
            key = f"environment.max_observation_tokens={most}"
            raise EnvironmentFailed(
                f"a message has {size} bytes beside its text, more than {key} takes; raise it"
            )
        if isinstance(text := message.get("content"), str):
            cut["content"] = self._beginning(text, most)
        self._policy.transcript.counts["observations_cut"] += cut != message
        return cut

    def _beginning(self, text: str, most: int) -> str:
        if len(text) <= most:  # no token is shorter than a character ...
            return text
        # ... and few are longer than this
        ids = self._tokenizer.encode_as_text(text[: MOST_CHARACTERS * most])
        if len(ids) <= most and len(text) <= MOST_CHARACTERS * most:
            return text
        return f"{self._tokenizer.decode_all(ids[:most])}\n[cut: the first {most} tokens]"
