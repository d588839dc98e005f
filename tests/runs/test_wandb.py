"""A run that goes on is one run at W&B: every step once, whatever the attempts before have logged
or lost.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import write_lines

from megatron_rl.config.schema import Wandb
from megatron_rl.runs.wandb_log import BLOCK, ID, WandbLog, logged_steps

WIDE = {f"loss/{number}": number / 7 for number in range(60)}  # a step fills a good part of a block
LINES = [{"progress/step": step, **WIDE} for step in range(40)]


def attempt(run: Path, first: int, last: int) -> None:
    log = WandbLog({"run": {"name": "run"}}, run, Wandb.offline)
    for step in range(first, last + 1):
        log.log(step, LINES[step])
    log.close("stopped")


def files(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*/*.wandb"))


def held(run: Path) -> Counter[int]:
    return Counter(step for file in files(run) for step in logged_steps(file))


@pytest.mark.fault(
    "a run with W&B goes on", "it is the same run there, without a gap or a double step"
)
def test_one_run_of_many_attempts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    attempt(run, 0, 30)
    (file,) = files(run)
    name = (run / ID).read_text().strip()
    assert file.name == f"run-{name}.wandb"
    assert file.stat().st_size > 2 * BLOCK
    assert logged_steps(file) == list(range(31))

    behind = tmp_path / "behind"  # W&B has seen more than the checkpoint holds
    shutil.copytree(run, behind)
    write_lines(behind / "metrics.jsonl", LINES[:13])
    attempt(behind, 13, 35)
    assert held(behind) == Counter(range(36))
    assert {path.name for path in files(behind)} == {file.name}

    cut = tmp_path / "cut"  # W&B has lost what a kill kept from its disk
    shutil.copytree(run, cut)
    (lost,) = files(cut)
    lost.write_bytes(lost.read_bytes()[: BLOCK + 5000])
    last = logged_steps(lost)[-1]
    assert 5 < last < 20
    write_lines(cut / "metrics.jsonl", LINES[:29])
    attempt(cut, 29, 35)
    assert held(cut) == Counter(range(36))


KILLED = """
import sys
from pathlib import Path
import psutil
from megatron_rl.config.schema import Wandb
from megatron_rl.runs.wandb_log import WandbLog
said = []
log = WandbLog({}, Path(sys.argv[1]), Wandb.offline, said.append)
log.log(0, {"loss/total": 1.0})
services = [one for one in psutil.Process().children(recursive=True) if "wandb-core" in " ".join(one.cmdline())]
for one in services:
    one.kill()
psutil.wait_procs(services, 60)
for step in range(1, 100):
    log.log(step, {"loss/total": 1.0})
assert log.close("finished", {"reward": 1.0}) == ""
Path(sys.argv[2]).write_text("\\n".join(said))
"""


@pytest.mark.fault("a file of W&B is empty, cut anywhere, or none", "the steps before are known")
def test_a_file_that_was_cut(tmp_path: Path) -> None:
    for content in (
        b"",
        b":W&B",
        b":W&B\xbf\xbe\0" + b"\0" * 99,
        b":W&B\xbf\xbe\0" + b"\xff" * 99,
        b"x" * 99,
    ):
        (tmp_path / "file").write_bytes(content)
        assert logged_steps(tmp_path / "file") == []


@pytest.mark.fault("W&B's own process is killed", "the run goes on, and says so once")
def test_a_service_that_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = tmp_path / "said"
    run.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(run), str(said)],
        env=os.environ | {"WANDB_SILENT": "true"},
        timeout=300,
    )
    assert done.returncode == 0
    assert said.read_text().count("W&B's process is gone") == 1
