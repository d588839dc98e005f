"""Rewards in worker processes: order; exceptions, deadlines and deaths become scores, no hang."""

import os
import signal
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import wait_for

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import RewardSection
from megatron_rl.processes.process import state_of
from megatron_rl.rewards import user_process
from megatron_rl.rewards.functions import LONGEST_NAME, MOST_DETAILS
from megatron_rl.rewards.pool import RewardPool, RewardsHang
from megatron_rl.rewards.task import Score, Task
from megatron_rl.types import Verdict

PATIENCE_S = 120.0
# the deadline is missed by one answer, and is what another may take on a busy machine
late = pytest.mark.parametrize("timeout_s", [5.0], indirect=True)


def scored(pool: RewardPool, *tasks: tuple[dict, str]) -> list[Score]:
    return pool.score([Task(row, response) for row, response in tasks])


def number(value: float) -> Score:
    return Score(value, Verdict.right if value >= 1 else Verdict.wrong)


MODULE = """
import os, stat, time

class Mute(Exception):
    def __str__(self):
        raise ValueError

def throw(error):
    raise error

ODD = {
    "sleep": lambda: time.sleep(999), "die": lambda: os._exit(7), "nan": lambda: float("nan"), "text": lambda: "1.0",
    "raise": lambda: throw(ValueError("no digits")), "exit": lambda: throw(SystemExit(3)), "mute": lambda: throw(Mute),
    "interrupt": lambda: throw(KeyboardInterrupt("x")), "generator": lambda: throw(GeneratorExit("y")),
}

def by_word(row, answer_key, response):
    print("what a reward prints is not an answer")
    if response in ODD:
        return ODD[response]()
    if response == "slow":
        open(row["begun"], "w").close()
        time.sleep(1)
        return 8.0
    if response == "names":
        return {"score": 3.0, "half \\ud83d": 2.0, **{f"{each}{'n' * 100}": 1.0 for each in range(20_000)}}
    if response.startswith("write "):
        for descriptor in range(3, 1024):
            try:
                if os.path.exists(f"/proc/self/fd/{descriptor}") and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.write(descriptor, bytes.fromhex(response.removeprefix("write ")))
            except OSError:
                pass
    if response == "fork" and os.fork() == 0:
        return 1.0
    if response == "fork":
        os.wait()
        return 0.0
    return float(response)
"""


@pytest.fixture
def timeout_s(request: pytest.FixtureRequest) -> float:
    return getattr(request, "param", PATIENCE_S)


HOSTILE = """
import os, signal, subprocess, sys, time

def run(row, answer_key, response):
    if response == "spawn":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"], start_new_session=True)
        with open(row["pids"], "a") as file:
            file.write(f"{child.pid}\\n")
        orphan = f"sleep 999 & echo $! >> {row['pids']}"
        subprocess.run(["sh", "-c", orphan], start_new_session=True)
        time.sleep(999)
    if response == "eat":
        return len(bytearray(4 << 30))
    if response == "shout":
        for stream in (sys.stdout, sys.stderr):
            stream.write("x" * (1 << 20))
            stream.flush()
        return 1.0
    if response == "seen":
        program = "import os; print(os.environ.get('WANTED'), os.environ.get('WANDB_API_KEY'), os.environ.get('PATH'))"
        seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.split()
        assert seen == ["1", "None", os.environ["PATH"]], seen
        return 1.0
    if response == "signalled":
        child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(999)"], stdout=-1)
        child.stdout.readline()
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        child.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)  # which a program may be ended with, as everywhere
        assert child.wait(60) != 0
        return 1.0
    if response == "surrogate":
        raise ValueError("half a pair: \\ud83d")
    if response.startswith("print"):
        os.write(1, b'{"score": 1.0}\\n')
        subprocess.run([sys.executable, "-c", "print('{\\"id\\": 1, \\"score\\": 1.0}', flush=True)"], check=True)
        os.system("echo checking")
        assert subprocess.run(["cat"], capture_output=True).stdout == b"", "standard input holds tasks"
        for descriptor in range(3, 32):
            try:
                os.write(descriptor, b"")
            except OSError:
                continue
            assert not os.get_inheritable(descriptor), descriptor
        return 0.0
    return float(response)
"""


@contextmanager
def started(
    name: str = "hostile_rewards:run",
    timeout_s: float = PATIENCE_S,
    variables: Sequence[str] = (),
    **keys: Any,
) -> Iterator[RewardPool]:
    pool = RewardPool(RewardSection(name=name, timeout_s=timeout_s, **keys), variables)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewards' modules lie where the tests run."""
    (tmp_path / "odd_rewards.py").write_text(MODULE)
    (tmp_path / "hostile_rewards.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def odd(timeout_s: float) -> Iterator[RewardPool]:
    with started("odd_rewards:by_word", timeout_s, workers=2) as pool:
        yield pool


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> Iterator[RewardPool]:
    monkeypatch.setattr(user_process, "MEMORY_BYTES", 1 << 30)
    with started(timeout_s=timeout_s) as pool:
        yield pool


def test_what_an_answer_prints_is_no_score_and_shifts_none(hostile: RewardPool) -> None:
    scores = scored(hostile, *(({}, word) for word in ("print", "3", "print again", "4", "5")))
    assert scores == [number(value) for value in (0.0, 3.0, 0.0, 4.0, 5.0)]


@pytest.mark.fault(
    "a reward prints megabytes", "the log gets one, and says so once; the scores are right"
)
def test_what_rewards_print_is_limited(capfd: pytest.CaptureFixture[str]) -> None:
    with started(workers=2) as pool:
        assert scored(pool, *[({}, "shout")] * 4) == [number(1.0)] * 4
        pool.close()  # and once more
    said = capfd.readouterr().err
    assert 1 << 20 <= len(said) < (1 << 20) + 500
    assert said.count("left out") == 1


@pytest.mark.fault("a reward asks for a secret of the run", "it sees what `run.variables` names")
def test_a_reward_sees_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANTED", "1")
    monkeypatch.setenv("WANDB_API_KEY", "2")
    with started(variables=["WANTED"]) as pool:
        assert scored(pool, ({}, "seen")) == [number(1.0)]
    with (
        pytest.raises(ConfigError, match=r"run\.variables: NOT_THERE"),
        started(variables=["NOT_THERE"]),
    ):
        pass


@pytest.mark.fault(
    "USR1 and Ctrl-C reach a reward worker", "it goes on, and what it started has not heard of USR1"
)
def test_signals_for_the_driver_leave_rewards_alone() -> None:
    with started() as pool:
        assert scored(pool, ({}, "signalled"), ({}, "3")) == [number(1.0), number(3.0)]


def test_an_error_may_say_anything(hostile: RewardPool) -> None:
    first, second = scored(
        hostile,
        ({}, "surrogate"),
        ({"answer": "\ud83d"}, "2"),
    )
    assert "half a pair" in str(first.error)
    assert second == number(2.0)


@late
def test_what_a_late_reward_has_started_ends_with_it(hostile: RewardPool, tmp_path: Path) -> None:
    (score,) = scored(hostile, ({"pids": str(tmp_path / "pids")}, "spawn"))
    assert "reward.timeout_s" in str(score.error)
    child, orphan = map(int, (tmp_path / "pids").read_text().split())
    wait_for(lambda: {state_of(child), state_of(orphan)} <= {"", "Z"}, seconds=60)


def test_memory_is_limited(hostile: RewardPool) -> None:
    scores = scored(hostile, ({}, "eat"), ({}, "6"))
    assert "MemoryError" in str(scores[0].error)
    assert scores[1] == number(6.0)


@late
def test_a_worker_that_takes_nothing_misses_the_deadline_too(hostile: RewardPool) -> None:
    worker = hostile._workers[0]
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGSTOP)
    scores = scored(
        hostile,
        ({"tests": "x" * (4 << 20)}, "1"),
        ({}, "2"),
    )
    assert "reward.timeout_s" in str(scores[0].error)
    assert scores[1] == number(2.0)


def test_a_worker_that_answers_out_of_turn_is_replaced(hostile: RewardPool) -> None:
    worker = hostile._workers[0]
    worker._channel.send({"id": 99, "task": b'{"row": {}, "response": "7"}'})
    scores = scored(hostile, ({}, "1"), ({}, "2"), ({}, "3"))
    assert "out of turn" in str(scores[0].error)
    assert scores[1:] == [number(2.0), number(3.0)]


def test_a_reward_that_always_hangs_ends_the_run() -> None:
    message = r"reward\.timeout_s: 3[0-2] of the last"
    with (
        started("odd_rewards:by_word", 0.05, workers=2) as pool,
        pytest.raises(RewardsHang, match=message),
    ):
        scored(pool, *[({}, "sleep")] * 4096)


def test_scores_come_in_the_order_of_the_tasks() -> None:
    tasks = [
        ({"answer": str(index)}, f" {index if index % 3 else 'wrong'}\n") for index in range(20)
    ]
    with started("exact_match", workers=3) as pool:
        scores = scored(pool, *tasks)
    assert [score.reward for score in scores] == [float(index % 3 > 0) for index in range(20)]


@late
def test_one_bad_answer_does_not_touch_the_others(odd: RewardPool) -> None:
    scores = scored(
        odd, *(({}, word) for word in ("1", "raise", "2", "sleep", "3", "die", "4", "5"))
    )
    assert [score.reward for score in scores] == [1, 0, 2, 0, 3, 0, 4, 5]
    errors = {place: score.error for place, score in enumerate(scores) if score.error}
    assert list(errors) == [1, 3, 5]
    assert "no digits" in errors[1]
    assert "reward.timeout_s=5" in errors[3]
    assert "died" in errors[5]
    assert [score.reward for score in scored(odd, ({}, "6"), ({}, "7"))] == [6, 7]


@pytest.mark.fault("a reward worker is killed", "its response is scored by the next worker")
def test_who_kills_a_worker_changes_no_score(odd: RewardPool, tmp_path: Path) -> None:
    process = odd._workers[0]._process
    assert process is not None
    begun = tmp_path / "begun"

    def kill() -> None:
        wait_for(begun.exists)
        process.kill()

    threading.Thread(target=kill).start()
    # the first and the last are this worker's
    scores = scored(
        odd,
        ({"begun": str(begun)}, "slow"),
        ({}, "1"),
        ({}, "2"),
    )
    assert process.wait() == -signal.SIGKILL
    assert [score.reward for score in scores] == [8.0, 1.0, 2.0]
    assert [score.error for score in scores] == [None] * 3


NO_SCORES = {
    "nan": "score is nan",
    "text": "the reward is '1.0', expected a number",
    "exit": "SystemExit",
    "interrupt": "KeyboardInterrupt",
    "generator": "GeneratorExit: y",
    "mute": "odd_rewards.Mute",
}


@pytest.mark.fault(
    "a reward gives NaN or text, exits, forks",
    "each is an error with its reason; a fork answers once",
)
def test_what_is_no_score(odd: RewardPool) -> None:
    scores = scored(odd, *(({}, word) for word in (*NO_SCORES, "fork", "2", "fork", "3")))
    assert [score.reward for score in scores] == [0] * len(NO_SCORES) + [0, 2, 0, 3]
    for score, reason in zip(scores, NO_SCORES.values(), strict=False):
        assert score.verdict == Verdict.error
        assert reason in str(score.error)
    assert [score.error for score in scores[-4:]] == [None] * 4


FORGED = [
    b'{"score": 1.0}\n{"id": 1, "score": 1.0}\n',  # read as a length: 2 ** 61 bytes
    struct.pack("<Q", 5) + b"\xa4abc\xff",
    struct.pack("<Q", 100_000) + b"\x91" * 100_000,
    struct.pack("<Q", 2) + b"\x91\x01",
    struct.pack("<Q", 4) + b"\x81\xa2id" + b"\x01",
]


@pytest.mark.fault(
    "a reward writes into every socket that it has",
    "its answer is an error; the others' scores stand",
)
def test_what_a_reward_writes_into_its_channel(odd: RewardPool) -> None:
    tasks = [({}, word) for forged in FORGED for word in (f"write {forged.hex()}", "5", "2", "5")]
    scores = scored(odd, *tasks)
    assert all(score.error for score in scores[::4])
    assert scores[1::2] == [number(5.0)] * (2 * len(FORGED))
    assert scores[2::4] == [number(2.0)] * len(FORGED)
    assert "else than a score" in str(scores[0].error)


def test_own_numbers_are_bounded_and_their_names_are_text(odd: RewardPool) -> None:
    (score,) = scored(odd, ({}, "names"))
    assert (score.reward, score.error) == (3.0, None)
    assert score.details["own/half ?"] == 2.0
    assert len(score.details) == MOST_DETAILS
    assert max(map(len, score.details)) <= len("own/") + LONGEST_NAME


def test_closing_does_not_wait_for_the_tasks_that_are_left(odd: RewardPool) -> None:
    scores: list[Score] = []
    scoring = threading.Thread(target=lambda: scores.extend(scored(odd, *[({}, "sleep")] * 40)))
    scoring.start()
    wait_for(lambda: odd._workers[0]._asked)
    odd.close()
    scoring.join(PATIENCE_S / 2)
    assert len(scores) == 40
    assert all(score.error for score in scores)


@pytest.mark.parametrize("name", ["exact_macth", "no.such.module:f", "json:nothing"])
def test_a_reward_that_cannot_be_imported_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.name"), started(name):
        pass


def test_a_slow_import_is_no_mistake_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_process, "START_TIMEOUT_S", 0.01)
    said = "reward.name: the process for odd_rewards:by_word did not start within 0.01 s: the "
    with pytest.raises(user_process.StartTimeout, match=said), started("odd_rewards:by_word"):
        pass
