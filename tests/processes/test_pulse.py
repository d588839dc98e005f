"""What a rank tells of itself, and that the time in which it was stopped does not count."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import wait_for

from megatron_rl.processes import pulse
from megatron_rl.processes.process import state_of
from megatron_rl.processes.pulse import Beats, Pulse, file_of

RANK = """
import sys, time
from pathlib import Path
from megatron_rl.processes import pulse
pulse.BEAT_S = 0.2
pulse.Beats(Path(sys.argv[1]), 0).start()
with pulse.phase("update"), pulse.waiting("engine", 9.0, "sampler.request_timeout_s"):
    time.sleep(1000)
"""


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Pulse:
    fresh = Pulse()
    monkeypatch.setattr(pulse, "PULSE", fresh)
    return fresh


def told(folder: Path) -> dict:
    return json.loads(file_of(folder, 0).read_text())


@pytest.fixture
def beats(mine: Pulse, tmp_path: Path) -> Beats:
    file_of(tmp_path, 0).parent.mkdir(parents=True)
    return Beats(tmp_path, 0)


def test_phases_and_waits(mine: Pulse, beats: Beats, tmp_path: Path) -> None:
    beats.beat()
    assert told(tmp_path)["phase"] == "start"
    with mine.phase("sync"):
        with mine.waiting("engine", 9.0, "sampler.request_timeout_s"), mine.phase("inner"):
            beats.beat()
            assert (told(tmp_path)["phase"], told(tmp_path)["entered"]) == ("inner", 2)
            waits = {"whom": "engine", "limit_s": 9.0, "key": "sampler.request_timeout_s"}
            assert told(tmp_path)["waits"] == waits
        beats.beat()
        assert (told(tmp_path)["phase"], told(tmp_path)["waits"]) == ("sync", None)
    beats.beat()
    assert told(tmp_path)["phase"] == "between phases"


def test_silence_grows_until_something_is_done(
    mine: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path, 0).parent.mkdir(parents=True)
    now = [0.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    beats = Beats(tmp_path, 0)
    ages = []
    for passed in (3, 3, 3, 3000):
        now[0] += passed
        beats.beat()
        ages.append(told(tmp_path)["age_s"])
    assert ages == [0, 3, 6, 6 + pulse.AWAKE * pulse.BEAT_S]  # it was asleep for the rest
    mine.mark()
    beats.beat()
    assert told(tmp_path)["age_s"] == 0


def test_without_a_folder_nothing_is_written(mine: Pulse, tmp_path: Path) -> None:
    Beats(tmp_path, 0).beat()
    assert not list(tmp_path.iterdir())


def test_processes_are_named_until_they_end(mine: Pulse) -> None:
    one = subprocess.Popen(["sleep", "1000"])
    mine.own("engine", one)
    assert mine.owned == [("engine", one.pid)]
    one.kill()
    one.wait()
    assert mine.owned == []


def test_a_process_that_waits_says_where_it_stands(tmp_path: Path) -> None:
    file_of(tmp_path, 0).parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)]) as one:
        try:
            wait_for(lambda: file_of(tmp_path, 0).exists() and told(tmp_path)["age_s"] >= 1)
            about = told(tmp_path)
            assert about["pid"] == one.pid
            assert about["stack"][-1].endswith("<module>")
            assert not about["meets"]
            one.send_signal(signal.SIGSTOP)
            wait_for(lambda: state_of(one.pid) == "T")
            beat = told(tmp_path)["beat"]
            time.sleep(0.5)
            assert told(tmp_path)["beat"] == beat
        finally:
            one.kill()
