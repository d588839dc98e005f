"""The batch scripts: their syntax, their recipes, and, where Slurm is installed, a run of one under
real srun.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from box import needs_slurm

from megatron_rl.config import load
from megatron_rl.data.toy import write_toy
from megatron_rl.models.layout import Layout
from megatron_rl.preflight.roles import roles

ROOT = Path(__file__).parent.parent.parent
GPUS = 8  # of a node that the scripts ask for
SHELL = sorted(path for path in (ROOT / "slurm").iterdir() if path.suffix != ".md")
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def test_shellcheck_finds_nothing() -> None:
    scripts = [
        *SHELL,
        *(ROOT / "docker").glob("*.sh"),
        *(ROOT / "tools").rglob("*.sh"),
        *(ROOT / ".ci").iterdir(),
    ]
    tool = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run(
        [tool, "--external-sources", *scripts], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_as_many_tasks_are_asked_for_as_the_recipe_has_ranks(script: Path) -> None:
    text = script.read_text()
    recipe = re.search(r"RECIPE:-(\S+?)}", text)
    nodes, tasks = (
        re.search(rf"#SBATCH --{name}=(\d+)", text) for name in ("nodes", "ntasks-per-node")
    )
    assert recipe
    assert nodes
    assert tasks
    config = load(ROOT / recipe[1])
    placed = roles(Layout.from_config(config.learner), config.sampler, GPUS)
    assert (int(nodes[1]), int(tasks[1])) == (placed.nodes, placed.tasks_per_node)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_may_queue_a_job_again_and_asks_it_before_its_time_is_up(script: Path) -> None:
    asked = re.findall(r"^#SBATCH (\S+)", script.read_text(), re.M)
    assert {"--requeue", "--signal=B:USR1@300", "--open-mode=append", "--mem=0"} <= set(asked)


@pytest.mark.engine
@pytest.mark.ranks
@needs_slurm
@pytest.mark.skipif(
    not (ROOT / ".venv" / "bin" / "megatron-rl").exists(), reason="the scripts run what .venv holds"
)
def test_a_job_trains_under_srun(tmp_path: Path) -> None:
    write_toy(tmp_path / "toy")
    toy = tmp_path / "toy"
    command = [
        "slurm/rehearse.sh",
        "slurm/dapo_int8.sbatch",
        "recipes/toy_sft.yaml",
        f"run.root={tmp_path}/runs",
        "run.steps=2",
        "rollout.prompts_per_step=64",
        "eval.max_prompts=16",
        f"model.path={toy}/model",
        f"data.train={toy}/train.jsonl",
        f"data.eval={toy}/test.jsonl",
    ]
    screen = tmp_path / "screen"
    canary = "canary-9c41"
    with screen.open("w") as output:
        env = os.environ | {"LAB_API_KEY": canary}
        job = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=env)
        arguments: set[str] = set()
        while job.poll() is None:
            arguments |= {
                " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])
            }
            time.sleep(0.5)
    assert job.returncode == 0, screen.read_text()[-6000:]
    assert "2 ranks" in screen.read_text()
    assert any("--ranks slurm" in words for words in arguments)
    assert not any(canary in words for words in arguments)
    assert [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and canary.encode() in path.read_bytes()
    ] == []
    run = tmp_path / "runs" / "toy_sft"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert (run / "model" / "model.safetensors.index.json").exists()
