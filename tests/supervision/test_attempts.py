"""Further attempts after the end of one."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import write_lines

from megatron_rl.checkpoint.checkpoints import path_of
from megatron_rl.config.schema import CheckpointSection, Config, IfExists, RunSection
from megatron_rl.supervision import attempts
from megatron_rl.supervision.attempts import run_attempts, should_retry
from megatron_rl.tracking.run_dir import RunDir, open_run
from megatron_rl.tracking.status import mark_status, read_status


@pytest.fixture(autouse=True)
def _no_pause(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSE_S", 0.0)


class AttemptsRun:
    """Each start comes so far, keeps that, and ends so."""

    def __init__(self, folder: Path, *ends: tuple[int, str, int]) -> None:
        self.config = Config(
            run=RunSection(name="run", root=str(folder)), checkpoint=CheckpointSection(every=0)
        )
        self.path = folder / "run"
        self._ends = list(ends)
        self.said: list[str] = []
        self.modes: list[IfExists] = []

    def start(self, config: Config) -> int:
        step, state, status = self._ends.pop(0)
        self.modes.append(config.run.if_exists)
        self.path.mkdir(exist_ok=True)
        write_lines(
            self.path / "metrics.jsonl", [{"progress/step": number} for number in range(step + 1)]
        )
        if step and config.checkpoint.every:
            path_of(self.path / "checkpoints", step).mkdir(parents=True, exist_ok=True)
        mark_status(self.path, state, f"because of {step}")
        return status

    def go(self, count: int) -> int:
        return run_attempts(self.start, self.config, count, self.said.append)


@pytest.mark.parametrize(
    ("ends", "count", "status", "starts"),
    [
        ([(3, "finished", 0)], 3, 0, 1),
        ([(3, "stopped", 143)], 3, 143, 1),
        ([(0, "failed", 2)], 3, 2, 1),  # refused
        ([(3, "failed", 1), (5, "finished", 0)], 3, 0, 2),
        ([(3, "failed", 1), (5, "failed", 137)], 2, 137, 2),
        ([(0, "failed", 1), (0, "failed", 1)], 9, 1, 2),
        (
            [
                (3, "failed", 1),
                (3, "failed", 1),
                (4, "failed", 1),
                (4, "failed", 1),
                (4, "failed", 1),
            ],
            9,
            1,
            5,
        ),
    ],
)
@pytest.mark.fault(
    "a run fails, with --attempts", "it goes on while it comes further, and no longer"
)
def test_how_often_a_run_is_started(
    tmp_path: Path, ends: list, count: int, status: int, starts: int
) -> None:
    run = AttemptsRun(tmp_path, *ends)
    assert run.go(count) == status
    assert len(run.modes) == starts
    assert run.modes == [IfExists.refuse, *[IfExists.resume] * (starts - 1)]


def test_a_resumed_run_has_come_as_far_as_it_had(tmp_path: Path) -> None:
    run = AttemptsRun(tmp_path, *[(5, "failed", 1)] * 4)
    run.start(run.config)
    run.config = replace(run.config, run=replace(run.config.run, if_exists=IfExists.resume))
    assert run.go(9) == 1
    assert len(run.modes) == 1 + 2


def test_a_start_counts_slurm_s_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    open_run(tmp_path / "run", IfExists.refuse, "run: {name: run}")
    assert read_status(tmp_path / "run")["restarts"] == "2"


@pytest.mark.fault(
    "a job has ended", "it is queued again where its run may go on, and has come further"
)
@pytest.mark.parametrize(
    ("state", "states", "resumed", "kept", "again"),
    [
        ("stopped", "stopped failed", None, 4, True),
        ("stopped", "stopped failed", 4, 6, True),
        ("stopped", "stopped failed", 4, 4, False),
        ("stopped", "stopped failed", None, None, False),
        ("finished", "stopped failed", None, 4, False),
        ("failed", "failed", None, 4, True),
        ("failed", "failed", 4, 4, False),
        ("stopped", "failed", 4, 6, False),
    ],
)
def test_when_a_job_is_queued_again(
    tmp_path: Path, state: str, states: str, resumed: int | None, kept: int | None, again: bool
) -> None:
    if kept:
        path_of(RunDir(tmp_path).checkpoints, kept).mkdir(parents=True)
    mark_status(tmp_path, state, "why it ended", resumes_after=resumed)
    is_worth_it, why = should_retry(tmp_path, states.split())
    assert is_worth_it is again
    assert "why it ended" in why


@pytest.mark.fault(
    "a job fails before its run has begun",
    "it is not queued again for what the start before has left",
)
def test_a_start_that_did_not_come_to_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path_of(RunDir(tmp_path).checkpoints, 4).mkdir(parents=True)
    mark_status(tmp_path, "failed", "why it ended", restarts="1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert should_retry(tmp_path, ["failed"])[0]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert not should_retry(tmp_path, ["failed"])[0]
