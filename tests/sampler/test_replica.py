"""States of an engine: the weights and requests that an engine loses with its state."""

import asyncio

import pytest
from scripted_engine import replica

from megatron_rl.sampler.replica import State
from megatron_rl.weight_sync.manifest import NO_VERSION


@pytest.mark.parametrize("state", State)
def test_an_engine_that_is_taken_out_loses_its_requests_and_its_version(state: State) -> None:
    async def use() -> None:
        one = replica()
        one.state = state
        one.reason = "no restart is left"
        asked = asyncio.get_running_loop().create_future()
        one.running.add(asked)
        one.take_out("killed")
        assert asked.cancelled()
        assert (one.version, one.up) == (NO_VERSION, False)
        assert one.given_up == (state is State.given_up)
        assert (one.reason == "killed") == (not one.given_up)

    asyncio.run(use())


def test_an_engine_takes_no_prompts_before_it_holds_weights_or_during_an_update() -> None:
    one = replica(ready=False)
    states = []
    for step in (one.begin_update, one.come_up, one.begin_update, one.end_update):
        step()
        states.append(one.state)
    assert states == [State.down, *[State.behind] * 3]
    one.hold(4)
    assert (one.state, one.version) == (State.ready, 4)
    one.begin_update()
    one.hold(5)
    assert (one.state, one.version) == (State.updating, 5)
    one.end_update()
    assert one.state is State.ready
