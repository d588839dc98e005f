"""Before anything loads torch: threads that wait let others run, so that the tests bear a busy
machine.

`make test` runs two workers, and gives each the cores' fair share of threads; a file's tests stay
on one worker.
"""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import preloaded
import pytest
from helpers import Command

from megatron_rl import logs
from megatron_rl.data.toy import write_toy
from megatron_rl.processes.process import SHORT_SPIN

for name, value in SHORT_SPIN.items():
    os.environ.setdefault(name, value)
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests that need a hub start one
gc.set_threshold(1_000_000, 50, 50)
hypothesis.settings.register_profile("here", deadline=None)  # no example is wrong for being slow
hypothesis.settings.load_profile("here")

ROOT = Path(__file__).parent.parent
LONGEST = (  # first, so that no worker is left alone with one at the end
    "test_asked_to_stop.py",
    "test_endings.py",
    "test_async_rollouts.py",
    "test_leftovers.py",
    "test_stopped.py",
    "test_layouts.py",
    "test_converter.py",
    "test_sync.py",
    "test_slurm_signals.py",
    "test_end_to_end.py",
    "test_kills.py",
    "test_fleet.py",
    "test_learner.py",
    "test_loop.py",
    "test_live_updates.py",
    "test_engine_cases.py",
    "test_tensor_parallel_engine.py",
    "test_slurm.py",
    "test_child_engine.py",
    "test_sampler_shards.py",
    "test_architecture.py",
    "test_compare_corrections.py",
    "test_layout_matrix.py",
)
SESSION = ExitStack()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults",
        action="store_true",
        help="only what is marked as a fault, tests/faults/ included",
    )
    parser.addoption(
        "--recipes", action="store_true", help="whole runs of every recipe, made small"
    )
    parser.addoption(
        "--gpu-set", action="store_true", help="tests/gpu_set too, one file at a time: .ci/gpu-set"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whole runs under faults take minutes each: `make faults`. The gpu set is an environment of
    its own.
    """
    wanted = {"faults": config.getoption("--faults"), "gpu_set": config.getoption("--gpu-set")}
    skipped = collection_path.parent == ROOT / "tests" and not wanted.get(
        collection_path.name, True
    )
    return True if skipped else None


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    workers = len(config.getoption("tx", None) or [])
    if workers > 1:  # torch's, in the workers and what they start; an engine takes its own
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers))
        )
    SESSION.enter_context(preloaded.parents())


def pytest_unconfigure() -> None:
    SESSION.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--faults"):
        items[:] = [item for item in items if item.get_closest_marker("fault")]
    for item in items:  # an engine takes half a minute to start: `make test-slow`
        if item.get_closest_marker("engine"):
            item.add_marker("slow")
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A fault's description travels with the result, for the table at the end."""
    report = yield
    if fault := item.get_closest_marker("fault"):
        report.user_properties.append(("fault", fault.args))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not config.getoption("--faults"):
        return
    verdicts: dict[tuple[str, str], str] = {}
    for verdict in ("passed", "skipped", "failed", "error"):  # the worst of a case's tests is last
        for report in terminalreporter.stats.get(verdict, []):
            for name, case in getattr(report, "user_properties", []):
                if name == "fault":
                    verdicts[tuple(case)] = verdict
    terminalreporter.section("faults")
    for (done, follows), verdict in sorted(verdicts.items()):
        terminalreporter.write_line(f"{verdict:8} {done} -> {follows}")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def place(empty: Path) -> Path:
    """A working folder with the toy, and a recipe that could run there."""
    write_toy(empty / "data" / "toy")
    (empty / "mine.yaml").write_text(f"base: {ROOT}/recipes/toy_sft.yaml\n")
    return empty


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture(autouse=True)
def log_handlers() -> Iterator[None]:
    """Log lines of a test go to handlers of its own."""
    before = logs.replace_handlers([])
    yield
    logs.replace_handlers(before)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signals are handled afterwards as they were before."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGURG)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield
    for number, handler in before:
        signal.signal(number, handler)
