"""Environments of other projects that misbehave cost their own session alone."""

import math
from collections.abc import Iterator

import pytest
from environments.hostile_gymnasium import STEPS
from environments.scripted_policy import Played

ADAPTER = "megatron_rl.workshop.adapters.gymnasium:Environment"
SAYS: dict[str, str] = {"action": "fine"}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    settings = {"target": "environments.hostile_gymnasium:Environment"}
    folder = tmp_path_factory.mktemp("hostile")
    with Played(
        folder, lambda *_: SAYS["action"], ADAPTER, settings=settings, turns=2, tool_parser=None
    ) as sessions:
        yield sessions


@pytest.mark.fault(
    "an environment of another project returns hostile objects", "an error of its session"
)
@pytest.mark.parametrize("how", STEPS)
def test_a_hostile_object_costs_its_own_session(played: Played, how: str) -> None:
    SAYS["action"] = how
    ((rollout,),) = played.play({"seed": 1})
    assert rollout.session is not None
    if rollout.session.error is None:
        assert rollout.session.reward is not None and math.isfinite(rollout.session.reward)
    else:
        assert "Traceback" not in rollout.session.error
    assert (rollout.session.error is None) == (how in ("fine", "half a pair")), rollout.session
    SAYS["action"] = "fine"
    ((after,),) = played.play({"seed": 1})
    assert after.session is not None
    assert (after.session.error, after.session.reward) == (None, 1.0)
