"""Whole runs: strangers' files in the sync folder, empty packs, engines killed between patches."""

import time

import pytest
from box import PATIENCE_S, Box


@pytest.mark.fault(
    "packs hold no response token, links of strangers lie in sync.dir", "the run ends well"
)
def test_empty_packs_and_odd_files(box: Box) -> None:
    folder = box.folder / "sync"
    folder.mkdir()
    for name, target in (
        ("self", "megatron-rl-sync-self"),
        ("none", "nowhere"),
        ("root", "/"),
    ):
        (folder / f"megatron-rl-sync-{name}").symlink_to(target)
    settings = (
        "run.steps=2",
        f"sync.dir={folder}",
        "quantization.smoothing=0.5",
        "learner.tokens_per_microbatch=6",
    )
    assert box.train(*settings).wait(PATIENCE_S) == 0, box.screen
    assert box.status()["state"] == "finished"
    assert len(list(folder.iterdir())) == 3


@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "an engine is killed while it gets patches of weights", "it returns with those of the last sync"
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_killed_between_patches(box: Box, ranks: int) -> None:
    """An engine of two ranks reads shards of its own; the probe looks at each version."""
    settings = (f"sampler.tensor_parallel={ranks}", "sync.full_every=4", "sync.probe_every=1")
    box.begin(*settings, steps=2)
    for delay_s in (0.0, 0.4, 0.9):
        time.sleep(delay_s)
        (engine,) = box.processes("megatron_rl.engine.child")
        engine.kill()
        box.goes_on(2)
    found = box.metrics()
    assert sum(line.get("rollout/restarts", 0) for line in found) >= 3
    assert all(line["sync/probe_abs_diff"] <= line["sync/probe_budget"] for line in found)
