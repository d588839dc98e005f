"""Ownership of a run directory: one live run at a time, then the next."""

import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from run_factory import make_config, make_yaml, start

from megatron_rl.config import ConfigError, load
from megatron_rl.config.schema import IfExists
from megatron_rl.tracking import run_dir
from megatron_rl.tracking.record import Recorder
from megatron_rl.tracking.run_dir import RunDir, RunDirectoryUsed, check_run_dir, open_run
from megatron_rl.tracking.status import known_status, mark_status, read_status

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from pathlib import Path
from megatron_rl.config.schema import IfExists
from megatron_rl.tracking.run_dir import open_run
run, _ = open_run(Path(sys.argv[1]), IfExists.refuse, "run: {name: run}")
run.metrics.write_text(sys.argv[2])
print("open", flush=True)
sys.stdin.read()
"""
STEP_1 = '{"progress/step": 1}\n'


def claim(path: Path, if_exists: IfExists = IfExists.refuse) -> tuple[RunDir, str]:
    return open_run(path, if_exists, make_yaml(make_config(), path.name))


def record(path: Path, if_exists: IfExists = IfExists.refuse) -> Recorder:
    return start(path, if_exists=if_exists)


Holder = subprocess.Popen[str]


@pytest.fixture
def holder(run_folder: Path) -> Iterator[Holder]:
    """Another process that owns runs/run, in its first step."""
    words = [sys.executable, "-c", HOLDER, str(run_folder), STEP_1]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.fault(
    "five runs are started at once under one name", "one gets the directory, the others fail"
)
@pytest.mark.parametrize("if_exists", list(IfExists))
@pytest.mark.parametrize("old", [False, True])
def test_of_many_starts_one_wins(tmp_path: Path, if_exists: IfExists, old: bool) -> None:
    together = threading.Barrier(5)

    def begin(path: Path) -> RunDir | str:
        together.wait()
        try:
            return claim(path, if_exists)[0]
        except RunDirectoryUsed as error:
            return str(error)

    for number in range(6):
        path = tmp_path / f"run_{number}"
        if old:
            path.mkdir()
            (path / "metrics.jsonl").write_text(STEP_1)
        with ThreadPoolExecutor(5) as pool:
            ended = list(pool.map(begin, [path] * 5))
        refused = [one for one in ended if isinstance(one, str)]
        kept = len(ended) - len(refused)
        assert kept == (0 if old and if_exists is IfExists.refuse else 1), refused
        assert all("run.name" in text for text in refused)
        if old:
            archived = [entry.name for entry in tmp_path.glob(f"{path.name}.*")]
            assert archived == ([f"{path.name}.1"] if kept else [])


@pytest.mark.fault(
    "another start moves the directory while this one takes its lock",
    "this one has the new directory",
)
def test_a_directory_that_is_moved_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    hold = run_dir.hold
    moved = list[Path]()
    path.mkdir()
    (path / "metrics.jsonl").write_text(STEP_1)

    def meanwhile(folder: Path) -> object:
        if not moved:
            moved.append(folder.rename(tmp_path / "run.1"))
        return hold(folder)

    monkeypatch.setattr(run_dir, "hold", meanwhile)
    assert claim(path, IfExists.archive)[0].path == path
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "run.1"]


@pytest.mark.fault(
    "a run is started with the name of one that goes on", "it is refused, archive or not"
)
@pytest.mark.parametrize("if_exists", list(IfExists))
def test_a_live_run_is_neither_moved_nor_claimed(
    tmp_path: Path, holder: Holder, if_exists: IfExists
) -> None:
    for attempt in (check_run_dir, claim, record):
        with pytest.raises(
            RunDirectoryUsed, match=rf"active run \(process {holder.pid} on .*run\.name=run_2"
        ):
            attempt(tmp_path / "run", if_exists)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert known_status(tmp_path / "run")["state"] == "starting"


@pytest.mark.fault(
    "the process that owns a run is killed", "the run counts as failed, its name can be had again"
)
def test_a_dead_run_is_known_as_one(tmp_path: Path, run_folder: Path, holder: Holder) -> None:
    holder.kill()
    holder.wait()
    status = known_status(run_folder)
    assert status["state"] == "failed"
    assert str(holder.pid) in status["reason"]
    assert status["cause"]["class"] == "Gone"
    assert str(status["heartbeat"]) in status["reason"]
    with pytest.raises(RunDirectoryUsed, match=r"run\.if_exists=archive"):
        claim(run_folder)
    _, moved = claim(run_folder, IfExists.archive)
    assert "run.1" in moved
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == STEP_1


@pytest.mark.fault(
    "the process that owns a run is killed before the first step", "its name is free"
)
def test_a_run_that_was_killed_at_its_start(tmp_path: Path, holder: Holder) -> None:
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    holder.kill()
    holder.wait()
    _, moved = claim(tmp_path / "run")
    assert "ended without a report" in moved
    assert (tmp_path / "run.1" / "logs" / "attempt_1").is_dir()


@pytest.mark.fault(
    "a run is started while another start goes on with it", "the refusal names that one"
)
def test_a_refusal_names_who_holds_the_directory(run_folder: Path, holder: Holder) -> None:
    last = {"pid": 2899, "host": "node7", "heartbeat": "2026-01-01T01:30:40+00:00"}
    # as it was copied with the folder, or left by the attempt before
    mark_status(run_folder, "running", **last)
    for attempt in (check_run_dir, claim):
        with pytest.raises(RunDirectoryUsed, match=rf"process {holder.pid} on ") as refused:
            attempt(run_folder, IfExists.resume)
        assert not [word for word in ("2899", "node7", "01:30:40") if word in str(refused.value)]


@pytest.mark.fault("the launcher is killed while a rank lives", "the directory stays the run's")
def test_the_ranks_hold_the_lock_too(run_folder: Path) -> None:
    run, _ = claim(run_folder)
    assert run.lock is not None
    rank = subprocess.Popen(
        ["cat"],
        stdin=subprocess.PIPE,
        pass_fds=[run.lock.fileno()],
    )
    run.lock.close()
    with pytest.raises(RunDirectoryUsed, match="active"):
        claim(run_folder, IfExists.archive)
    gone = f"boot {platform.node()} 999999999\n"  # the process that took it
    (run_folder / "owner.lock").write_text(gone)
    with pytest.raises(RunDirectoryUsed, match="999999999"):
        claim(run_folder, IfExists.archive)
    rank.communicate()
    assert "run.1" in claim(run_folder, IfExists.archive)[1]


@pytest.mark.fault("a run goes on where its lock cannot be seen", "its last sign of life decides")
@pytest.mark.parametrize(
    ("ago", "state"), [(timedelta(minutes=1), "running"), (timedelta(hours=1), "failed")]
)
def test_on_another_machine_the_heartbeat_counts(
    run_folder: Path, ago: timedelta, state: str
) -> None:
    run, _ = claim(run_folder)
    assert run.lock is not None
    run.lock.close()
    seen = (datetime.now(UTC) - ago).isoformat(timespec="seconds")
    mark_status(run.path, "running", host="elsewhere", heartbeat=seen)
    run.metrics.write_text(STEP_1)
    assert known_status(run.path)["state"] == state
    if state == "running":
        with pytest.raises(RunDirectoryUsed, match="elsewhere"):
            claim(run.path, IfExists.archive)
    else:
        claim(run.path, IfExists.archive)


@pytest.mark.fault(
    "a run ends before its first step", "its name is free, and its logs are kept beside it"
)
@pytest.mark.parametrize("lines", [0, 1])
def test_a_run_that_never_began_makes_room(tmp_path: Path, run_folder: Path, lines: int) -> None:
    recorder = record(run_folder)
    (recorder.run.logs / "rank_0.log").write_text("why\n")
    if lines:
        recorder.log(0, {})
    recorder.close("failed", "ValueError: a bad shard")
    check_run_dir(run_folder, IfExists.refuse)
    _, moved = claim(run_folder)
    assert "run.1" in moved
    assert "a bad shard" in moved
    assert (tmp_path / "run.1" / "logs" / "attempt_1" / "rank_0.log").read_text() == "why\n"


@pytest.mark.fault("a run has made a step, or was finished", "its name stays taken")
@pytest.mark.parametrize("finished", [True, False])
def test_what_has_begun_is_kept(tmp_path: Path, finished: bool) -> None:
    recorder = record(tmp_path / "run")
    if not finished:
        recorder.log(1, {})
    recorder.close("finished" if finished else "failed")
    before = sorted(tmp_path.rglob("*"))
    for attempt in (check_run_dir, claim):
        with pytest.raises(RunDirectoryUsed, match=r"run\.name=.*run\.if_exists=archive"):
            attempt(tmp_path / "run", IfExists.refuse)
    assert sorted(tmp_path.rglob("*")) == before


ODD = (
    "",
    ".",
    "..",
    "a/b",
    "/tmp/x",
    "../x",
    "a/../../x",
    "-rf",
    "a\nb",
    "a\x1bb",
    "a\x7fb",
    " a",
    "x" * 256,
    "é" * 128,
)


@pytest.mark.fault("a run's name is no name of a folder", "it is refused by its key")
@pytest.mark.parametrize("name", ODD)
def test_a_name_is_one_component(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"run": {"name": name}}))
    with pytest.raises(ConfigError, match=r"run\.name is "):
        load(tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text("run: {steps: 1}")
    with pytest.raises(ConfigError, match=r"run\.name|override"):
        load(tmp_path / "mine.yaml", [f"run.name={json.dumps(name)}"])


@pytest.mark.fault("a recipe's file is called -x.yaml", "the name that it would give is refused")
def test_a_files_stem_is_a_name_too(tmp_path: Path) -> None:
    (tmp_path / "-x.yaml").write_text("run: {steps: 1}")
    with pytest.raises(ConfigError, match=r"run\.name is -x"):
        load(tmp_path / "-x.yaml")
    assert load(tmp_path / "-x.yaml", ["run.name=2024"]).run.name == "2024"


@pytest.mark.fault("run.root is a place where nothing can be made", "a sentence names it")
@pytest.mark.parametrize("root", ["/proc/x", "/dev/null/x"])
def test_a_place_that_takes_no_folder(root: str) -> None:
    with pytest.raises(ConfigError, match=f"run.root={root}: "):
        claim(Path(root) / "run")


@pytest.mark.fault(
    "a strange status.json lies in the directory", "it is refused or moved as any used one"
)
@pytest.mark.parametrize("text", ["", "[]", '{"state": "running"}', "{", "\xff"])
def test_an_old_or_odd_status(run_folder: Path, text: str) -> None:
    run_folder.mkdir()
    (run_folder / "status.json").write_text(text, encoding="latin-1")
    with pytest.raises(RunDirectoryUsed, match="is used"):
        claim(run_folder)
    assert "run.1" in claim(run_folder, IfExists.archive)[1]
    assert read_status(run_folder)["pid"] == os.getpid()
