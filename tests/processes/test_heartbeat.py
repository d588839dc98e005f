"""A rank's heartbeat: phases, progress, waits, and the processes that it has started."""

import json
import subprocess
from pathlib import Path

import pytest

from megatron_rl.processes import heartbeat
from megatron_rl.processes.heartbeat import Activity, Heartbeat, file_of, phase_of


@pytest.fixture
def activity(monkeypatch: pytest.MonkeyPatch) -> Activity:
    fresh = Activity()
    monkeypatch.setattr(heartbeat, "ACTIVITY", fresh)
    return fresh


def written(folder: Path) -> dict:
    file_of(folder, 0).parent.mkdir(parents=True, exist_ok=True)
    Heartbeat(folder, 0).beat()
    return json.loads(file_of(folder, 0).read_text())


def test_phases_waits_and_progress(activity: Activity, tmp_path: Path) -> None:
    assert written(tmp_path)["phase"] == "start: imports"
    activity.between("start: reading data")
    assert written(tmp_path)["phase"] == "start: reading data"
    with activity.phase("sync"):
        with activity.waiting("engine", 9.0), activity.phase("inner"):
            inner = written(tmp_path)
        assert (inner["phase"], inner["entered"]) == ("inner", 2)
        assert inner["waits"] == {"whom": "engine", "limit_s": 9.0}
        outer = written(tmp_path)
        assert (outer["phase"], outer["waits"]) == ("sync", None)
        assert outer["progress"] > inner["progress"]
    assert written(tmp_path)["phase"] == phase_of(tmp_path, 0) == "between phases"


def test_without_a_folder_nothing_is_written(activity: Activity, tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0).beat()
    assert not list(tmp_path.iterdir())
    assert phase_of(tmp_path, 0) == "start: imports"


def test_processes_are_named_until_they_end(activity: Activity) -> None:
    one = subprocess.Popen(["sleep", "1000"])
    activity.own("engine", one)
    assert activity.owned == [("engine", one.pid)]
    one.kill()
    one.wait()
    assert activity.owned == []
