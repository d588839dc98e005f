"""Starting and ending the ranks: which failure is reported, and which signals reach whom."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.config.schema import Config, LearnerSection, RunSection
from megatron_rl.processes.owned_folder import held
from megatron_rl.processes.process import STOP_AFTER_STEP, hold, state_of
from megatron_rl.runs.status import mark_status, read_status
from megatron_rl.survival import launch

PATIENCE_S = 120
SECOND_FAILS = """#!/bin/sh
if [ "$RANK" = 1 ]; then echo "ValueError: a bad shard" >&2; exit 1; fi
sleep 0.3
echo "RuntimeError: Connection closed by peer [127.0.0.1]:1" >&2
exit 1
"""
SIGNALLED = """
import os, signal, sys, types
from pathlib import Path
from megatron_rl.config.schema import Config
import megatron_rl.rank as rank
def train(*_):
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGINT)
    print("went on")
sys.modules["megatron_rl.learner"] = types.SimpleNamespace(host=types.SimpleNamespace(require=lambda device: None))
sys.modules["megatron_rl.train"] = types.SimpleNamespace(train=train)
rank.run_rank(Config(), Path("nowhere"))
"""


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_the_rank_that_failed_by_itself_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(SECOND_FAILS)
    stand_in.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(stand_in))
    config = Config(run=RunSection(name="run", root=str(tmp_path)), learner=LearnerSection(tensor_parallel=2))
    gc.disable()  # what nobody refers to any more may be there for long
    try:
        assert launch.launch(config) == 1
        assert not held(tmp_path / "run"), "another attempt of this process finds the place free"
    finally:
        gc.enable()
    assert read_status(tmp_path / "run")["state"] == "failed"
    assert read_status(tmp_path / "run")["reason"] == "rank 1: ValueError: a bad shard"
    said = capsys.readouterr().err
    assert "rank 1 failed" in said
    assert "a bad shard" in said
    assert "\nwhy: no known cause (unknown): rank 1. " in said
    assert read_status(tmp_path / "run")["cause"]["class"] == "unknown"


STAND_IN = """#!{python}
import os, signal, sys, time
from pathlib import Path
from megatron_rl.processes.owned_folder import held
from megatron_rl.processes.process import STOP_AFTER_STEP, release
folder, rank = Path(sys.argv[3]), os.environ["RANK"]
assert sys.argv[1:3] == ["-m", "megatron_rl.rank"] and int(sys.argv[4]) == os.getppid()
{body}
"""
ASKED = """
heard = []
time.sleep(0.2)
signal.signal(STOP_AFTER_STEP, lambda *_: heard.append(1))
release(STOP_AFTER_STEP)
sys.exit(0 if heard else 3)
"""
LISTS = "(folder / f'environment_{rank}').write_text('\\n'.join(f'{k}={v}' for k, v in os.environ.items()))"
STAYS = """
if rank == "0":
    (folder / "status.json").write_text('{"state": "failed", "reason": "no space left"}')
time.sleep(60)
"""


def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, ranks: int = 1, patience_s: float = 600.0
) -> int:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, body=body))
    stand_in.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(stand_in))
    run = RunSection(name="run", root=str(tmp_path), patience_s=patience_s)
    return launch.launch(Config(run=run, learner=LearnerSection(tensor_parallel=ranks)))


@pytest.mark.usefixtures("handlers")
@pytest.mark.fault("USR1 before a rank can act on it", "it is kept, and reaches the driver")
def test_usr1_is_kept_until_the_driver_can_act_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(STOP_AFTER_STEP)
    signal.pthread_kill(threading.get_ident(), STOP_AFTER_STEP)  # other threads of the tests hold nothing
    assert launched(tmp_path, monkeypatch, ASKED) == 0


@pytest.mark.usefixtures("handlers")
@pytest.mark.fault("secrets in the launcher's environment", "rank 0 gets W&B's and the fleet's key, the others none")
def test_what_the_ranks_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MEGATRON_RL_FLEET_KEY", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "x" * 40)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert launched(tmp_path, monkeypatch, LISTS, ranks=2) == 0
    given = [
        dict(line.split("=", 1) for line in (tmp_path / "run" / f"environment_{rank}").read_text().splitlines())
        for rank in range(2)
    ]
    secrets = {"WANDB_API_KEY", "MEGATRON_RL_FLEET_KEY", "HF_TOKEN"}
    assert [secrets & set(one) for one in given] == [{"WANDB_API_KEY", "MEGATRON_RL_FLEET_KEY"}, set()]
    assert given[0]["TMPDIR"] == given[1]["TMPDIR"]
    assert Path(given[0]["TMPDIR"]).name.startswith("megatron-rl-run-")
    assert not Path(given[0]["TMPDIR"]).exists()
    assert given[1]["TORCHINDUCTOR_CACHE_DIR"].endswith("/megatron-rl/inductor")


LEAVES = """
import subprocess
left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
Path(os.environ["LEFT"]).write_text(str(left.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
REMOVES = "import shutil; shutil.rmtree(folder); sys.exit(1)"


@pytest.mark.usefixtures("handlers")
@pytest.mark.fault("what a killed process of a run has started lives on in its own session", "it ends with the run")
def test_orphans_end_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    monkeypatch.setattr(launch, "REAP_S", 0.5)
    other = subprocess.Popen(["sleep", "1000"])
    assert launched(tmp_path, monkeypatch, LEAVES) == 137
    assert state_of(int((tmp_path / "left").read_text())) in ("", "Z")
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.usefixtures("handlers")
@pytest.mark.fault("a run's directory is removed: nobody can write how it ended", "the launcher's last line says so")
def test_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(tmp_path, monkeypatch, REMOVES) == 1
    said = capsys.readouterr().err
    assert "the run's directory cannot be written (run_directory)" in said
    assert said.endswith(f"RecordLost: {tmp_path / 'run'} was removed or moved while the run went on\n")


@pytest.mark.usefixtures("handlers")
@pytest.mark.fault("a rank has said its last word, and stays", "the launcher ends it")
def test_who_does_not_go_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.process, "LEAVE_S", 0.1)
    monkeypatch.setattr(launch, "PEER_GRACE_S", 0.1)
    assert launched(tmp_path, monkeypatch, STAYS, ranks=2) == 1
    assert read_status(tmp_path / "run")["reason"] == "no space left"


STOPS = """
from megatron_rl.processes import pulse
pulse.BEAT_S = 0.2
pulse.Beats(folder, int(rank)).start()
with pulse.phase("update"):
    time.sleep(1)
    if rank == "1":
        (folder / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
"""


@pytest.mark.usefixtures("handlers")
@pytest.mark.fault("a rank is stopped for longer than run.patience_s", "the run ends, and names it")
def test_a_rank_that_stays_stopped_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(tmp_path, monkeypatch, STOPS, ranks=2, patience_s=5.0) == 1
    pid, status = int((tmp_path / "run" / "stopped").read_text()), read_status(tmp_path / "run")
    assert status["state"] == "failed"
    assert status["reason"].startswith(f"rank 1 (process {pid} on ")
    assert "is stopped (SIGSTOP, or a debugger)" in status["reason"]
    assert "in `update`" in status["reason"]
    assert "raise run.patience_s=5" in status["reason"]
    assert (status["stuck"]["process"], status["stuck"]["pid"]) == ("rank 1", pid)
    assert not state_of(pid)
    assert capsys.readouterr().err.rstrip().endswith(f"failed: {status['reason']}")


ALONE = """
import os, signal, sys, time
from pathlib import Path
from megatron_rl.processes import pulse
from megatron_rl.survival.watch import RankGuard
from megatron_rl.survival.watch import Watch
folder, rank, launcher = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None
pulse.BEAT_S = 0.2
beats = pulse.Beats(folder, rank)
beats.each.append(RankGuard(Watch(folder, 5.0, launcher=launcher), rank))
beats.start()
with pulse.phase("update"):
    while (folder / "go on").exists():
        time.sleep(0.1)
        pulse.mark()
    time.sleep(600)
"""


def alone(folder: Path, rank: int, launcher: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", ALONE, str(folder), str(rank), str(launcher)])


def furnished(folder: Path) -> Path:
    (folder / "logs" / "pulse").mkdir(parents=True)
    (folder / "logs" / "attempt_1").mkdir()
    mark_status(folder, "running")
    return folder


@pytest.mark.fault("under srun or torchrun, rank 0 stays stopped", "another one names and ends it, and itself")
def test_ranks_without_a_launcher_look_after_each_other(tmp_path: Path) -> None:
    folder = furnished(tmp_path)
    ranks = [alone(folder, rank) for rank in range(2)]
    try:
        until(lambda: (folder / "logs" / "pulse" / "rank_0.json").exists())
        ranks[0].send_signal(signal.SIGSTOP)
        assert ranks[1].wait(PATIENCE_S) == 1
        assert ranks[0].wait(PATIENCE_S) == -signal.SIGKILL
        assert read_status(folder)["state"] == "failed"
        assert read_status(folder)["stuck"]["process"] == "rank 0"
    finally:
        for one in ranks:
            one.kill()
            one.wait()


@pytest.mark.fault("the launcher is stopped (SIGSTOP)", "a rank names it; nobody ends the run for that")
def test_a_stopped_launcher_is_named_by_a_rank(tmp_path: Path) -> None:
    folder = furnished(tmp_path)
    (folder / "go on").touch()
    launcher = subprocess.Popen(["sleep", "1000"])
    rank = alone(folder, 0, launcher.pid)
    log = folder / "logs" / "attempt_1" / "driver.log"
    try:
        launcher.send_signal(signal.SIGSTOP)
        until(lambda: log.exists() and "the launcher (process" in log.read_text())
        launcher.send_signal(signal.SIGCONT)
        until(lambda: "goes on after" in log.read_text())
        assert rank.poll() is None
    finally:
        for one in (rank, launcher):
            one.kill()
            one.wait()


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


HANGS = """
import atexit, ctypes, sys, types
from pathlib import Path
from megatron_rl.config.schema import Config
import megatron_rl.rank as rank
def train(*_):
    atexit.register(ctypes.PyDLL(None).sleep, 300)  # with the interpreter in its hands
    raise ValueError("no space left on device")
rank.process.LEAVE_S = 1
sys.modules["megatron_rl.learner"] = types.SimpleNamespace(host=types.SimpleNamespace(require=lambda device: None))
sys.modules["megatron_rl.train"] = types.SimpleNamespace(train=train)
rank.run_rank(Config(), Path("nowhere"))
"""


@pytest.mark.fault("a rank that has failed waits for ever at its exit", "it ends after a limit, with status 1")
def test_a_rank_leaves_after_its_last_word() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS],
        env={**os.environ, "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: no space left on device\n")


def test_a_lost_connection_is_not_a_cause() -> None:
    lost = "RuntimeError: Connection closed by peer"
    assert launch.first_cause({0: lost, 2: "killed"}) == 2
    assert launch.first_cause({0: "ValueError", 1: lost}) == 0
    assert launch.first_cause({1: lost, 2: lost}) == 1
    assert launch.first_cause({}) == 0


@pytest.mark.fault("a rank is killed", "status and last line name rank, signal and a likely cause; exit status 137")
@pytest.mark.usefixtures("handlers")
def test_a_killed_rank_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = tmp_path / "python"
    pulse = tmp_path / "run" / "logs" / "pulse" / "rank_1.json"
    last = json.dumps({"rank": 1, "pid": 0, "beat": 7, "phase": "update"})
    stand_in.write_text(f"#!/bin/sh\nif [ $RANK = 1 ]; then echo '{last}' >{pulse}; kill -9 $$; fi\nexec sleep 60\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(stand_in))
    monkeypatch.setattr(launch, "PEER_GRACE_S", 0.1)
    config = Config(run=RunSection(name="run", root=str(tmp_path)), learner=LearnerSection(tensor_parallel=2))
    assert launch.launch(config) == 137
    status = read_status(tmp_path / "run")
    assert (status["state"], status["reason"]) == ("failed", "rank 1: ended by SIGKILL (out of memory?)")
    log = tmp_path / "run" / "logs" / "attempt_1" / "rank_1.log"
    cause = status["cause"]
    assert (cause["class"], cause["process"], cause["log"]) == ("dead_process", "rank 1", str(log))
    assert cause["phase"] == "update"
    *_, why, last = capsys.readouterr().err.rstrip().splitlines()
    assert why.startswith("why: a process was killed (dead_process): rank 1, in update. SIGKILL comes from outside.")
    assert why.endswith(f"Its log is {log}.")
    assert last == "failed: rank 1: ended by SIGKILL (out of memory?)"


LOST = "RuntimeError: Connection closed by peer"
OWN = "SamplerError: the sampler's process ended"


@pytest.mark.fault("a rank only followed another one", "the cause is not overwritten by what it said")
@pytest.mark.parametrize(
    ("state", "reason", "stopping", "rank", "expected"),
    [
        ("failed", OWN, None, 0, ("failed", OWN)),
        ("failed", OWN, None, 1, ("failed", OWN)),  # the driver is still writing its report
        ("failed", LOST, None, 1, ("failed", "rank 1: why")),
        ("stopped", "stopped by SIGTERM", None, 1, ("failed", "rank 1: why")),  # this process has ended it
        ("stopped", "stopped by SIGTERM", None, 0, ("stopped", "stopped by SIGTERM")),  # somebody else has
        ("running", "", None, 0, ("failed", "rank 0: why")),
        ("running", "", None, None, ("finished", "")),  # it could not say so
        ("finished", "", None, 1, ("finished", "")),
        ("stopped", "stopped after step 4", "stopped by SIGTERM", None, ("stopped", "stopped after step 4")),
        ("failed", LOST, "stopped by SIGTERM", 1, ("failed", "rank 1: why")),
        ("finished", "", "stopped by SIGTERM", None, ("finished", "")),
        ("running", "", "stopped by SIGTERM", None, ("stopped", "stopped by SIGTERM")),
    ],
)
def test_whose_word_counts(
    state: str, reason: str, stopping: str | None, rank: int | None, expected: tuple[str, str]
) -> None:
    assert launch.ending({"state": state, "reason": reason}, stopping, rank, "why") == expected


def test_the_error_is_found_in_what_a_log_ends_with() -> None:
    noise = "(MainProcess pid=8) INFO 11-22 03:15:43 [block_pool.py:861] Successfully reset prefix cache"
    assert launch.last_error(["Traceback", "[rank1]: ValueError: a bad shard", noise]) == "ValueError: a bad shard"
    assert launch.last_error(["megatron_rl.runs.disk.RecordLost: no room", "  at exit"]).endswith("no room")
    assert launch.last_error(["what is this"]) == "what is this"
    assert launch.last_error([]) == ""


def test_signals_to_every_task_leave_the_followers_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED],
        env={**os.environ, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
