"""The budget of a run's directory: the oldest records make room, and nothing goes that the run goes
on from.
"""

import errno
import os
from pathlib import Path

import pytest
from run_factory import make_scored, start

from megatron_rl.config.schema import Config, LogSection
from megatron_rl.runs.disk import GIB, Disk, LineFile, size
from megatron_rl.runs.rollout_file import recorded_steps
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.runs.status import read_status


def furnished(path: Path) -> RunDir:
    """Ten recorded steps of 1000 bytes, three dumps and three attempts of 2000, a checkpoint of
    5000.
    """
    for number in range(1, 11):
        _put(path / "rollouts" / f"step_{number}.parquet", 1000)
    for number in (0, 9, 10):
        _put(path / "dumps" / f"nonfinite_{number}" / "minibatch_1.safetensors", 2000)
        _put(path / "logs" / f"attempt_{number + 1}" / "driver.log", 2000)
    _put(path / "checkpoints" / "step_8" / "policy", 5000)
    _put(path / "metrics.jsonl", 500)
    return RunDir(path)


def _put(path: Path, nbytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * (nbytes - 1) + b"\n")


@pytest.mark.parametrize(
    ("limit", "rollouts", "dumps", "attempts"),
    [
        (30_000, range(1, 11), (0, 9, 10), (1, 10, 11)),
        (25_600, range(5, 11), (0, 9, 10), (1, 10, 11)),  # 24,320 are near
        (19_000, [10], (9, 10), (1, 10, 11)),
        (1000, [10], [10], (10, 11)),
    ],
)
def test_the_oldest_make_room(
    tmp_path: Path, limit: int, rollouts: list[int], dumps: list[int], attempts: list[int]
) -> None:
    run = furnished(tmp_path)
    said = []
    assert size(run.path) == 27_500
    disk = Disk(run, limit / GIB, said.append)
    disk.thin()
    disk.thin()
    assert [step for step, _ in recorded_steps(run.rollouts)] == [*rollouts]
    assert {path.name for path in run.dumps.iterdir()} == {
        f"nonfinite_{number}" for number in dumps
    }
    assert {path.name for path in run.logs.parent.iterdir()} == {
        f"attempt_{number}" for number in attempts
    }
    assert run.metrics.stat().st_size == 500
    assert size(run.checkpoints) == 5000
    thinned = 10 - len(rollouts) + 3 - len(dumps) + 3 - len(attempts)
    assert disk.news == ({"thinned_out": thinned} if thinned else {})
    assert sum("is near" in line for line in said) == bool(thinned)
    assert sum("checkpoint.keep_last" in line for line in said) == (limit == 1000)


def test_a_link_that_leads_nowhere_hides_nothing_of_its_folder(tmp_path: Path) -> None:
    run = furnished(tmp_path)
    for name in "abcdefgh":
        (run.rollouts / name).symlink_to("gone")
    assert size(run.path) == 27_500 + 8 * len("gone")


def test_a_recorder_keeps_its_budget(tmp_path: Path) -> None:
    with start(tmp_path / "run", Config(log=LogSection(disk_gib=2e-4)), 40) as recorder:
        for step in range(1, 41):
            recorder.rollouts(step, make_scored(64, seed=step)[0])
            recorder.log(step, {"loss/total": 1.0})
            assert size(tmp_path / "run") < 2e-4 * GIB
    kept = [step for step, _ in recorded_steps(RunDir(tmp_path / "run").rollouts)]
    assert 1 < len(kept) < 40
    assert kept == [*range(41 - len(kept), 41)]
    assert read_status(tmp_path / "run")["thinned_out"] == 40 - len(kept)


@pytest.mark.fault(
    "a disk takes a part of a line, or none",
    "the file ends in a whole line, and the rest comes later",
)
def test_lines_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    room = [100]
    path.write_bytes(b"torn")
    lines = LineFile(path)

    class Small:
        """A file on a disk with so many bytes left."""

        def __init__(self, file) -> None:
            self._file = file

        def write(self, data) -> int:
            taken = min(room[0], len(data))
            if not taken:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            room[0] -= taken
            return self._file.write(data[:taken])

        def __getattr__(self, name: str):
            return getattr(self._file, name)

    monkeypatch.setattr(lines, "_file", Small(lines._file))
    for _ in range(5):
        lines.write("a" * 29)
    assert (lines.waiting, path.read_bytes()) == (2, b"torn\n" + (b"a" * 29 + b"\n") * 3)
    room[0] = 1000
    lines.write("b")
    assert path.read_bytes() == b"torn\n" + (b"a" * 29 + b"\n") * 5 + b"b\n"
    assert lines.close() == 0
