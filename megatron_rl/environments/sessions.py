"""Sampler of complete conversations: runs sessions in parallel, retries failed ones, assigns
credit.

Collectors request a session as they request a single response; each of its branches is a rollout.
The engines are a Sampler's (sampler.py).
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from megatron_rl.config.schema import (
    Config,
    Credit,
    DataSection,
    EnvironmentSection,
    RolloutSection,
)
from megatron_rl.data.layouts import field
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.environments.agent import Gateway, play
from megatron_rl.environments.pool import (
    FORK_SERVERS,
    EnvironmentFailed,
    EnvironmentPool,
    ForkServerLost,
)
from megatron_rl.environments.session import EnvironmentSession, PolicyClient, Rules, Transcript
from megatron_rl.environments.templates import parser_of
from megatron_rl.processes.heartbeat import waiting
from megatron_rl.processes.threads import EventLoopThread
from megatron_rl.sampler.generation import GenerationHandle, GenerationSource
from megatron_rl.sampler.sampler import Sampler, request_seed
from megatron_rl.types import NOTHING, Prompt, Rollout, SamplingParams, Session

TRIES = 2  # of a session whose environment fails


class SessionsEnded(RuntimeError):
    """The sampler of sessions is closed."""


class Sessions(GenerationSource):
    """Sampler whose responses are complete conversations."""

    def __init__(
        self,
        section: EnvironmentSection,
        rollout: RolloutSection,
        data: DataSection,
        tokenizer: FolderTokenizer,
        sampler: Sampler,
        patience_s: float,
        variables: Sequence[str] = (),
    ) -> None:
        """`patience_s`: the longest time an engine may take for a response. `variables`: see
        EnvironmentPool.
        """
        self._section = section
        self._rollout = rollout
        self._data = data
        self._patience_s = patience_s
        self._tokenizer = tokenizer
        self._sampler = sampler
        self.pool = EnvironmentPool(section, variables)
        self._loop = EventLoopThread("sessions", lambda: SessionsEnded("the sessions are closed"))
        self._gateway: Gateway | None = None
        self._parser: str | None = None  # of tool calls

    def start(self) -> None:
        """Start the environments; fail with the key's name if the class cannot be imported."""
        self.pool.start()
        if self.pool.about.tools or self.pool.about.agent:
            self._parser = parser_of(self._section, self._tokenizer)
        if self.pool.about.agent:
            self._gateway = Gateway()
            self._loop.call(self._gateway.open())

    def stream(
        self, params: SamplingParams, *, seed: int, step: int = 0, patient: bool = True
    ) -> GenerationHandle:
        rules = self.rules(params.max_tokens)
        turns = self._sampler.turns(params, patient=patient)
        room = asyncio.Semaphore(self._section.max_concurrent)

        async def session(prompt: Prompt, group: int, sample: int) -> list[Rollout]:
            seeds = partial(_seed, seed, group, sample)
            async with room:
                transcript = await self._played(
                    prompt, lambda: PolicyClient(turns, self._tokenizer, rules, seeds, f"{group}")
                )
            served = self._sampler.policy_version
            return rollouts(transcript, prompt, group, sample, self._section, served)

        async def answer(prompt: Prompt, group: int) -> list[Rollout]:
            try:
                async with asyncio.TaskGroup() as together:
                    played = [
                        together.create_task(session(prompt, group, sample))
                        for sample in range(params.samples)
                    ]
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
            return [rollout for one in played for rollout in one.result()]

        limit_s = self._section.tool_timeout_s
        if self._gateway is not None:
            limit_s = self._section.session_timeout_s
        # of environments and engines
        around = partial(waiting, "", max(limit_s, self._patience_s))
        return GenerationHandle(self._loop, answer, waiting=around, close=turns.close)

    def rules(self, response_tokens: int) -> Rules:
        return Rules(
            self._section,
            response_tokens,
            self._rollout.context_tokens,
            self._data.chat_template_kwargs or {},
            self._parser,
            self._data.system_prompt,
        )

    async def _played(self, prompt: Prompt, begun: Callable[[], PolicyClient]) -> Transcript:
        """Run a session; retry if its environment fails or its fork server died."""
        left = TRIES
        for attempt in range(TRIES + FORK_SERVERS):
            policy = begun()
            transcript = policy.transcript
            transcript.counts["restarts"] = attempt
            try:
                await self._play(policy, prompt)
                break
            except EnvironmentFailed as error:
                if self.pool.closed:
                    raise SessionsEnded("the sessions are closed") from None
                transcript.error = str(error)
                transcript.end = "error"
                left -= not isinstance(error, ForkServerLost)
                if not left:
                    break
        return transcript

    async def _play(self, policy: PolicyClient, prompt: Prompt) -> None:
        row = {
            "prompt": field(prompt.row, prompt.prompt_key),
            "answer": prompt.answer,
            **prompt.row,
        }
        process = await self.pool.take()
        try:
            if self._gateway is not None:
                await play(policy, process, self._gateway, row)
            else:
                await EnvironmentSession(policy, process, policy.rules, self._tokenizer).play(row)
        except BaseException:
            if process.alive:
                process.kill()  # its state is unknown
            raise
        finally:
            self.pool.give_back(process)

    def close(self) -> None:
        if self._gateway is not None:
            with suppress(SessionsEnded):
                self._loop.call(self._gateway.close())
        self.pool.close()  # first: all processes end at once, and there is nothing to wait for
        self._loop.stop()


@contextmanager
def opened(config: Config, tokenizer: FolderTokenizer, sampler: Sampler) -> Iterator[Sessions]:
    """Open sessions as a recipe configures them."""
    patience_s = config.sampler.request_timeout_s
    sessions = Sessions(
        config.environment,
        config.rollout,
        config.data,
        tokenizer,
        sampler,
        patience_s,
        config.run.variables,
    )
    with closing(sessions):
        sessions.start()
        yield sessions


def _seed(seed: int, group: int, sample: int, turn: int) -> int:
    """Return the seed of a turn; the first one's is that of a single response."""
    if turn == 0:
        return request_seed(seed, group) + sample
    digest = blake2b(f"{seed}/{group}/{sample}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def rollouts(
    transcript: Transcript,
    prompt: Prompt,
    group: int,
    sample: int,
    section: EnvironmentSection,
    served: int,
) -> list[Rollout]:
    """Return a rollout per branch; without sampled tokens, an empty one of the current policy
    version.
    """
    whole = Rollout(
        **vars(replace(NOTHING, policy_version=served)),
        prompt=prompt,
        group=group,
        sample=sample,
        loss_mask=(),
        format=transcript.format,
    )
    rows = transcript.conversation.rows(whole)
    counts = {**transcript.counts, "forks": max(0, len(rows) - 1)}
    session = Session(
        turns=tuple(transcript.turns),
        rows=max(1, len(rows)),
        reward=transcript.reward,
        error=transcript.error,
        end=transcript.end,
        numbers=transcript.numbers,
        counts=counts,
        answer=transcript.answer,
        conversation=transcript.messages,
    )
    return [
        replace(
            row,
            session=session,
            row=number,
            loss_mask=row.loss_mask if session.error is None else [0] * len(row.loss_mask),
            finish_reason="length" if session.end == "length" else row.finish_reason,
            credit=credit(row.turns or (), session, section),
        )
        for number, row in enumerate(rows)
    ] or [replace(whole, session=session)]


def credit(
    turns: Sequence[int], session: Session, section: EnvironmentSection
) -> list[float] | None:
    """Return per-token credit: return minus session reward (`turns`), or advantage
    (`environment`).
    """
    if section.credit == Credit.outcome:
        return None
    if section.credit == Credit.environment:
        by_turn = [one.advantage or 0.0 for one in session.turns]
    else:
        earned = [one.reward or 0.0 for one in session.turns]
        if earned and all(one.reward is None for one in session.turns):
            earned[-1] = session.reward or 0.0  # an agent's reward belongs to no single turn
        by_turn = [0.0] * len(earned)
        later = 0.0
        for place in reversed(range(len(earned))):
            later += earned[place]
            by_turn[place] = later - (session.reward or 0.0)
    return [by_turn[turn] if 0 <= turn < len(by_turn) else 0.0 for turn in turns]
