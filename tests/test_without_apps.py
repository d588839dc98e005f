"""The core without apps: a run whose apps are deleted trains, checkpoints, resumes, writes
its metrics.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.data.toy import write_toy
from megatron_rl.tracking.metrics_file import read_metrics
from megatron_rl.tracking.status import read_status

ROOT = Path(__file__).parents[1]
# of every process: what an editable installation would find of the package elsewhere is not looked
# for
ALONE = """import sys
sys.meta_path[:] = [one for one in sys.meta_path if 'Editable' not in getattr(one, '__name__', '')]
"""
SMALL = (
    *(
        "rollout.prompts_per_step=8",
        "eval.every=0",
        "checkpoint.every=1",
        "learner.tensor_parallel=1",
    ),
    *("learner.data_parallel=1", "run.name=below"),
)


@pytest.mark.slow
def test_a_run_without_a_app(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "megatron_rl",
        tmp_path / "megatron_rl",
        ignore=shutil.ignore_patterns("apps", "*.pyc"),
    )
    (tmp_path / "sitecustomize.py").write_text(ALONE)
    for name in ("conf", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    write_toy(tmp_path / "data" / "toy")

    def train(*words: str) -> str:
        command = [
            sys.executable,
            "-m",
            "megatron_rl.cli",
            "train",
            "recipes/toy_sft.yaml",
            *SMALL,
            *words,
        ]
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    train("--dry-run")
    train("run.steps=2")
    run = tmp_path / "runs" / "below"
    before = read_metrics(run / "metrics.jsonl")
    assert [line["progress/step"] for line in before] == [0, 1, 2]
    assert (run / "checkpoints" / "step_2" / "checkpoint.json").is_file()
    train("run.steps=3", "run.if_exists=resume")
    lines = read_metrics(run / "metrics.jsonl")
    assert lines[:3] == before
    assert lines[3]["progress/step"] == 3
    assert read_status(run)["state"] == "finished"
    assert not (run / "report.html").exists()
