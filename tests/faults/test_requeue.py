"""A job reaches its time limit, on a cluster made for the occasion, and its run ends as if it never had."""

import os
import shutil
import subprocess
from pathlib import Path

import kills
import psutil
import pytest
from box import ROOT, SMALL, Box, wait_for

SLURM = ("munged", "slurmctld", "slurmd", "sbatch")
END_S = 1200
SLOW = """
import time, zlib
def score(row, key, response):
    time.sleep(0.2)
    return zlib.crc32(response.encode()) % 7 / 6
"""
SETTINGS = ("run.steps=12", "reward.name=slow:score", "reward.workers=1", "log.export=true")


def limit(rehearsal: subprocess.Popen[bytes], minutes: int) -> bool:
    """Changes the job's time limit: minutes from its start."""
    below = psutil.Process(rehearsal.pid).children(recursive=True)
    conf = next(one.environ()["SLURM_CONF"] for one in below if "slurmctld" in one.name())
    command = ["scontrol", "update", "JobId=1", f"TimeLimit={minutes}"]
    return subprocess.run(command, env=os.environ | {"SLURM_CONF": conf}, capture_output=True).returncode == 0


@pytest.mark.timeout(3000)
@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, SLURM)), reason="needs root and slurm-wlm")
@pytest.mark.fault("a job reaches its time limit", "it is queued again and goes on; its records equal those of one run")
def test_a_job_goes_on_after_its_time_limit(box: Box) -> None:
    (box.folder / "slow.py").write_text(SLOW)
    assert box.train(*SETTINGS).wait(END_S) == 0, box.screen
    undisturbed = box.run.rename(box.folder / "undisturbed")
    toy = box.folder / "data" / "toy"
    places = [f"data.train={toy}/train.jsonl", f"data.eval={toy}/test.jsonl", f"run.root={box.folder}/runs"]
    model = f"model.path={box.folder}/runs/toy_sft/model"
    words = ["slurm/dapo_int8.sbatch", "recipes/quickstart.yaml", "run.name=run", model, *places, *SMALL, *SETTINGS]
    own = {"TMPDIR": str(box.tmp), "PYTHONPATH": str(box.folder), "REHEARSE_SIGNAL_S": "100"}
    with (box.folder / "screen").open("w") as output:
        job = subprocess.Popen(
            ["slurm/rehearse.sh", *words], cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
            env=os.environ | own,
        )  # fmt: skip
    try:
        begun = wait_for(lambda: box.steps() >= 3 or job.poll() is not None, END_S, "two steps")
        assert limit(job, int(begun / 60) + 2), box.screen
        wait_for(lambda: "is queued again" in box.screen or job.poll() is not None, END_S, "the limit")
        wait_for(lambda: job.poll() is not None or limit(job, 30), 60, "a limit for the second start")
        assert job.wait(END_S) == 0, box.screen
    finally:
        job.terminate()
        job.wait(120)
    assert "is queued again: the run" in box.screen
    status = box.status()
    assert (status["state"], status["restarts"], status["before"]["state"]) == ("finished", "1", "stopped")
    assert not kills.differences(box.run, undisturbed)
    assert not list(Path(box.tmp).iterdir())
