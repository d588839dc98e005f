"""Starting and ending the ranks: which failure is reported, and which signals reach whom."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import wait_for

from megatron_rl.config.schema import Config, LearnerSection, RunSection
from megatron_rl.processes.folder_lock import held
from megatron_rl.processes.process import STOP_AFTER_STEP, hold, state_of
from megatron_rl.supervision import launch
from megatron_rl.tracking.causes import LOST_PEER, Cause
from megatron_rl.tracking.status import mark_status, read_status

PATIENCE_S = 120
pytestmark = pytest.mark.usefixtures("handlers")


STAND_IN = """#!{python}
import os, signal, sys, time
from pathlib import Path
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
Launched = Callable[..., int]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Launches ranks that do what a script says, whose head is that of a rank unless it has its
    own.
    """

    def launched(script: str, ranks: int = 1, hang_timeout_s: float = 600.0) -> int:
        stand_in = tmp_path / "python"
        own = script.startswith("#!")
        stand_in.write_text(script if own else STAND_IN.format(python=sys.executable, body=script))
        stand_in.chmod(0o755)
        monkeypatch.setattr(launch.sys, "executable", str(stand_in))
        run = RunSection(name="run", root=str(tmp_path), hang_timeout_s=hang_timeout_s)
        return launch.launch(Config(run=run, learner=LearnerSection(tensor_parallel=ranks)))

    return launched


SECOND_FAILS = """
import os
from pathlib import Path
from megatron_rl.tracking.causes import write_end
if rank == "1":
    error = ValueError("bad")
else:
    time.sleep(0.3)
    error = RuntimeError("Connection closed by peer [127.0.0.1]:1")
write_end([Path(os.environ["TMPDIR"])], int(rank), error)
print("the last line", file=sys.stderr)
sys.exit(1)
"""


def test_the_rank_that_failed_by_itself_is_reported(
    run_folder: Path, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    gc.disable()  # unreferenced objects may stay alive for long
    try:
        assert launched(SECOND_FAILS, ranks=2) == 1
        assert not held(run_folder), "another attempt of this process finds the place free"
    finally:
        gc.enable()
    status = read_status(run_folder)
    said = capsys.readouterr().err
    assert (status["state"], status["reason"]) == ("failed", "rank 1: ValueError: bad")
    assert "rank 1 failed" in said
    assert "the last line" in said
    assert (status["cause"]["class"], status["cause"]["process"]) == ("ValueError", "rank 1")


@pytest.mark.fault("USR1 before a rank can act on it", "it is kept, and reaches the driver")
def test_usr1_is_kept_until_the_driver_can_act_on_it(launched: Launched) -> None:
    hold(STOP_AFTER_STEP)
    # other threads of the tests hold nothing
    signal.pthread_kill(threading.get_ident(), STOP_AFTER_STEP)
    assert launched(ASKED) == 0


@pytest.mark.fault(
    "secrets in the launcher's environment",
    "rank 0 gets W&B's and the fleet's key, the others none",
)
def test_what_the_ranks_are_given(
    run_folder: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "MEGATRON_RL_FLEET_KEY", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "x" * 40)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert launched(LISTS, ranks=2) == 0
    given = [
        dict(
            line.split("=", 1)
            for line in (run_folder / f"environment_{rank}").read_text().splitlines()
        )
        for rank in range(2)
    ]
    secrets = {"WANDB_API_KEY", "MEGATRON_RL_FLEET_KEY", "HF_TOKEN"}
    assert [secrets & set(one) for one in given] == [
        {"WANDB_API_KEY", "MEGATRON_RL_FLEET_KEY"},
        set(),
    ]
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


@pytest.mark.fault(
    "what a killed process of a run has started lives on in its own session", "it ends with the run"
)
def test_orphans_end_with_the_run(
    tmp_path: Path, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    monkeypatch.setattr(launch, "REAP_S", 0.5)
    other = subprocess.Popen(["sleep", "1000"])
    assert launched(LEAVES) == 137
    assert state_of(int((tmp_path / "left").read_text())) in ("", "Z")
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.fault(
    "a run's directory is removed: its end cannot be recorded",
    "the launcher's last line says so",
)
def test_a_directory_that_is_gone(
    tmp_path: Path, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(REMOVES) == 1
    said = capsys.readouterr().err
    assert "why: RecordLost: rank 0." in said
    assert f"RecordLost: {tmp_path / 'run'} " in said.splitlines()[-1]


STOPS = """
from megatron_rl.processes import heartbeat
heartbeat.BEAT_S = 0.2
heartbeat.Heartbeat(folder, int(rank)).start()
with heartbeat.phase("update"):
    time.sleep(1)
    if rank == "1":
        (folder / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
"""


@pytest.mark.fault(
    "a rank is stopped for longer than run.hang_timeout_s", "the run ends, and names it"
)
def test_a_rank_that_stays_stopped_ends_the_run(
    run_folder: Path, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(STOPS, ranks=2, hang_timeout_s=5.0) == 1
    pid = int((run_folder / "stopped").read_text())
    status = read_status(run_folder)
    assert status["state"] == "failed"
    assert status["reason"].startswith(f"rank 1 (process {pid} on ")
    assert "SIGSTOP" in status["reason"]
    assert "in `update`" in status["reason"]
    assert "run.hang_timeout_s=5" in status["reason"]
    assert status["cause"]["class"] == "Hang"
    assert (status["stuck"]["process"], status["stuck"]["pid"]) == ("rank 1", pid)
    assert not state_of(pid)
    assert capsys.readouterr().err.rstrip().endswith(f"failed: {status['reason']}")


ALONE = """
import os, signal, sys, time
from pathlib import Path
from megatron_rl.processes import heartbeat
from megatron_rl.supervision.watch import RankHangDetector
folder, rank, launcher = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None
heartbeat.BEAT_S = 0.2
beats = heartbeat.Heartbeat(folder, rank)
beats.each.append(RankHangDetector(folder, 5.0, rank, launcher))
beats.start()
with heartbeat.phase("update"):
    while (folder / "go on").exists():
        time.sleep(0.1)
        heartbeat.mark()
    time.sleep(600)
"""


Alone = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    """Starts what ends with the test, in the folder of a run without a launcher: a rank, or another
    program.
    """
    (tmp_path / "logs" / "heartbeat").mkdir(parents=True)
    (tmp_path / "logs" / "attempt_1").mkdir()
    mark_status(tmp_path, "running")
    begun: list[subprocess.Popen[bytes]] = []

    def alone(
        rank: int = 0, launcher: int = 0, program: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        begun.append(
            subprocess.Popen(
                program or [sys.executable, "-c", ALONE, tmp_path, str(rank), str(launcher)]
            )
        )
        return begun[-1]

    yield alone
    for one in begun:
        one.kill()
        one.wait()


@pytest.mark.fault(
    "under srun or torchrun, rank 0 stays stopped", "another one names and ends it, and itself"
)
def test_ranks_without_a_launcher_look_after_each_other(tmp_path: Path, alone: Alone) -> None:
    ranks = [alone(rank) for rank in range(2)]
    wait_for(lambda: (tmp_path / "logs" / "heartbeat" / "rank_0.json").exists())
    ranks[0].send_signal(signal.SIGSTOP)
    assert ranks[1].wait(PATIENCE_S) == 1
    assert ranks[0].wait(PATIENCE_S) == -signal.SIGKILL
    assert read_status(tmp_path)["state"] == "failed"
    assert read_status(tmp_path)["stuck"]["process"] == "rank 0"


@pytest.mark.fault("the launcher is stopped (SIGSTOP)", "a rank names it; the run is not ended")
def test_a_stopped_launcher_is_named_by_a_rank(tmp_path: Path, alone: Alone) -> None:
    (tmp_path / "go on").touch()
    launcher = alone(program=("sleep", "1000"))
    rank = alone(0, launcher.pid)
    log = tmp_path / "logs" / "attempt_1" / "driver.log"
    launcher.send_signal(signal.SIGSTOP)
    wait_for(lambda: log.exists() and "the launcher (process" in log.read_text())
    launcher.send_signal(signal.SIGCONT)
    wait_for(lambda: "continues after" in log.read_text())
    assert rank.poll() is None


RANK = """
import atexit, ctypes, os, signal, sys, types
from pathlib import Path
from megatron_rl.config.schema import Config
import megatron_rl.rank as rank
def train(*_):
    exec(sys.argv[1])
cpu = types.SimpleNamespace(require=lambda device: None)
sys.modules["megatron_rl.learner.modules"] = types.SimpleNamespace(cpu=cpu)
sys.modules["megatron_rl.train"] = types.SimpleNamespace(train=train)
rank.run_rank(Config(), Path("nowhere"))
"""
HANGS = """
rank.process.LEAVE_S = 1
atexit.register(ctypes.PyDLL(None).sleep, 300)  # with the interpreter in its hands
raise ValueError("no space left on device")
"""
SIGNALLED = """
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGINT)
print("went on")
"""
SECRETS = """
print(*(name for name in sorted(os.environ) if os.environ[name] == "canary"))
"""


@pytest.mark.parametrize(
    ("rank", "trains", "status", "out", "err"),
    [
        pytest.param(
            0,
            HANGS,
            1,
            "",
            "ValueError: no space left on device\n",
            marks=pytest.mark.fault(
                "a failed rank waits for ever at its exit", "it ends after a limit, with status 1"
            ),
        ),
        pytest.param(
            1, SIGNALLED, 0, "went on\n", "", id="signals to every task leave the followers alone"
        ),
        pytest.param(
            0,
            SECRETS,
            0,
            "MEGATRON_RL_FLEET_KEY WANDB_API_KEY\n",
            "",
            id="what rank 0 needs is kept",
        ),
        pytest.param(
            1, SECRETS, 0, "\n", "", id="another rank removes every secret from its environment"
        ),
    ],
)
def test_a_rank_by_itself(rank: int, trains: str, status: int, out: str, err: str) -> None:
    keys = dict.fromkeys(("WANDB_API_KEY", "MEGATRON_RL_FLEET_KEY", "HF_TOKEN"), "canary")
    command = [sys.executable, "-c", RANK, trains]
    env = {**os.environ, **keys, "RANK": str(rank)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (status, out), done.stderr
    assert done.stderr.endswith(err)


DIES = """
from megatron_rl.processes import heartbeat
with heartbeat.phase("update"):
    heartbeat.Heartbeat(folder, int(rank)).beat()
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


@pytest.mark.fault(
    "a rank is killed", "status and last line name rank, signal and a likely cause; exit status 137"
)
def test_a_killed_rank_is_named(
    run_folder: Path,
    launched: Launched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launch, "PEER_GRACE_S", 0.1)
    assert launched(DIES, ranks=2) == 137
    status = read_status(run_folder)
    assert status["state"] == "failed"
    assert "SIGKILL (out of memory?)" in status["reason"]
    log = run_folder / "logs" / "attempt_1" / "rank_1.log"
    cause = status["cause"]
    assert (cause["class"], cause["process"], cause["log"]) == ("SIGKILL", "rank 1", str(log))
    assert cause["phase"] == "update"
    *_, why, last = capsys.readouterr().err.rstrip().splitlines()
    assert why == Cause.read(cause).paragraph()
    assert last == f"failed: {status['reason']}"


OWN = {"state": "failed", "reason": "own", "cause": {"class": "SamplerError"}}
LOST = {"state": "failed", "reason": "lost", "cause": {"class": LOST_PEER}}
STOPPED = {"state": "stopped", "reason": "after step 4"}
FINISHED = {"state": "finished", "reason": ""}
RUNNING = {"state": "running", "reason": ""}
TERM = "stopped by SIGTERM"


@pytest.mark.fault(
    "a rank only followed another one", "the cause is not overwritten by what it said"
)
@pytest.mark.parametrize(
    ("said", "stopping", "rank", "expected"),
    [
        (OWN, None, 0, ("failed", "own")),
        (OWN, None, 1, ("failed", "own")),  # the driver is still writing its report
        (LOST, None, 1, ("failed", "why")),
        (LOST, TERM, 1, ("failed", "why")),
        (STOPPED, None, 1, ("failed", "why")),  # this process has ended it
        (STOPPED, None, 0, ("stopped", "after step 4")),  # another process has
        (STOPPED, TERM, None, ("stopped", "after step 4")),
        (RUNNING, None, 0, ("failed", "why")),
        (RUNNING, None, None, ("finished", "")),  # it could not say so
        (RUNNING, TERM, None, ("stopped", TERM)),
        (FINISHED, None, 1, ("finished", "")),
        (FINISHED, TERM, None, ("finished", "")),
    ],
)
def test_whose_word_counts(
    said: dict[str, Any], stopping: str | None, rank: int | None, expected: tuple[str, str]
) -> None:
    failure = None
    if rank is not None:
        failure = launch.Failure(rank, "why", Cause("ValueError", f"rank {rank}"))
    assert launch.ending(said, stopping, failure) == expected
