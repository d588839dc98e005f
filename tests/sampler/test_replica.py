"""States of an engine, and what may follow on each."""

import asyncio
from collections.abc import Callable

import pytest
from scripted_engine import replica

from megatron_rl.sampler.replica import NEXT, Replica, State
from megatron_rl.weight_sync.manifest import NO_VERSION

STEPS: dict[str, Callable[[Replica], None]] = {
    "come_up": Replica.come_up,
    "hold": lambda one: one.hold(4),
    "begin_update": Replica.begin_update,
    "end_update": Replica.end_update,
    "take_out": lambda one: one.take_out("killed"),
    "give_up": lambda one: one.give_up("given up after 3 restarts"),
}
# what each step makes of each state; the others change nothing, or are refused
CHANGES = {
    (State.down, "come_up"): State.behind,
    (State.down, "give_up"): State.given_up,
    (State.behind, "hold"): State.ready,
    (State.behind, "take_out"): State.down,
    (State.ready, "begin_update"): State.updating,
    (State.ready, "take_out"): State.down,
    (State.updating, "end_update"): State.ready,
    (State.updating, "take_out"): State.down,
}


async def after(state: State, step: str) -> Replica:
    one = replica()
    one.state = state
    STEPS[step](one)
    return one


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_leads_where_the_table_allows_it(state: State, step: str) -> None:
    if step in ("come_up", "give_up") and (state, step) not in CHANGES:
        with pytest.raises(AssertionError):
            asyncio.run(after(state, step))
        return
    assert asyncio.run(after(state, step)).state is CHANGES.get((state, step), state)


def test_the_table_holds_what_the_steps_do_and_no_more() -> None:
    done = {(before, after) for (before, _), after in CHANGES.items()}
    assert done == {(before, after) for before, several in NEXT.items() for after in several}


@pytest.mark.parametrize("state", State)
def test_what_is_asked_of_an_engine_ends_with_it(state: State) -> None:
    async def use() -> None:
        one = replica()
        one.state = state
        one.reason = "given up after 3 restarts"
        asked = asyncio.get_running_loop().create_future()
        one.running.add(asked)
        one.take_out("killed")
        assert asked.cancelled()
        assert one.version == NO_VERSION
        assert (one.reason == "killed") == (state is not State.given_up)

    asyncio.run(use())
