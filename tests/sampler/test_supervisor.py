"""Looks at an engine, and what the screen says of them."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import logged
from scripted_engine import HANG_S, replica, until

from megatron_rl.config.schema import Format, Transport
from megatron_rl.sampler import supervisor as module
from megatron_rl.sampler.client.engine_process import ProcessSettings
from megatron_rl.sampler.client.interface import EngineUnavailable, Look
from megatron_rl.sampler.replica import Replica
from megatron_rl.sampler.supervisor import MAX_RESTARTS, POLL_S, SamplerState, Supervisor
from megatron_rl.sampler.update import Updates
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

FINE = Look(True)
BUSY = Look(True, "its engine is busy")
SLOW_NOTE = "server 0 is slow to reply: {}"
HUNG = Look(False, "hung")


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.001)


def run(use: Callable[[SamplerState], Any]) -> tuple[Any, list[str]]:
    notes = logged()

    async def main() -> Any:
        state = SamplerState(0.2, 30.0, 48, 100)
        return await asyncio.wait_for(use(state), HANG_S)

    return asyncio.run(main()), notes


def over(one: Replica, state: SamplerState) -> Supervisor:
    """Supervisor of an engine that was given by address."""
    return Supervisor(one, None, state, "", "")


def watched(*looks: Look) -> tuple[str, list[str]]:
    """Until it is taken out, or has been looked at so often."""

    async def use(state: SamplerState) -> str:
        one = replica("server 0", looks=list(looks))
        return await over(one, state)._until_down(lambda: not one.engine.looks)

    return run(use)


@pytest.mark.fault(
    "an engine hangs behind a server that answers", "three looks, then it is out, with the reason"
)
def test_three_looks_without_an_answer():
    reason, notes = watched(FINE, HUNG, HUNG, HUNG, FINE)
    assert reason.endswith(": hung")
    assert notes == [SLOW_NOTE.format(HUNG.slow)]


@pytest.mark.fault(
    "a server leaves two looks unanswered",
    "it stays; the screen says that it is slow, and that it is back",
)
def test_two_looks_are_no_death():
    reason, notes = watched(
        HUNG,
        HUNG,
        FINE,
        HUNG,
        FINE,
        HUNG,
        HUNG,
        BUSY,
        FINE,
        FINE,
    )
    assert reason == ""
    assert notes == [SLOW_NOTE.format(HUNG.slow), "server 0 replies again"] * 2


@pytest.mark.fault("an engine is busy for long", "it stays; the screen says so once")
def test_a_busy_engine_is_left_alone():
    reason, notes = watched(*[BUSY] * 20)
    assert reason == ""
    assert notes == [SLOW_NOTE.format(BUSY.slow)]


@pytest.mark.fault("a server hangs while it is brought up to date", "three looks; the update ends")
def test_a_hang_during_a_re_sync_is_noticed():
    async def use(state: SamplerState) -> None:
        one = replica("server 0", looks=[HUNG] * 3, fails={"forget": None})
        supervisor = over(one, state)
        with pytest.raises(EngineUnavailable, match="hung"):
            await supervisor._unless_down(supervisor._make_current())

    run(use)


async def updated(state: SamplerState, version: int) -> None:
    """Another engine has received this version."""
    updates = Updates([replica("server 1")], state)
    await updates.init({})
    await updates.begin()
    await updates.stage({Format.none: {"policy_version": version}})
    await updates.finish()


def test_an_engine_that_comes_back_receives_the_present_version_before_it_serves():
    async def use(state: SamplerState) -> None:
        one = replica("server 0", ready=False, version=NO_VERSION)
        await updated(state, 4)
        await state.updating.acquire()
        coming = asyncio.ensure_future(over(one, state)._make_current())
        await until(lambda: one.up)
        assert not one.ready, "an update may be on its way"
        state.updating.release()
        await coming
        assert (
            one.ready,
            one.version,
            one.engine.version,
            one.cache_tokens,
        ) == (True, 4, 4, 20)
        assert one.engine.events == [
            f"server 0: {step}" for step in ("forget", "init", "start", "stage", "finish")
        ]

    run(use)


END = "its process ended (exit status -9)"
REFUSED = WeightSyncError("corrupt tensor")
OLD = f"the re-sync was refused: {REFUSED}"
AGAIN = "starts again (1 of 3 restarts): "


def dying(one: Replica) -> SimpleNamespace:
    """A process that ends as soon as its engine serves."""
    log = {"log_path": "sampler_0.log", "log_end": lambda: "RuntimeError: no room"}
    return SimpleNamespace(
        ended=lambda: END if one.ready else None, wait=lambda _: -9, end=lambda: None, pid=1, **log
    )


@pytest.mark.fault(
    "an engine ends again and again", "three restarts; then it is given up, with the end of its log"
)
@pytest.mark.parametrize(
    ("restarts", "fails", "why", "events"),
    [
        (
            MAX_RESTARTS,
            {},
            END,
            [f"is unavailable: {END}", AGAIN + END, "is back with policy version 4"],
        ),
        (MAX_RESTARTS, {"stage": REFUSED}, OLD, ["refuses policy version 4", AGAIN + OLD]),
        (0, {}, END, [f"is unavailable: {END}"]),
    ],
)
def test_restarts_are_limited_and_each_is_reported(restarts, fails, why, events):
    async def use(state: SamplerState) -> Replica:
        one = replica("server 0", ready=False, version=NO_VERSION, fails=fails)
        seen = []
        await updated(state, 4)
        state.transport = Transport.file if restarts else Transport.nccl
        listening = SimpleNamespace(notify=lambda: seen.append((one.ready, one.failed)))
        state.dispatchers.append(listening)
        supervisor = Supervisor(one, ProcessSettings(arguments={}, log_path=None), state, "", "")
        supervisor.start_process = lambda: setattr(one, "process", dying(one))
        supervisor.start_process()
        await supervisor.run()
        assert ((True, False) in seen) != bool(fails), "dispatchers are notified that it serves"
        assert seen[-1] == (False, True), "and that it will not come back"
        assert one.process is None
        return one

    one, notes = run(use)
    said = "given up after 3 restarts" if restarts else "sync.transport=file alone"
    assert one.restarts == restarts
    assert f"{said}: {why}" in one.reason
    assert "sampler_0.log:\nRuntimeError: no room" in one.reason
    assert [note.partition(" as it is kept")[0] for note in notes[: len(events)]] == [
        f"server 0 {what}" for what in events
    ]


@pytest.mark.fault(
    "an engine dies while the learner has its GPU", "it starts again once the others wake"
)
def test_nothing_starts_beside_a_learner_that_works():
    async def use(state: SamplerState) -> list[bool]:
        one = replica("engine 0")
        began = []
        supervisor = Supervisor(one, ProcessSettings(arguments={}, log_path=None), state, "", "")

        async def bring_up() -> None:
            began.append(state.asleep)
            raise EngineUnavailable("it cannot start here")

        supervisor._bring_up = bring_up
        updates = Updates([replica("engine 1")], state)
        await updates.sleep(2)
        running = asyncio.create_task(supervisor.run())
        await asyncio.sleep(2 * POLL_S)
        assert not began
        await updates.wake(None)
        await running
        assert supervisor.first_start.exception()
        return began

    assert run(use)[0] == [False]
