"""Updates of several engines: all load a version or none; a failing one does not block others."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import HANG_S, ScriptedEngine, replica, until

from megatron_rl.config.schema import Format, Transport
from megatron_rl.sampler.client.interface import EngineUnavailable, SamplerError, UpdateStep
from megatron_rl.sampler.replica import Replica, State
from megatron_rl.sampler.supervisor import SamplerState
from megatron_rl.sampler.update import Updates
from megatron_rl.weight_sync.manifest import WeightSyncError

GONE = EngineUnavailable("killed")
REFUSED = WeightSyncError("corrupt tensor")


def run(use: Callable[[SamplerState], Any], start_timeout_s: float = 0.2) -> Any:
    async def main() -> Any:
        state = SamplerState(start_timeout_s, 30.0, 48, 100, lambda line: None)
        state.served.append(0)
        return await asyncio.wait_for(use(state), HANG_S)

    return asyncio.run(main())


def several(*scripts: dict[str, Any]) -> tuple[list[Replica], list[str]]:
    """Engines that serve version 0, and what happens to them, in order."""
    events = []
    return [
        replica(f"engine {i}", events=events, **script) for i, script in enumerate(scripts)
    ], events


async def loaded(updates: Updates, **info: Any) -> Any:
    """Take the steps of an update to version 1."""
    await updates.begin()
    await updates.stage(
        {
            one.format: {"policy_version": 1, "format": one.format} | info
            for one in updates._replicas
        }
    )
    return await updates.finish()


def swapped(
    *scripts: dict[str, Any], transport: Transport = Transport.file
) -> tuple[SamplerState, list[Replica], list[str], Any]:
    """Update engines; return them, and the result or the error."""
    replicas, events = several(*scripts)

    async def use(state: SamplerState) -> tuple[SamplerState, Any]:
        state.transport = transport
        try:
            return state, await loaded(Updates(replicas, state))
        except Exception as error:
            return state, error
        finally:
            assert not state.updating.locked(), "others may begin"

    state, result = run(use)
    assert not any(one.state is State.updating for one in replicas)
    assert not any(one.ready and one.engine.paused for one in replicas), "left paused"
    return state, replicas, events, result


def failing(step: UpdateStep, failure: Exception | None = GONE, **more: Any) -> dict[str, Any]:
    return {"fails": {step: failure}, **more}


def test_no_engine_goes_on_before_every_one_has_loaded():
    state, replicas, events, result = swapped({}, {"load_s": 0.05})
    assert [event.split()[-1] for event in events] == [
        *(step for step in ("start", "stage", "finish", "resume") for _ in replicas)
    ]
    assert state.served[-2:] == [0, 1]
    assert (result["policy_version"], result["load_s"]) == (1, 0.05), "the slowest engine's"
    assert result["pause_s"] >= 0.05, "as long as the slowest load"
    assert all((one.ready, one.version) == (True, 1) for one in replicas)


def test_a_single_engine_does_not_pause_and_held_updates_are_released():
    (one,), events = several({})

    async def use(state: SamplerState) -> None:
        updates = Updates([one], state)
        changed = asyncio.Event()
        open_one = SimpleNamespace(notify=changed.set)
        state.dispatchers.append(open_one)
        await updates.hold()
        await loaded(updates)
        assert state.updating.locked(), "files may be written over until then"
        assert changed.is_set(), "it takes prompts again"
        await updates.release()
        assert not state.updating.locked()

    run(use)
    assert [event.split()[-1] for event in events] == ["start", "stage", "finish"]
    assert one.engine.received["finish"] == {"pause": False}


@pytest.mark.parametrize("background", [True, False])
def test_an_update_is_verified_beside_answers_that_are_being_written(background):
    replicas, events = several({}, {})
    replicas[1].format = Format.int8
    run(lambda state: loaded(Updates(replicas, state), background=background))
    assert [one.engine.received["stage"]["update_info"]["format"] for one in replicas] == [
        Format.none,
        Format.int8,
    ]
    assert (events[4:6] == ["engine 0: await", "engine 1: await"]) == background


@pytest.mark.fault(
    "an engine refuses an update that it verifies",
    "no engine loads it; all forget what they hold of it",
)
@pytest.mark.parametrize("step", ["stage", "await"])
def test_what_one_engine_refuses_is_loaded_by_none(step):
    replicas, events = several({}, failing(step, REFUSED))

    async def use(state: SamplerState) -> None:
        with pytest.raises(WeightSyncError, match="corrupt tensor"):
            await loaded(Updates(replicas, state), background=True)
        assert state.version == 0
        assert not state.updating.locked()

    run(use)
    assert sorted(events[-2:]) == ["engine 0: abort", "engine 1: abort"]
    assert all(
        (
            one.ready,
            one.version,
            one.engine.version,
            one.engine.staged,
        )
        == (True, 0, 0, None)
        for one in replicas
    )


@pytest.mark.fault(
    "a server cannot load an update that another has loaded",
    "it goes on with the version before; the other is taken out, with what it was stream",
)
def test_weights_that_are_taken_back_reach_no_answer():
    state, (first, refusing), events, error = swapped({}, failing("finish", REFUSED))
    assert isinstance(error, WeightSyncError)
    assert state.version == 0
    assert not first.ready
    assert (refusing.ready, refusing.version) == (True, 0)
    assert events[-2:] == ["engine 0: finish", "engine 1: resume"]


@pytest.mark.fault(
    "an engine behind `nccl` or `ipc` stops half-way in loading", "it refuses until a good update"
)
def test_incomplete_weights_wait_for_a_good_update_without_files():
    incomplete = failing("finish", SamplerError("stopped half-way"), incomplete=True)
    _, (one,), _, _ = swapped(incomplete)
    assert not one.ready, "a file update brings back another engine"
    incomplete = failing("finish", SamplerError("stopped half-way"), incomplete=True)
    _, (one,), events, error = swapped(incomplete, transport=Transport.nccl)
    assert "stopped half-way" in str(error)
    assert (one.up, one.ready, events[-1]) == (True, True, "engine 0: stage"), "it is not resumed"
    one.engine.fails.clear()
    assert run(lambda state: loaded(Updates([one], state)))["policy_version"] == one.version == 1


@pytest.mark.parametrize("transport", [Transport.ipc, Transport.nccl])
def test_ranks_of_each_engine_and_what_a_lost_one_means(transport):
    replicas, _ = several({}, {}, {})
    replicas[1].workers_before = 2
    replicas[2].workers_before = 4

    async def use(state: SamplerState) -> None:
        state.transport, updates = transport, Updates(replicas, state)
        await updates.init({"rank_offset": 1})
        assert [one.engine.received["init"]["init_info"]["rank_offset"] for one in replicas] == [
            1,
            3,
            5,
        ]
        replicas[1].engine.fails["start"] = GONE
        for _ in range(2):  # in the middle of an update, and before the next
            lost = pytest.raises(SamplerError, match=r"engine 1 is lost.*--attempts.*killed")
            with lost if transport is Transport.nccl else nullcontext():
                await loaded(updates)
            assert not state.updating.locked()
        assert [one.version for one in replicas] == (
            [0, -1, 0] if transport is Transport.nccl else [1, -1, 1]
        )

    run(use)


@pytest.mark.fault(
    "a server dies between loading and going on", "it is taken out; the others go on, updated"
)
@pytest.mark.parametrize("when", ["finish", "resume"])
def test_an_engine_that_dies_in_the_swap_does_not_block_the_others(when):
    state, (dead, other), events, result = swapped(failing(when, loads_first=True), {})
    assert result["policy_version"] == state.version == 1
    assert not dead.ready
    assert (other.ready, other.version, events[-1]) == (True, 1, "engine 1: resume")


@pytest.mark.fault(
    "an update is interrupted while engines load it",
    "those that have loaded it are taken out, the others go on",
)
@pytest.mark.parametrize("loads_first", [True, False])
def test_an_interrupted_swap_leaves_no_engine_in_doubt(loads_first):
    replicas, events = several(failing("finish", None, loads_first=loads_first))
    (one,) = replicas

    async def use(state: SamplerState) -> None:
        updating = asyncio.ensure_future(loaded(Updates(replicas, state)))
        await until(
            lambda: one.state is State.updating and (one.engine.version == 1 or not loads_first)
        )
        await asyncio.sleep(0.01)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert one.ready != loads_first
        assert one.state is not State.updating
        assert (events[-1] == "engine 0: resume") == one.ready

    run(use)


@pytest.mark.fault(
    "a server hangs in the middle of an update", "once it is out, the others' update goes on"
)
@pytest.mark.parametrize("step", ["stage", "finish"])
def test_an_update_does_not_wait_for_an_engine_that_is_out(step):
    replicas, _ = several(failing(step, None), {})
    hung, other = replicas

    async def use(state: SamplerState) -> Any:
        updating = asyncio.ensure_future(loaded(Updates(replicas, state)))
        await until(lambda: len(hung.running) == 1 and not other.running)
        state.mark_down(hung, "no answer")
        return await updating

    assert run(use)["policy_version"] == 1
    assert (other.ready, other.version, hung.reason) == (True, 1, "no answer")


@pytest.mark.fault(
    "the only engine dies in an update", "its replacement receives the whole update again"
)
@pytest.mark.parametrize("step", ["start", "await", "finish"])
def test_an_update_outlives_the_last_engine(step):
    replicas, _ = several(failing(step))
    (one,) = replicas

    async def use(state: SamplerState) -> Any:
        updating = asyncio.ensure_future(loaded(Updates(replicas, state), background=True))
        await until(lambda: not one.up)
        one.engine = ScriptedEngine("engine 1")
        one.come_up()
        return await updating

    assert run(use, start_timeout_s=HANG_S)["policy_version"] == 1
    assert (one.ready, one.version) == (True, 1)
    assert one.engine.events == [
        f"engine 1: {word}" for word in ("start", "stage", "await", "finish")
    ]


@pytest.mark.fault(
    "a re-sync never ends and the next update waits for it",
    "an error in a sentence, which names the server",
)
def test_an_update_that_cannot_begin_says_why():
    async def use(state: SamplerState) -> None:
        held = replica("server 0 (int8)", ready=False)
        other = replica("server 1 (none)")
        await state.updating.acquire()
        with pytest.raises(SamplerError, match=r"start_timeout_s=0\.2: server 0"):
            await Updates([held, other], state).begin()

    run(use)


@pytest.mark.fault(
    "a server dies in an update and is back before its end", "it receives nothing of this update"
)
def test_an_engine_that_takes_anothers_place_stays_and_takes_no_part_in_the_rest():
    """An engine that dies in an update is restarted before the slowest engine has staged it."""
    (dying, slow), _ = several({"fails": {"stage": GONE}}, {})

    async def use(state: SamplerState) -> None:
        staged = asyncio.Event()
        stages = slow.engine.update

        async def slowly(step: UpdateStep, **more: Any) -> Any:
            if step == "stage":
                await staged.wait()
            return await stages(step, **more)

        slow.engine.update = slowly
        updates = Updates([dying, slow], state)
        await updates.begin()
        staging = asyncio.ensure_future(updates.stage({Format.none: {"policy_version": 1}}))
        await asyncio.sleep(0)
        state.mark_down(dying, "killed")
        dying.engine = ScriptedEngine()
        dying.come_up()
        staged.set()
        await staging
        await updates.finish()

    run(use)
    assert (dying.up, dying.ready, dying.engine.events) == (True, False, [])
    assert slow.version == 1


@pytest.mark.fault(
    "an engine receives the current weights while the others are put to sleep",
    "it sleeps with them",
)
@pytest.mark.parametrize("comes_back", [True, False])
def test_sleep_waits_for_an_engine_that_is_being_started(comes_back: bool):
    (well, late), events = several({}, {})
    late.state = State.down
    late.process = SimpleNamespace()

    async def use(state: SamplerState) -> None:
        sleeping = asyncio.ensure_future(Updates([well, late], state).sleep(1))
        await asyncio.sleep(0.05)
        assert not events, "the learner would find no room"
        if comes_back:
            late.come_up()
            late.hold(state.version)
        late.process = late.process if comes_back else None
        await sleeping

    run(use, start_timeout_s=HANG_S)
    assert [event.partition(":")[0] for event in events] == ["engine 0", "engine 1"][
        : 1 + comes_back
    ]
