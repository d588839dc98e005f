"""A job reaches its time limit again and again, on a cluster made for the occasion, and ends as if it never had."""

import os
import shutil
import subprocess
from pathlib import Path

import kills
import pytest
from box import ROOT, SMALL, Box

SLURM = ("munged", "slurmctld", "slurmd", "sbatch")
END_S = 1500
STEPS = 40
SLOW = """
import time, zlib
def score(row, key, response):
    time.sleep(0.05)
    return zlib.crc32(response.encode()) % 7 / 6
"""
SETTINGS = (f"run.steps={STEPS}", "reward.name=slow:score", "reward.workers=1", "log.export=true")


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
    words = ["slurm/dapo_int8.sbatch", "recipes/quickstart.yaml", "run.name=run", model, *places, *SETTINGS, *SMALL]
    screen = box.folder / "screen"
    with screen.open("w") as output:
        job = subprocess.Popen(
            ["slurm/rehearse.sh", *words], cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
            env=os.environ | {"TMPDIR": str(box.tmp), "PYTHONPATH": str(box.folder), "REHEARSE_TIME": "2"}
            | {"REHEARSE_SIGNAL_S": "45"},
        )  # fmt: skip
    try:
        assert job.wait(END_S) == 0, box.screen
    finally:
        job.terminate()
        job.wait(120)
    assert "is queued again: the run" in box.screen
    status = box.status()
    assert (status["state"], int(status["restarts"]) >= 1) == ("finished", True)
    assert not kills.differences(box.run, undisturbed)
    assert not list(Path(box.tmp).iterdir())
