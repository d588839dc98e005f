"""Rollouts ahead of the learner, and what happens in the middle of the overlap."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import kills
import pytest
from box import Box, wait_for

from megatron_rl.checkpoint.checkpoints import steps

SECONDS = 600
ENDLESS = ("run.steps=100000", "checkpoint.every=2", "checkpoint.keep_last=2")
AHEAD = ("rollout.ahead=2", "rollout.in_flight=continue")


@pytest.mark.fault("an engine or a server dies ahead of the learner", "it comes back, and no prompt is lost or doubled")
@pytest.mark.parametrize("recipe", ["quickstart.yaml", "quickstart_fleet.yaml"])
def test_a_killed_engine(box: Box, recipe: str) -> None:
    box.train(*ENDLESS, *AHEAD, recipe=recipe)
    wait_for(lambda: box.steps() >= 4, SECONDS, f"steps: {box.screen}")
    for wait_s in (0.0, 0.3):  # wherever in a step that is
        time.sleep(wait_s)
        engine = "megatron_rl.engine." + ("server" if "fleet" in recipe else "child")
        box.processes(engine)[0].kill()
        kills.goes_on(box)
    kills.whole(box)
    assert sum(line.get("rollout/restarts", 0) for line in box.metrics()) >= 2


@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "each kind of process is killed (SIGKILL) ahead of the learner, then all", "resumed, no prompt is lost or doubled"
)
def test_every_kind_of_process(box: Box) -> None:
    kills.prepare(box.folder)
    more = ("rollout.ahead=1", "rollout.in_flight=continue")
    goes_on = None
    for line, victim in enumerate(("engine", "reward worker", "rank 1", "launcher", "rank 0", "everything"), 2):
        goes_on = kills.strike(box, kills.Moment(victim, line, 0.3), goes_on, more)
        assert bool(goes_on) == (victim in kills.REPLACED), box.screen
    assert box.train(*kills.RECIPE, *more).wait(SECONDS) == 0, box.screen
    assert not kills.miscounted(box.run)
    assert not kills.too_old(box.run, 1)


@pytest.mark.fault("an update is refused twice, ahead of the learner", "the run goes on while its batches are young")
def test_a_refused_update(box: Box) -> None:
    folder = box.folder / "sync"
    folder.mkdir()
    box.train(*ENDLESS, *AHEAD, f"sync.dir={folder}")
    wait_for(lambda: box.steps() >= 4, SECONDS, f"steps: {box.screen}")
    enough = threading.Event()
    thread = threading.Thread(target=flip_every_version, args=(folder, enough))
    thread.start()
    try:
        wait_for(lambda: "is left out" in box.screen, SECONDS, f"a version that is left out: {box.screen}")
    finally:
        enough.set()
        thread.join()
    kills.goes_on(box)
    assert max(line.get("sync/refused", 0) for line in box.metrics()) == 1
    kills.whole(box)


def flip_every_version(folder: Path, enough: threading.Event) -> None:
    seen: set[tuple[str, int]] = set()
    while not enough.is_set():
        for manifest in folder.glob("**/manifest-000.json"):
            try:
                key = str(manifest), manifest.stat().st_mtime_ns
                if key in seen:
                    continue
                seen.add(key)
                with (manifest.parent / "bucket-000-0000.bin").open("r+b") as bucket:
                    byte = bucket.read(1)[0]
                    bucket.seek(0)
                    bucket.write(bytes([byte ^ 1]))
            except OSError:  # taken away meanwhile
                continue
        time.sleep(0.0005)


@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "USR1, TERM or Ctrl-C ahead of the learner", "what was trained is kept, and the run goes on from there"
)
def test_asked_to_stop(box: Box) -> None:
    step, resumed = 0, "run.if_exists=resume"
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        run = box.train(*ENDLESS, *AHEAD, resumed)
        after = step + 3
        further = lambda run=run, after=after: box.steps() > after or run.poll() is not None  # noqa: E731
        wait_for(further, SECONDS, f"steps: {box.screen}")
        run.send_signal(number)
        run.wait(SECONDS)
        wait_for(lambda: not box.processes(), 60, "processes are left")
        assert box.status()["state"] == "stopped", box.status()
        step, kept = box.status()["step"], max(steps(box.run / "checkpoints"))
        assert step >= after
        assert kept - step in (0, 1), "an update that was under way is kept, its step ends when the run goes on"
        assert not kills.miscounted(box.run, kept)
    more = (resumed, f"run.steps={step + 3}", "run.resume_allow=[run.steps]")
    assert box.train(*ENDLESS, *AHEAD, *more).wait(SECONDS) == 0, box.screen
    assert not kills.miscounted(box.run, step + 3)
    assert not kills.too_old(box.run, 2)
