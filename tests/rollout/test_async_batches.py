"""Batches ahead of the learner: what is begun when, what an update waits for, what is given up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from collectors import collector
from helpers import wait_for
from rollouts import rollout

from megatron_rl.config.schema import InFlight, RolloutSection
from megatron_rl.rewards.task import Score, Task
from megatron_rl.rollout.async_batches import AsyncBatches, Gate
from megatron_rl.types import Prompt, Rollout, SamplingParams, Verdict

LIMIT_S = 240.0


class ScriptedSource:
    """Responses in a given order, after given delays, with the policy version at their start."""

    def __init__(self, seed: int = 0, dull: float = 0.3) -> None:
        self.version = 0
        self.holds = threading.Event()  # nothing is finished while it is set
        self.open = 0
        self.added: list[tuple[int, int]] = []  # group, and the version that was served
        self.failure: Exception | None = None
        self._random = random.Random(seed)
        self._dull = dull

    def stream(self, params: SamplingParams, *, seed: int, step: int) -> Stream:
        return Stream(self, params.samples, self._random, self._dull)

    def score(self, tasks: Sequence[Task]) -> list[Score]:
        return [Score(float(task.response), Verdict.right) for task in tasks]


class Stream:
    def __init__(
        self, source: ScriptedSource, samples: int, chance: random.Random, dull: float
    ) -> None:
        self._source = source
        self._samples = samples
        self._chance = chance
        self._dull = dull
        self._groups: list[list[Rollout]] = []

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        source = self._source
        for group, prompt in enumerate(prompts, first_group):
            source.added.append((group, source.version))
            source.open += 1
            dull = random.Random(group).random() < self._dull
            words = ["0" if dull else str(sample % 2) for sample in range(self._samples)]
            about = {"prompt": prompt, "group": group, "policy_version": source.version}
            self._groups.append(
                [rollout((ord(word),), sample=at, **about) for at, word in enumerate(words)]
            )

    def finished(self) -> list[list[Rollout]]:
        if self._source.failure:
            raise self._source.failure
        while self._source.holds.is_set():
            time.sleep(0.002)
        some = self._chance.randint(1, max(1, len(self._groups)))
        self._chance.shuffle(self._groups)
        done = self._groups[:some]
        self._groups = self._groups[some:]
        self._source.open -= len(done)
        return done

    def close(self) -> None:
        self._source.open -= len(self._groups)
        self._groups = []


def section(**keys: Any) -> RolloutSection:
    return RolloutSection(
        **{"prompts_per_step": 8, "samples_per_prompt": 2, "max_gen_batches": 3, "max_staleness": 1}
        | keys
    )


@contextmanager
def ahead(source: ScriptedSource, last: int = 100, **keys: Any) -> Iterator[AsyncBatches]:
    rollout = section(**keys)
    gate = Gate(source, rollout)
    batches = AsyncBatches(
        collector(gate, source, rollout),
        gate,
        rollout,
        last,
        lambda: source.version,
    )
    try:
        yield batches
    finally:
        source.holds.clear()
        batches.stop()
        batches.join()


def begin_and_hold(source: ScriptedSource, batches: AsyncBatches) -> None:
    """Step 3's batch is being answered, and not finished before `holds` is cleared."""
    batches.take(1)
    batches.take(2)
    source.holds.set()
    source.version = 1
    wait_for(lambda: source.open > 0)


@pytest.mark.parametrize("seed", range(8))
def test_refills_that_are_drawn_early_are_those_of_whole_rounds(seed: int) -> None:
    """Rounds of a source that finishes everything at once are the measure."""
    chance = random.Random(seed)
    rollout = section(
        prompts_per_step=chance.randint(1, 24),
        max_gen_batches=chance.randint(1, 5),
        max_staleness=0,
    )
    dull = chance.choice([0.1, 0.5, 0.9, 1.0])
    found = []
    for source in (ScriptedSource(seed, dull), Whole(seed, dull)):
        one = collector(source, source, rollout)
        steps = [one.collect(step) for step in range(1, 4)]
        for step in steps:
            del step.metrics["reward/std"]  # of another order of the same numbers
        found.append(
            [
                (step.ordinals, [each.rollout.group for each in step.scored], step.metrics)
                for step in steps
            ]
        )
    assert found[0] == found[1]


class Whole(ScriptedSource):
    def stream(self, params: SamplingParams, *, seed: int, step: int) -> Stream:
        return WholeRounds(self, params.samples, self._random, self._dull)


class WholeRounds(Stream):
    def finished(self) -> list[list[Rollout]]:
        done = self._groups
        self._groups = []
        return done


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("in_flight", list(InFlight))
def test_no_answer_is_older_than_allowed_and_each_prompt_is_drawn_once(
    most: int, in_flight: InFlight
) -> None:
    source = ScriptedSource(most)
    chance = random.Random(most)
    with ahead(source, last=30, max_staleness=most, in_flight=in_flight) as batches:
        drawn_to = 0
        ages = set()
        for step in range(1, 31):
            found = batches.take(step)
            ages |= {step - 1 - one.rollout.policy_version for one in found.scored}
            assert found.ordinals[0] == drawn_to
            drawn_to = found.ordinals[1]
            assert {one.rollout.group for one in found.scored} <= set(range(*found.ordinals))
            if step == 1:  # in either order of speed, the next batch is begun before this update
                wait_for(lambda to=drawn_to: source.added[-1][0] >= to)
            time.sleep(chance.random() * 0.004)
            with batches.updating():
                assert source.open == 0 or in_flight is InFlight.interrupt
                source.version = step
        assert min(ages) >= 0 and most >= max(ages) > 0
        time.sleep(0.02)
        # nothing is begun for a step that never comes
        assert max(group for group, _ in source.added) < drawn_to


def test_it_goes_as_far_ahead_as_it_may_and_waits_for_versions() -> None:
    source = ScriptedSource(dull=0)
    with ahead(source, max_staleness=3) as batches:
        batches.take(1)
        # of steps 1 to 4: version 0 is 3 steps older there
        wait_for(lambda: len(source.added) == 4 * 8)
        batches.take(2)
        time.sleep(0.05)
        assert len(source.added) == 4 * 8
        assert batches.can_skip_sync(4) and not batches.can_skip_sync(5)
        with batches.updating():
            source.version = 1
        wait_for(lambda: len(source.added) == 5 * 8)
        assert batches.take(3).metrics["rollout/ready_ahead"] >= 1


def test_an_update_waits_for_what_is_being_written_and_refills_wait_for_the_update() -> None:
    source = ScriptedSource(dull=0.6)
    with ahead(source, in_flight=InFlight.drain) as batches:
        begin_and_hold(source, batches)
        updated = threading.Event()

        def update() -> None:
            with batches.updating():
                assert source.open == 0
                added = len(source.added)
                time.sleep(0.05)
                assert len(source.added) == added
                source.version = 2
            updated.set()

        thread = threading.Thread(target=update)
        thread.start()
        time.sleep(0.05)
        assert not updated.is_set()
        source.holds.clear()
        thread.join(LIMIT_S)
        assert updated.is_set()
        assert {one.rollout.policy_version for one in batches.take(3).drawn} == {1, 2}


def test_what_goes_wrong_in_the_background_is_raised_in_front() -> None:
    source = ScriptedSource()
    with ahead(source) as batches:
        batches.take(1)
        wait_for(lambda: len(batches._ready) == 1)
        source.failure = OSError("the engine is gone")
        batches.take(2)
        source.version = 1
        with pytest.raises(OSError, match="gone"):
            batches.take(3)


def test_stopping_gives_up_what_is_being_collected() -> None:
    source = ScriptedSource()
    with ahead(source) as batches:
        begin_and_hold(source, batches)
        batches.stop()
        source.holds.clear()
        batches.join()
        assert source.open == 0
