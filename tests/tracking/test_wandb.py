"""A resumed run is one run at W&B, and outlives W&B's own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import write_lines
from wandb_files import logged_steps

from megatron_rl.config.schema import LogSection, Wandb
from megatron_rl.tracking.trackers import Trackers
from megatron_rl.tracking.wandb_log import ID

LINES = [{"progress/step": step, "loss/total": step / 7} for step in range(10)]


def attempt(run: Path, first: int, last: int, resumes_after: int | None = None) -> None:
    log = Trackers(LogSection(wandb=Wandb.offline), {}, run, resumes_after)
    for step in range(first, last + 1):
        log.log(step, LINES[step])
    log.finish("stopped")


@pytest.mark.fault("a run with W&B is resumed", "it is the same run there, without a gap")
def test_one_run_of_many_attempts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_lines(run / "metrics.jsonl", LINES[:2])
    attempt(run, 2, 5, resumes_after=1)  # the attempt before had no W&B
    write_lines(run / "metrics.jsonl", LINES[:4])
    attempt(run, 4, 8, resumes_after=3)
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{(run / ID).read_text().strip()}.wandb"}
    assert [logged_steps(file) for file in files] == [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8]]


KILLED = """
import sys
from pathlib import Path
import psutil
from megatron_rl.config.schema import LogSection, Wandb
from megatron_rl.tracking.trackers import Trackers
from helpers import logged
said = logged()
log = Trackers(LogSection(wandb=Wandb.offline), {}, Path(sys.argv[1]))
log.log(0, {"loss/total": 1.0})
services = [one for one in psutil.Process().children(recursive=True) if "wandb-core" in " ".join(one.cmdline())]
for one in services:
    one.kill()
psutil.wait_procs(services, 60)
for step in range(1, 100):
    log.log(step, {"loss/total": 1.0})
log.finish("finished")
Path(sys.argv[2]).write_text("\\n".join(said))
"""


@pytest.mark.fault("W&B's own process is killed", "the run goes on, and says so once")
def test_a_service_that_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = tmp_path / "said"
    run.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(run), str(said)],
        env=os.environ | {"WANDB_SILENT": "true", "PYTHONPATH": str(Path(__file__).parents[1])},
        timeout=300,
    )
    assert done.returncode == 0
    assert said.read_text().count("the tracker failed") == 1
