"""A whole run goes on under one layout after the other: the next step's loss and gradient norm stay
the same.
"""

import shutil
from itertools import pairwise

import pytest
from box import PATIENCE_S, Box

SETTINGS = (
    "run.if_exists=resume",
    "checkpoint.every=1",
    "learner.precision=fp32",
    "model.path=data/toy/model",
    "model.init=random",
    "reward.name=chance:score",
)
KINDS = ("tensor", "pipeline", "context", "data")  # of parallelism
CHAIN = {
    "tp2": (2, 1, 1, 1),
    "pp2": (1, 2, 1, 1),
    "cp2": (1, 1, 2, 1),
    "dp2": (1, 1, 1, 2),
    "one": (1, 1, 1, 1),
}


def go_on(box: Box, layout: str, steps: int) -> dict[str, float]:
    """The line of the last step."""
    sizes = [
        f"learner.{kind}_parallel={size}" for kind, size in zip(KINDS, CHAIN[layout], strict=True)
    ]
    assert box.train(*SETTINGS, *sizes, f"run.steps={steps}").wait(PATIENCE_S) == 0, box.screen
    lines = box.metrics()
    assert [line["progress/step"] for line in lines] == list(range(steps + 1))
    return lines[-1]


@pytest.mark.timeout(3600)
@pytest.mark.fault(
    "a run goes on as TP2, PP2, CP2, DP2 and on one rank",
    "loss and gradient norm are those of the layout before",
)
def test_a_chain_of_layouts(box: Box) -> None:
    box.reward(0)
    go_on(box, "tp2", 2)
    for steps, (before, after) in enumerate(pairwise(CHAIN), 3):
        with Box(box.folder / before) as copy:  # goes on from the same checkpoint as it was
            for name in ("data", "runs"):
                shutil.copytree(box.folder / name, copy.folder / name, symlinks=True)
            copy.reward(0)
            expected = go_on(copy, before, steps)
        found = go_on(box, after, steps)
        for name in ("loss/total", "optim/grad_norm", "reward/mean"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), (
                before,
                after,
                name,
            )
