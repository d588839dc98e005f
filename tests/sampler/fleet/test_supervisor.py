"""Looks at a server, updates that cannot begin, and what the screen says of them; servers answer as they are told."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from megatron_rl.sampler.fleet import supervisor as module
from megatron_rl.sampler.fleet.replica import Look, Replica, ReplicaGone
from megatron_rl.sampler.fleet.servers import EventLoopThread
from megatron_rl.sampler.fleet.supervisor import FleetState, Supervisor
from megatron_rl.sampler.fleet.update import FleetUpdates

from megatron_rl.config.schema import Format
from megatron_rl.sampler.engine import SamplerError
from megatron_rl.weight_sync.manifest import WeightSyncError

FINE, BUSY, HUNG = Look(True), Look(True, "its engine is busy"), Look(False, "its engine neither answers nor works")
HANG_S = 240.0


@dataclass
class Told(Replica):
    looks: list[Look] = field(default_factory=list)

    async def look(self) -> Look:
        return self.looks.pop(0) if self.looks else FINE

    async def hang(self) -> None:
        await asyncio.sleep(2 * HANG_S)


def told(name: str, *looks: Look) -> Told:
    one = Told(name, Format.none, "", "", 1.0)
    one.ready, one.version, one.looks = True, 0, list(looks)
    return one


@pytest.fixture(autouse=True)
def hasty(monkeypatch) -> None:
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.001)


def run(use: Callable[[FleetState], Any]) -> tuple[Any, list[str]]:
    notes: list[str] = []

    async def main() -> Any:
        return await asyncio.wait_for(use(FleetState(0.2, 48, notes.append)), HANG_S)

    return asyncio.run(main()), notes


def watched(*looks: Look) -> tuple[str, list[str]]:
    """Until it is taken out, or has been looked at so often."""

    async def use(state: FleetState) -> str:
        one = told("server 0", *looks)
        return await Supervisor(one, None, state)._until_gone(lambda: not one.looks)

    return run(use)


@pytest.mark.fault("an engine hangs behind a server that answers", "three looks, then it is out, with the reason")
def test_three_looks_without_an_answer():
    reason, notes = watched(FINE, HUNG, HUNG, HUNG, FINE)
    assert reason == "did not answer 3 times in a row: its engine neither answers nor works"
    assert notes == ["server 0 is slow to answer: its engine neither answers nor works"]


@pytest.mark.fault(
    "a server leaves two looks unanswered", "it stays; the screen says that it is slow, and that it is back"
)
def test_two_looks_are_no_death():
    reason, notes = watched(HUNG, HUNG, FINE, HUNG, FINE, HUNG, HUNG, BUSY, FINE, FINE)
    assert reason == ""
    assert notes == [f"server 0 {what}" for what in (f"is slow to answer: {HUNG.slow}", "answers again") * 2]


@pytest.mark.fault("an engine is busy for long", "it stays; the screen says so once")
def test_a_busy_engine_is_left_alone():
    reason, notes = watched(*[BUSY] * 20)
    assert reason == ""
    assert notes == ["server 0 is slow to answer: its engine is busy"]


@pytest.mark.fault("a server hangs while it is brought up to date", "three looks; the update ends")
def test_a_hang_during_a_re_sync_is_noticed():
    async def use(state: FleetState) -> None:
        one = told("server 0", HUNG, HUNG, HUNG)
        with pytest.raises(ReplicaGone, match="did not answer 3 times in a row"):
            await Supervisor(one, None, state)._unless_gone(one.hang())

    run(use)


@pytest.mark.fault("a server hangs in the middle of an update", "once it is out, the others' update goes on")
def test_an_update_does_not_wait_for_a_server_that_is_out():
    async def use(state: FleetState) -> list[str]:
        hung, other = told("hung"), told("other")

        async def ask(one: Told) -> str:
            if one is hung:
                await one.hang()
            return one.name

        answers = asyncio.ensure_future(FleetUpdates([hung, other], state).on_all(ask))
        while not hung.running:
            await asyncio.sleep(0.001)
        state.take_out(hung, "did not answer 3 times in a row")
        assert not other.running or other.ready
        return await answers

    assert run(use)[0] == ["other"]


@dataclass
class Swapping(Told):
    """Loads version 1; as `fails` says it does not."""

    fails: str = ""
    takes_s: float = 0.0
    events: list[str] = field(default_factory=list)

    async def finish_update(self, swap):
        self.paused_at = time.perf_counter()
        await asyncio.sleep(self.takes_s)
        if self.fails == "load":
            raise WeightSyncError(f"{self.name}: finish_weight_update without an accepted update_weights")
        self.version = 1
        if self.fails == "stamp":
            raise ReplicaGone("killed")
        self.events.append(f"{self.name} loaded")
        return {"policy_version": 1, "load_s": self.takes_s}

    async def resume(self):
        if self.fails == "resume":
            raise ReplicaGone("hung up")
        self.events.append(f"{self.name} goes on")
        self.paused_at = None
        return 0.5


def swapped(*fails: str) -> tuple[FleetState, list[Swapping], list[str], Any]:
    """What became of one server each, and what `finish` returned or raised."""
    events: list[str] = []
    servers = [
        Swapping(f"server {i}", Format.none, "", "", 1.0, version=0, ready=True, fails=how, events=events)
        for i, how in enumerate(fails)
    ]
    servers[-1].takes_s = 0.05

    async def use(state: FleetState) -> tuple[FleetState, Any]:
        state.served.append(0)
        try:
            return state, await FleetUpdates(servers, state).finish()
        except Exception as error:
            return state, error

    (state, result), _ = run(use)
    assert not any(one.updating for one in servers)
    assert not any(one.ready and one.paused_at is not None for one in servers), "left standing"
    return state, servers, events, result


def test_no_server_goes_on_before_every_one_has_loaded():
    state, servers, events, result = swapped("", "")
    assert [event.split()[-1] for event in events] == ["loaded", "loaded", "on", "on"]
    assert state.served[-2:] == [0, 1]
    assert result == {"policy_version": 1, "load_s": 0.05, "stood_s": 0.5}
    assert all(one.ready for one in servers)


@pytest.mark.fault(
    "a server cannot load an update that another has loaded",
    "it goes on with the version before; the other is taken out, with what it was answering",
)
def test_weights_that_are_taken_back_reach_no_answer():
    state, (loaded, refusing), events, error = swapped("", "load")
    assert isinstance(error, WeightSyncError)
    assert state.version == 0
    assert not loaded.ready
    assert (refusing.ready, refusing.version) == (True, 0)
    assert events == ["server 0 loaded", "server 1 goes on"]


@pytest.mark.fault("a server dies between loading and going on", "it is taken out; the others go on, updated")
@pytest.mark.parametrize("when", ["stamp", "resume"])
def test_a_server_that_dies_in_the_swap_holds_up_nobody(when):
    state, (dead, other), events, result = swapped(when, "")
    assert result["policy_version"] == state.version == 1
    assert not dead.ready
    assert (other.ready, other.version, events[-1]) == (True, 1, "server 1 goes on")


@pytest.mark.fault("an update is interrupted while servers load it", "they are taken out: either version may be live")
def test_an_interrupted_swap_leaves_no_server_in_doubt():
    async def use(state: FleetState) -> None:
        state.served.append(0)
        one = Swapping("server 0", Format.none, "", "", 1.0, version=0, ready=True, takes_s=HANG_S)
        one.finish_update = Replica.finish_update.__get__(one)
        one._guarded_call = one._collective = lambda *words, **more: one.hang()
        finishing = asyncio.ensure_future(FleetUpdates([one], state).finish())
        while not one.running:
            await asyncio.sleep(0.001)
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        assert not one.ready
        assert not one.updating

    run(use)


@pytest.mark.fault(
    "a re-sync never ends and the next update waits for it", "an error in a sentence, which names the server"
)
def test_an_update_that_cannot_begin_says_why():
    async def use(state: FleetState) -> None:
        held, other = told("server 0 (int8)"), told("server 1 (none)")
        held.ready = False
        await state.updating.acquire()
        with pytest.raises(SamplerError, match=r"start_timeout_s=0\.2: server 0 \(int8\) is still receiving"):
            await FleetUpdates([held, other], state).begin()

    run(use)


def test_the_caller_of_a_long_call_is_not_left_in_the_dark(monkeypatch):
    monkeypatch.setattr("megatron_rl.sampler.fleet.servers.MEANWHILE_S", 0.01)
    loop, seen, end = EventLoopThread("test"), [], asyncio.Event()

    async def until_seen() -> int:
        await asyncio.wait_for(end.wait(), HANG_S)
        return len(seen)

    def meanwhile() -> None:
        seen.append(1)
        loop._loop.call_soon_threadsafe(end.set)

    try:
        assert loop.call(until_seen(), meanwhile) >= 1
    finally:
        loop.stop()
