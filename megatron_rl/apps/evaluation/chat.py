"""Chat with a stored model in an engine, for `megatron-rl chat`, which reads what is typed: a
conversation where it has a template, else texts continued; the tools of an environment answer its
calls, as in training.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.apps.evaluation.stored_model import StoredModel, served
from megatron_rl.config import ConfigError
from megatron_rl.config.evaluation import max_response_tokens
from megatron_rl.config.schema import Config
from megatron_rl.data.tokenizer import FolderTokenizer, has_template
from megatron_rl.environments.pool import EnvironmentFailed, EnvironmentPool, EnvironmentProcess
from megatron_rl.environments.session import (
    ContextFull,
    EnvironmentSession,
    PolicyClient,
    PolicyResponse,
    Rules,
    TemplateError,
)
from megatron_rl.environments.templates import parser_of, problems
from megatron_rl.logs import logger
from megatron_rl.preflight.checks import refuse
from megatron_rl.processes.threads import EventLoopThread
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, SamplingParams

AGAIN = "what is typed next begins another conversation"


class ChatError(ValueError):
    """A text without a response, for example because of its length; the next one may have one."""


def sampling(config: Config, tokenizer: FolderTokenizer) -> SamplingParams:
    section = config.eval
    return SamplingParams(
        samples=1,
        max_tokens=max_response_tokens(config.rollout, section),
        temperature=section.temperature or 0.0,
        top_p=section.top_p,
        stop_token_ids=tokenizer.stop_token_ids,
    )


@dataclass
class Chat:
    """A conversation, if the model has a chat template; otherwise each text is completed alone."""

    sampler: Sampler
    tokenizer: FolderTokenizer
    config: Config
    talks: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    def answer(self, text: str) -> str:
        """Respond to a text; drop the oldest turns of a conversation that is too long."""
        most = self.config.rollout.max_prompt_tokens
        self.messages.append({"role": "user", "content": text})
        while len(ids := self._encoded(text)) > most:
            if not self.talks or len(self.messages) == 1:
                self.messages.pop()
                raise ChatError(
                    f"this has {len(ids)} tokens, the engine takes {most}: raise rollout.max_prompt_tokens"
                )
            del self.messages[:2]
        self.turns += 1
        prompt = Prompt(self.turns, tuple(ids), text, {})
        params = sampling(self.config, self.tokenizer)
        (rollout,) = self.sampler.generate([prompt], params, seed=self.turns)
        (said,) = self.tokenizer.decode([rollout.token_ids])
        self.messages.append({"role": "assistant", "content": said})
        return said

    def _encoded(self, text: str) -> list[int]:
        if self.talks:
            said = self.config.data.system_prompt
            system = [] if said is None else [{"role": "system", "content": said}]
            text = self.tokenizer.text(
                [*system, *self.messages], self.config.data.chat_template_kwargs
            )
        return self.tokenizer.encode(text)


@contextmanager
def begun(
    config: Config, stored: StoredModel, row: Mapping[str, Any]
) -> "Iterator[Chat | ToolChat]":
    """A chat with the model served by `config`, and the tools of its environment, started first."""
    with _environment(config, stored.folder) as pool, served(config, stored) as sampler:
        tokenizer = FolderTokenizer(stored.folder)
        if pool is None:
            yield Chat(sampler, tokenizer, config, has_template(stored.folder))
            return
        with closing(ToolChat(sampler, tokenizer, config, pool, row)) as chat:
            yield chat


@contextmanager
def _environment(config: Config, folder: Path) -> Iterator[EnvironmentPool | None]:
    """Pool of the environment, checked with the model; None without one, or if it is an agent."""
    section = config.environment
    if section.name is None:
        yield None
        return
    with closing(EnvironmentPool(section, config.run.variables)) as pool:
        try:
            pool.start()
        except ConfigError as error:
            raise ConfigError(f"{error} (environment.name=null chats without it)") from None
        if pool.about.agent:
            logger("chat").info(
                f"environment.name: {section.name} is an agent, the user itself: the chat "
                "goes without it"
            )
            yield None
            return
        template = config.data.chat_template_kwargs or {}
        refuse(problems(section, folder, template, pool.about.tools, agent=False))
        yield pool


@dataclass(eq=False)
class ToolChat:
    """A conversation, kept in the exact tokens that were sampled."""

    sampler: Sampler
    tokenizer: FolderTokenizer
    config: Config
    pool: EnvironmentPool
    row: Mapping[str, Any]  # columns that `reset` is given beside the first text
    show: Callable[[str], None] = print  # shows what precedes a response
    talks = True

    def __post_init__(self) -> None:
        config = self.config
        params = sampling(config, self.tokenizer)
        self._rules = Rules(
            config.environment,
            params.max_tokens,
            config.rollout.context_tokens,
            config.data.chat_template_kwargs or {},
            parser_of(config.environment, self.tokenizer) if self.pool.about.tools else None,
            config.data.system_prompt,
        )
        self._engines = self.sampler.turns(params, patient=False)
        self._loop = EventLoopThread("chat", lambda: EnvironmentFailed("the chat has ended"))
        self._session: EnvironmentSession | None = None
        self._process: EnvironmentProcess | None = None

    def answer(self, text: str) -> str:
        """The model's final response; tool calls and their results are printed before it."""
        return self._loop.call(self._answer(text))

    async def _answer(self, text: str) -> str:
        session = self._session
        if session is None:
            session = await self._begun(text)
        else:
            session.messages.append({"role": "user", "content": text})
        self._session = None  # unless it can be continued
        for _ in range(self._rules.section.max_turns):
            response = await self._asked(session)
            said = response.message["content"]
            calls = response.message.get("tool_calls", [])
            if calls and said:
                self.show(said)
            for one in calls:
                written = json.dumps(one["function"]["arguments"], ensure_ascii=False)
                self.show(f"-> {one['function']['name']} {written}")
            try:
                more = await session.called(response)
            except EnvironmentFailed as error:
                raise ChatError(f"environment.name: {error}; {AGAIN}") from None
            if not more:
                self._session = session
                if response.completion.finish_reason == "length":
                    return f"{said}\n[cut: {len(response.completion.token_ids)} tokens]"
                return said
            if not calls:
                self.show(said)
            for message in session.add(more):
                self.show(f"<- {message['content']}")
        self._session = session
        return f"[environment.max_turns: {self._rules.section.max_turns} responses with calls]"

    async def _begun(self, text: str) -> EnvironmentSession:
        row = {"prompt": text, "answer": "", **self.row}
        if self._process is not None and self._process.alive:
            self._process.kill()
        process = await self.pool.take()
        self._process = process
        policy = PolicyClient(
            self._engines, self.tokenizer, self._rules, lambda turn: turn + 1, "chat"
        )
        session = EnvironmentSession(policy, process, self._rules, self.tokenizer)
        try:
            await session.begin(row)
        except EnvironmentFailed as error:
            raise ChatError(
                f"environment.name: {error}; --row gives reset the columns that it reads"
            ) from None
        return session

    async def _asked(self, session: EnvironmentSession) -> PolicyResponse:
        try:
            return await session.answer()
        except ContextFull:
            most = self._rules.context_tokens
            raise ChatError(
                f"rollout.max_context_tokens: {most} are reached; raise it ({AGAIN})"
            ) from None
        except TemplateError as error:
            raise ChatError(f"{error}; {AGAIN}") from None

    def close(self) -> None:
        self.pool.close()  # first, so that running tools are terminated
        self._engines.close()
        self._loop.stop()
