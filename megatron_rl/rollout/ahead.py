"""Batches in the order of steps, collected when asked for, or by a thread ahead of the learner
(`rollout.ahead`), which waits for weights that are fresh enough or draws again; and the gate that
holds new prompts back during an update.

With `rollout.ahead: k` a thread collects the next k batches while the learner works. What it may
begin is decided here alone:

- the batch of step s, once the learner has asked for that of step s - k;
- with `rollout.stale: wait`, not before the sampler serves a policy that is at most k updates older
  than the one that
  step s starts from. With `drop` nobody waits for that: a batch that is older when its turn comes
  is given up, and
  with it what was drawn after it. The same prompts are drawn again, in the same order;
- with `rollout.in_flight: finish`, an update of the sampler waits for the answers that are being
  written, and no
  prompt is added until it is over.

A batch is taken whole and in order: no answer is left out for being long, and each prompt is
trained on once.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from megatron_rl.config.schema import InFlight, RolloutSection, Stale
from megatron_rl.processes import pulse
from megatron_rl.rollout.collect import Answering, Answers, Collected, Collector
from megatron_rl.types import Prompt, Rollout, SamplingParams

LOOK_S = 0.2  # the longest that a wait goes on without a look whether it still makes sense


class InTurn:
    """`rollout.ahead: 0`: sampler and learner take turns."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def take(self, step: int) -> Collected:
        return self._collector.collect(step)

    def updating(self) -> AbstractContextManager[None]:
        """Around an update of the sampler's weights."""
        return nullcontext()

    def goes_on_without(self, step: int) -> bool:
        """Whether there is a batch for this step where the sampler has refused the update before
        it.
        """
        return False

    def stop(self) -> None:
        """Nothing more is begun; what is being collected is given up."""

    def join(self) -> None:
        """Wait for the thread, once the sampler and the rewards are closed."""


class GivenUp(Exception):
    """What was being collected is not wanted any more."""


class Gate:
    """A sampler's answers; with `finish`, none is being written while an update comes."""

    def __init__(self, answers: Answers, rollout: RolloutSection) -> None:
        self.changed = threading.Condition()
        self.given_up = False
        self._answers = answers
        self._closes = rollout.in_flight is InFlight.finish
        self._open = 0
        self._closed = False

    def answering(self, params: SamplingParams, *, seed: int, step: int) -> Answering:
        return _Gated(self, self._answers.answering(params, seed=seed, step=step))

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self.changed:
            self._closed = self._closes
            while self._closed and self._open:
                self.changed.wait(LOOK_S)
        try:
            yield
        finally:
            with self.changed:
                self._closed = False
                self.changed.notify_all()

    def enter(self, prompts: int) -> bool:
        """Whether so many may be added now."""
        with self.changed:
            self._open += 0 if self._closed else prompts
            return not self._closed

    def leave(self, prompts: int) -> None:
        with self.changed:
            self._open -= prompts
            self.changed.notify_all()

    def pass_through(self) -> None:
        """Waits until it is open."""
        with self.changed:
            while self._closed and not self.given_up:
                self.changed.wait(LOOK_S)
            if self.given_up:
                raise GivenUp


class _Gated:
    """Answering, through the gate: what comes while it is closed is added when it opens."""

    def __init__(self, gate: Gate, inner: Answering) -> None:
        self._gate = gate
        self._inner = inner
        self._open = 0
        self._later: list[tuple[Sequence[Prompt], int]] = []

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        if not self._gate.enter(len(prompts)):
            self._later.append((prompts, first_group))
            return
        self._open += len(prompts)
        self._inner.add(prompts, first_group)

    def finished(self) -> list[list[Rollout]]:
        while self._open or self._later:
            if groups := self._inner.finished() if self._open else []:
                self._open -= len(groups)
                self._gate.leave(len(groups))
                if self._gate.given_up:
                    raise GivenUp
                return groups
            self._gate.pass_through()
            later = self._later
            self._later = []
            for prompts, first_group in later:
                self.add(prompts, first_group)
        return []

    def close(self) -> None:
        self._inner.close()
        self._gate.leave(self._open)
        self._open = 0


class Ahead:
    """The first batch is begun when it is asked for; from then on a thread goes ahead."""

    def __init__(
        self,
        collector: Collector,
        gate: Gate,
        rollout: RolloutSection,
        last: int,
        served: Callable[[], int],
    ) -> None:
        """`last`: step of the run. `served`: the policy version that the sampler answers with."""
        self._collector = collector
        self._gate = gate
        self._last = last
        self._served = served
        self._most = rollout.ahead
        self._waits = rollout.stale is Stale.wait
        self._changed = gate.changed
        self._ready: deque[tuple[int, Collected]] = deque()
        self._asked_for = self._begun = 0  # steps
        self._dropped = 0  # answers, since the last batch was taken
        # the step and the prompt to begin with again
        self._rewound_to: tuple[int, int] | None = None
        self._failure: BaseException | None = None
        self._stopped = False
        # one for the whole run: processes that it starts again end with it
        self._thread = threading.Thread(target=self._collect_all, name="collecting", daemon=True)

    def take(self, step: int) -> Collected:
        with self._changed:
            self._asked_for = step
            self._changed.notify_all()
        if not self._thread.is_alive() and self._failure is None:
            self._begun = step - 1
            self._thread.start()
        with pulse.delegate_wait():
            while True:
                collected = self._next(step)
                oldest = min(one.rollout.policy_version for one in collected.scored)
                if step - 1 - oldest <= self._most:
                    break
                self._draw_again(step, collected)
        seconds = sum(span.end - span.begin for span in collected.spans if span.lane == "sampler")
        metrics = {"rollout/ready_ahead": len(self._ready), "rollout/seconds": seconds}
        if not self._waits:
            metrics["rollout/dropped"] = self._dropped
            self._dropped = 0
        return replace(collected, metrics=collected.metrics | metrics)

    @contextmanager
    def updating(self) -> Iterator[None]:
        with pulse.delegate_wait(), self._gate.closed():
            yield

    def goes_on_without(self, step: int) -> bool:
        with self._changed:
            return self._fresh_enough(step) or (self._waits and self._begun >= step)

    def stop(self) -> None:
        with self._changed:
            self._stopped = self._gate.given_up = True
            self._changed.notify_all()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _next(self, step: int) -> Collected:
        with self._changed:
            while not self._ready or self._ready[0][0] != step:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(LOOK_S)
            return self._ready.popleft()[1]

    def _draw_again(self, step: int, stale: Collected) -> None:
        with self._changed:
            self._dropped += sum(
                len(one.drawn) for one in (stale, *(one for _, one in self._ready))
            )
            self._ready.clear()
            self._rewound_to = step, stale.ordinals[0]
            self._begun = step - 1
            self._gate.given_up = True
            self._changed.notify_all()

    def _fresh_enough(self, step: int) -> bool:
        return step - 1 - self._served() <= self._most

    def _may_begin(self, step: int) -> bool:
        in_time = step <= min(self._asked_for + self._most, self._last)
        return in_time and (not self._waits or self._fresh_enough(step))

    def _collect_all(self) -> None:
        try:
            while (step := self._next_to_begin()) is not None:
                try:
                    collected = self._collector.collect(step)
                except GivenUp:
                    continue
                with self._changed:
                    if self._rewound_to is None:
                        self._ready.append((step, collected))
                        self._changed.notify_all()
        except BaseException as error:  # of every kind: the main thread raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_to_begin(self) -> int | None:
        """None: the run ends."""
        with self._changed:
            while not self._stopped:
                if self._rewound_to is not None:
                    step, position = self._rewound_to
                    self._collector.rewind(position)
                    self._begun = step - 1
                    self._rewound_to = None
                    self._gate.given_up = False
                if self._may_begin(self._begun + 1):
                    self._begun += 1
                    return self._begun
                self._changed.wait(LOOK_S)
        return None
