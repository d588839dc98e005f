"""States of an engine, and what follows on its weights and its end."""

import asyncio

import pytest
from scripted_engine import replica

from megatron_rl.sampler.replica import State
from megatron_rl.weight_sync.manifest import NO_VERSION


@pytest.mark.parametrize("state", State)
def test_what_is_asked_of_an_engine_ends_with_it(state: State) -> None:
    async def use() -> None:
        one = replica()
        one.state = state
        one.reason = "given up after 3 restarts"
        asked = asyncio.get_running_loop().create_future()
        one.running.add(asked)
        one.mark_down("killed")
        assert asked.cancelled()
        assert one.version == NO_VERSION
        assert (one.reason == "killed") == (state is not State.failed)

    asyncio.run(use())


@pytest.mark.parametrize("state", State)
def test_weights_make_an_engine_ready_that_was_behind(state: State) -> None:
    """In an update it takes no prompts before the end; an engine that has ended serves nothing."""
    one = replica()
    one.state = state
    one.hold(4)
    assert one.state is (State.ready if state is State.behind else state)


def test_an_engine_comes_up_once() -> None:
    with pytest.raises(AssertionError):
        replica().come_up()
