"""Sampler of whole conversations: plays sessions in parallel, retries failed ones, assigns credit.

Collectors request a session as they request a single response; each of its branches is a rollout.
The engines are a Sampler's (sampler.py).
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise

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
from megatron_rl.environments.conversation import Row
from megatron_rl.environments.pool import NURSERIES, EnvironmentFailed, EnvironmentPool, NurseryGone
from megatron_rl.environments.session import EnvironmentSession, Policy, Rules, Transcript
from megatron_rl.environments.templates import parser_of
from megatron_rl.processes.heartbeat import waiting
from megatron_rl.processes.threads import EventLoopThread
from megatron_rl.sampler.sampler import Sampler, Turns, answered, request_seed
from megatron_rl.types import Prompt, Rollout, SamplingParams, Session

LOOK_S = 0.5
TRIES = 2  # of a session whose environment fails


class SessionsEnded(RuntimeError):
    """The sampler of sessions is closed."""


class Sessions:
    """Answers prompts with whole conversations."""

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
        """`patience_s`: the longest that an engine may take for an answer. `variables`: see
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
        """Fails here, with the key's name, where the environment cannot be imported."""
        self.pool.start()
        if self.pool.about.tools or self.pool.about.agent:
            self._parser = parser_of(self._section, self._tokenizer)
        if self.pool.about.agent:
            self._gateway = Gateway()
            self._loop.call(self._gateway.open())

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        first_group: int,
        step: int,
    ) -> list[Rollout]:
        """Rollouts by prompt, sample, branch; a prompt's group is `first_group` plus its index."""
        return answered(self.answering(params, seed=seed, patient=False), prompts, first_group)

    def answering(
        self, params: SamplingParams, *, seed: int, step: int = 0, patient: bool = True
    ) -> SessionsAnswering:
        rules = Rules(
            self._section,
            params.max_tokens,
            self._rollout.context_tokens,
            self._data.template or {},
            self._parser,
            self._data.system_prompt,
        )
        turns = self._sampler.turns(params, patient=patient)
        player = Player(self, rules, turns, seed)
        return SessionsAnswering(self._loop, player, params.samples, turns, self._patience_s)

    def close(self) -> None:
        if self._gateway is not None:
            with suppress(SessionsEnded):
                self._loop.call(self._gateway.close())
        self.pool.close()  # first: all processes end at once, and nothing has to be waited for
        self._loop.stop()


@contextmanager
def opened(config: Config, tokenizer: FolderTokenizer, sampler: Sampler) -> Iterator[Sessions]:
    """Sessions as a recipe wants them."""
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


class SessionsAnswering:
    """Sessions that are being played, for one thread."""

    def __init__(
        self, loop: EventLoopThread, player: Player, samples: int, turns: Turns, patience_s: float
    ) -> None:
        self._loop = loop
        self._player = player
        self._samples = samples
        self._turns = turns
        self._patience_s = patience_s
        self._done: queue.SimpleQueue[list[Rollout] | BaseException] = queue.SimpleQueue()
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        self._open += len(prompts)
        self._loop.call(self._begin(prompts, first_group))

    async def _begin(self, prompts: Sequence[Prompt], first_group: int) -> None:
        for group, prompt in enumerate(prompts, first_group):
            task = asyncio.create_task(self._group(prompt, group))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _group(self, prompt: Prompt, group: int) -> None:
        try:
            async with asyncio.TaskGroup() as together:
                played = [
                    together.create_task(self._player.play(prompt, group, sample))
                    for sample in range(self._samples)
                ]
            self._done.put([rollout for one in played for rollout in one.result()])
        except BaseExceptionGroup as failed:
            self._done.put(failed.exceptions[0])
        except asyncio.CancelledError:
            self._done.put(SessionsEnded("the sessions were given up"))  # for whoever still waits
            raise
        except BaseException as error:
            self._done.put(error)

    def finished(self) -> list[list[Rollout]]:
        """Return the complete groups; waits for at least one. Empty: no session is open."""
        if not self._open:
            return []
        key = "session_timeout_s" if self._player.agents else "tool_timeout_s"
        # for environments, and engines
        limit_s = max(getattr(self._player.rules.section, key), self._patience_s)
        groups: list[list[Rollout]] = []
        with waiting("", limit_s):
            while not groups or not self._done.empty():
                try:
                    found = self._done.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
                if isinstance(found, BaseException):
                    raise found
                groups.append(found)
        self._open -= len(groups)
        return groups

    def close(self) -> None:
        self._open = 0
        with suppress(SessionsEnded):
            self._loop.call(self._give_up())
        self._turns.close()

    async def _give_up(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class Player:
    """Plays sessions, as many at once as there may be environments."""

    def __init__(self, sessions: Sessions, rules: Rules, turns: Turns, seed: int) -> None:
        self.rules = rules
        self._turns = turns
        self._seed = seed
        self._tokenizer = sessions._tokenizer
        self._sampler = sessions._sampler
        self._pool = sessions.pool
        self._gateway = sessions._gateway
        self._room = asyncio.Semaphore(rules.section.sessions)
        self.agents = self._gateway is not None

    async def play(self, prompt: Prompt, group: int, sample: int) -> list[Rollout]:
        """Rows of one session, begun again if its environment fails or its fork server died."""
        async with self._room:
            left = TRIES
            for attempt in range(TRIES + NURSERIES):
                policy = Policy(
                    self._turns, self._tokenizer, self.rules, self._seeds(group, sample), f"{group}"
                )
                transcript = policy.transcript
                transcript.counts["restarts"] = attempt
                try:
                    await self._played(policy, prompt)
                    break
                except EnvironmentFailed as error:
                    if self._pool.closed:
                        raise SessionsEnded("the sessions are closed") from None
                    transcript.error = str(error)
                    transcript.end = "error"
                    left -= not isinstance(error, NurseryGone)
                    if not left:
                        break
        return rollouts(
            transcript, prompt, group, sample, self.rules.section, self._sampler.policy_version
        )

    async def _played(self, policy: Policy, prompt: Prompt) -> None:
        row = {
            "prompt": field(prompt.row, prompt.prompt_key),
            "answer": prompt.answer,
            **prompt.row,
        }
        process = await self._pool.take()
        try:
            if self._gateway is not None:
                await play(policy, process, self._gateway, row)
            else:
                await EnvironmentSession(policy, process, self.rules, self._tokenizer).play(row)
        except BaseException:
            if process.alive:
                process.kill()  # what it holds is nobody's any more
            raise
        finally:
            self._pool.give_back(process)

    def _seeds(self, group: int, sample: int) -> Callable[[int], int]:
        """The first turn's seed is that of a single answer."""

        def seed(turn: int) -> int:
            if turn == 0:
                return request_seed(self._seed, group) + sample
            digest = blake2b(
                f"{self._seed}/{group}/{sample}/{turn}".encode(), digest_size=8
            ).digest()
            return int.from_bytes(digest, "little") >> 1

        return seed


def rollouts(
    transcript: Transcript,
    prompt: Prompt,
    group: int,
    sample: int,
    section: EnvironmentSection,
    served: int,
) -> list[Rollout]:
    """A rollout per branch; if nothing was sampled, an empty one of the current policy version."""
    rows = transcript.conversation.rows()
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
    whole = Rollout(
        prompt,
        group,
        sample,
        (),
        (),
        (),
        "abort",
        served,
        format=transcript.format,
        session=session,
    )
    if not rows:
        return [whole]
    return [_branch(whole, session, row, number, section) for number, row in enumerate(rows)]


def _branch(
    whole: Rollout, session: Session, row: Row, number: int, section: EnvironmentSection
) -> Rollout:
    own = [version for version, kept in zip(row.versions, row.mask, strict=True) if kept] or [
        whole.policy_version
    ]
    mixed = any(one != other for one, other in pairwise(row.versions))
    return replace(
        whole,
        prompt=replace(whole.prompt, token_ids=tuple(row.prompt)),
        token_ids=row.token_ids,
        logprobs=row.logprobs,
        loss_mask=row.mask if session.error is None else [0] * len(row.mask),
        finish_reason="length" if session.end == "length" else row.finish_reason,
        policy_version=min(own),
        kept_ids=row.kept_ids,
        kept_counts=row.kept_counts,
        experts_SLK=row.experts_SLK,
        versions=row.versions if mixed else None,
        turns=row.turns,
        credit=credit(row, session, section),
        row=number,
    )


def credit(row: Row, session: Session, section: EnvironmentSection) -> list[float] | None:
    """Per-token credit: return minus session reward (`turns`), or advantage (`environment`)."""
    if section.credit == Credit.outcome:
        return None
    if section.credit == Credit.environment:
        by_turn = [one.advantage or 0.0 for one in session.turns]
    else:
        earned = [one.reward or 0.0 for one in session.turns]
        if earned and all(one.reward is None for one in session.turns):
            earned[-1] = session.reward or 0.0  # an agent's, which names no turn
        by_turn = [0.0] * len(earned)
        later = 0.0
        for place in reversed(range(len(earned))):
            later += earned[place]
            by_turn[place] = later - (session.reward or 0.0)
    return [by_turn[turn] if 0 <= turn < len(by_turn) else 0.0 for turn in row.turns]
