"""Whole runs whose sync meets damage and strangers, and whose packs hold nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from box import Box, wait_for

SECONDS = 1200


def flip_until_sent_again(box: Box, folder: Path) -> None:
    """A bit of every complete version, as soon as it is there, until one was refused."""
    seen: set[Path] = set()
    end = time.monotonic() + SECONDS
    while "was sent twice" not in box.screen:
        assert time.monotonic() < end, box.screen
        for manifest in set(folder.glob("**/manifest-000.json")) - seen:
            seen.add(manifest)
            with (manifest.parent / "bucket-000-0000.bin").open("r+b") as bucket:
                byte = bucket.read(1)[0]
                bucket.seek(0)
                bucket.write(bytes([byte ^ 1]))
        time.sleep(0.0005)


@pytest.mark.fault("a bit of a version flips on its way", "it is sent again, and the run goes on")
@pytest.mark.parametrize("recipe", ["quickstart.yaml", "quickstart_fleet.yaml"])
def test_a_flipped_bit_ends_no_run(box: Box, recipe: str) -> None:
    folder = box.folder / "sync"
    folder.mkdir()
    run = box.train("run.steps=300", f"sync.dir={folder}", recipe=recipe)
    flip_until_sent_again(box, folder)
    steps = box.steps()
    wait_for(lambda: box.steps() > steps + 2, SECONDS, f"steps after it: {box.screen}")
    assert run.poll() is None
    metrics = [json.loads(line) for line in (box.run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["sync/resent"] for line in metrics) == 1
    assert "corrupt tensor" in box.screen


@pytest.mark.fault("packs hold no response token, links of strangers lie in sync.dir", "the run ends well")
def test_empty_packs_and_odd_files(box: Box) -> None:
    folder = box.folder / "sync"
    folder.mkdir()
    for name, target in (("self", "megatron-rl-sync-self"), ("none", "nowhere"), ("root", "/")):
        (folder / f"megatron-rl-sync-{name}").symlink_to(target)
    settings = ("run.steps=2", f"sync.dir={folder}", "quantization.smoothing=0.5", "learner.tokens_per_microbatch=6")
    assert box.train(*settings).wait(SECONDS) == 0, box.screen
    assert box.status()["state"] == "finished"
    assert len(list(folder.iterdir())) == 3
