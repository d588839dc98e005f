"""A whole run goes on under one layout after the other: the next step's loss and gradient norm stay the same."""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest
from box import Box

from megatron_rl.runs.metrics_file import read_metrics

PATIENCE_S = 600
SETTINGS = (
    *("run.if_exists=resume", "checkpoint.every=1", "learner.precision=fp32", "model.path=data/toy/model"),
    *("model.init=random", "reward.name=chance:score"),
)
# the answers of a model that knows nothing differ in it
REWARD = "import zlib\n\n\ndef score(row, key, response):\n    return zlib.crc32(response.encode()) % 7 / 6\n"
CHAIN = {"tp2": (2, 1, 1, 1), "pp2": (1, 2, 1, 1), "cp2": (1, 1, 2, 1), "dp2": (1, 1, 1, 2), "one": (1, 1, 1, 1)}


def go_on(box: Box, layout: str, steps: int) -> dict[str, float]:
    """The line of the last step."""
    tensor, pipeline, context, data = CHAIN[layout]
    sizes = (
        f"learner.tensor_parallel={tensor}",
        f"learner.pipeline_parallel={pipeline}",
        f"learner.context_parallel={context}",
        f"learner.data_parallel={data}",
    )
    assert box.train(*SETTINGS, *sizes, f"run.steps={steps}").wait(PATIENCE_S) == 0, box.screen
    lines = read_metrics(box.run / "metrics.jsonl")
    assert [line["progress/step"] for line in lines] == list(range(steps + 1))
    return lines[-1]


@pytest.mark.timeout(3600)
@pytest.mark.fault(
    "a run goes on as TP2, PP2, CP2, DP2 and on one rank", "loss and gradient norm are those of the layout before"
)
def test_a_chain_of_layouts(box: Box) -> None:
    (box.folder / "chance.py").write_text(REWARD)
    go_on(box, "tp2", 2)
    for steps, (before, after) in enumerate(pairwise(CHAIN), 3):
        copy = Box(box.folder / before)  # goes on from the same checkpoint as it was
        try:
            for name in ("data", "runs"):
                shutil.copytree(box.folder / name, copy.folder / name, symlinks=True)
            (copy.folder / "chance.py").write_text(REWARD)
            expected = go_on(copy, before, steps)
        finally:
            copy.close()
        found = go_on(box, after, steps)
        for name in ("loss/total", "optim/grad_norm", "reward/mean"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-4), (before, after, name)
