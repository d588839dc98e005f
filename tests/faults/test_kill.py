"""A run that is killed again and again ends as one that was left alone: `make kill-test` (KILLS=30,
SEED=1).

With AHEAD=2 its rollouts are ahead of the learner: then its prompts are counted, and how old its
answers were.
"""

import os
import shutil
from pathlib import Path

import kills
import pytest
from box import Box

KILLS = int(os.environ.get("KILLS", "4"))
SEED = int(os.environ.get("SEED", "1"))
EACH = 5  # kills of one run
AHEAD = int(os.environ.get("AHEAD", "0"))
MORE = (f"rollout.max_staleness={AHEAD}", "rollout.in_flight=interrupt") if AHEAD else ()


@pytest.fixture(scope="module")
def undisturbed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    if AHEAD:  # what is written when depends on the clock: there is nothing to compare with
        return None
    folder = tmp_path_factory.mktemp("undisturbed")
    for name in ("data", "runs"):
        shutil.copytree(toy / name, folder / name)
    box = Box(folder)
    box.reward()
    assert box.train(*kills.RECIPE).wait(kills.START_S) == 0, box.screen
    assert not kills.miscounted(box.run)
    return box.run


@pytest.mark.timeout(3600)
@pytest.mark.fault(
    "a run is killed at random moments and goes on",
    "its records and weights are those of one left alone",
)
@pytest.mark.parametrize("chain", range(-(-KILLS // EACH)))
def test_a_killed_run_goes_on(box: Box, undisturbed: Path | None, chain: int) -> None:
    box.reward()
    count = min(EACH, KILLS - chain * EACH)
    goes_on = None
    for moment in kills.moments(SEED + chain, count):
        goes_on = kills.strike(box, moment, goes_on, MORE)
        state = box.status().get("state") if (box.run / "status.json").exists() else "none"
        assert state == "none" or goes_on or not kills.unkept(box, moment)
        said = box.screen.strip().splitlines()[-1:]
        print(
            f"{moment}: {'the run goes on' if goes_on else state}, {box.steps()} lines; {said}",
            flush=True,
        )
    status = goes_on.wait(kills.START_S) if goes_on else None
    if status != 0:
        assert box.train(*kills.RECIPE, *MORE).wait(kills.START_S) == 0, box.screen
    assert undisturbed is None or not kills.differences(box.run, undisturbed)
    assert not kills.miscounted(box.run)
    assert not kills.too_old(box.run, AHEAD)
    assert not list((box.run / "checkpoints").glob(".*"))
