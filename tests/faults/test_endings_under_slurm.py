"""A rank of a job is killed: what the run's directory says afterwards, on a cluster made for the occasion."""

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
from box import ROOT, SMALL, Box, wait_for

from megatron_rl.runs.status import known_status

PATIENCE_S = 500
SLURM = ("munged", "slurmctld", "slurmd", "sbatch")


def task(root: Path, rank: int) -> psutil.Process:
    for process in psutil.process_iter(["cmdline", "environ", "name"]):
        words, environ = " ".join(process.info["cmdline"] or []), process.info["environ"] or {}
        mine = f"run.root={root}" in words and "--ranks slurm" in words and process.info["name"] != "srun"
        if mine and environ.get("SLURM_PROCID") == str(rank):
            return process
    raise AssertionError(f"no rank {rank}")


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, SLURM)), reason="needs root and slurm-wlm")
@pytest.mark.fault("a rank is killed under srun", "the run is known to have failed, not to go on or be interrupted")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(box: Box, tmp_path: Path, rank: int) -> None:
    run = tmp_path / "runs" / "job"
    toy = tmp_path / "data" / "toy"
    places = [f"data.train={toy}/train.jsonl", f"data.eval={toy}/test.jsonl", f"run.root={tmp_path}/runs"]
    model = f"model.path={tmp_path}/runs/toy_sft/model"
    words = ["slurm/dapo_int8.sbatch", "recipes/quickstart.yaml", "run.name=job", "run.steps=100000", model]
    with (tmp_path / "screen").open("w") as screen:
        job = subprocess.Popen(
            ["slurm/rehearse.sh", *words, *places, *SMALL], cwd=ROOT, stdout=screen, stderr=screen,
            env=os.environ | {"TMPDIR": str(box.tmp)}, start_new_session=True,
        )  # fmt: skip
        metrics = run / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, PATIENCE_S, "the first steps")
        task(tmp_path / "runs", rank).kill()
        assert job.wait(PATIENCE_S) != 0
    status = known_status(run)
    assert status["state"] == "failed", status
    assert ("is gone" if rank == 0 else "another rank") in status["reason"]
