"""`slurm/submit` and the lines that jobs run, where no Slurm is: stand-ins on PATH keep what they
were called with.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_rl.data.toy import write_toy
from megatron_rl.preflight.files import read_card

ROOT = Path(__file__).parent.parent.parent
# keeps its arguments and what SBATCH_ and the recipe have put into its environment
RECORD = """#!{python}
import json, os, sys
with open({record!r}, "a") as record:
    words = [sys.argv[0].rpartition("/")[2], *sys.argv[1:]]
    print(json.dumps([words, {{name: os.environ.get(name) for name in {names!r}}}]), file=record)
{then}
"""
# what a command on the nodes would be, run here
RUN_LAST = """
words = sys.argv[1:]
start = next(place for place, word in enumerate(words) if not word.startswith("-"))
if "apptainer" in words:
    del words[words.index("apptainer") : next(place for place, word in enumerate(words) if word.endswith(".sif")) + 1]
os.execvp(words[start], words[start:])
"""
NODES = {
    "show hostnames": "n1\nn2",
    "show node": "NodeName=n1 Arch=x NodeAddr=127.0.0.1 X=1\nNodeName=n2 Arch=x NodeAddr=127.0.0.1 X=1",
    "show job": "JobId=7 JobState=RUNNING ExcNodeList=(null) X=1",
}


class Site:
    """A copy of the repository's scripts with another environment than Slurm's around them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.record = folder / "record"
        self.bin.mkdir()
        for name in ("slurm", "recipes", "conf"):
            shutil.copytree(ROOT / name, folder / name)
        (folder / ".venv" / "bin").mkdir(parents=True)
        for name in ("python", "megatron-rl"):
            program = folder / ".venv" / "bin" / name
            program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {ROOT}/.venv/bin/{name} "$@"\n')
            program.chmod(0o755)

    def stand_in(self, name: str, *environment: str, then: str = "") -> None:
        program = self.bin / name
        program.write_text(
            RECORD.format(
                python=shutil.which("python3"),
                record=str(self.record),
                names=environment,
                then=then,
            )
        )
        program.chmod(0o755)

    def write(self, recipe: str, **model: dict) -> None:
        write_toy(self.folder / "toy", **model)
        (self.folder / "mine.yaml").write_text(recipe.format(toy=self.folder / "toy"))

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        around = os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"} | environment
        return subprocess.run(
            command, cwd=self.folder, env=around, capture_output=True, text=True, timeout=120
        )

    def calls(self) -> list[tuple[list[str], dict[str, str | None]]]:
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [tuple(json.loads(line)) for line in lines]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_five_mistakes_are_reported_at_once_and_nothing_is_queued(site: Site) -> None:
    site.stand_in("sbatch")
    mistakes = (
        "optim.lrr=1e-6",
        "rollout.max_response_tokens=0",
        "learner.tensor_parallel=3",
        "sampler.vllm.foo=1",
        "data.train=nope.jsonl",
    )
    done = site.run("slurm/submit", "slurm/dapo_int8.sbatch", *mistakes)
    assert done.returncode == 2
    for mistake in mistakes:
        assert f"error: {mistake.partition('=')[0]}" in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
    assert not site.calls()


def test_what_is_queued(site: Site) -> None:
    """The plan's options, then the user's; account and the like by the environment; no secret among
    the words.
    """
    site.stand_in(
        "sbatch", "SBATCH_ACCOUNT", "SBATCH_QOS", "RECIPE", "OVERRIDES", then="print('11;cluster')"
    )
    site.write(MINE, like=read_card("Qwen3-8B"))
    words = ["recipe=mine.yaml", "run={name: half, seed: 3}", "--time=01:00:00"]
    secret = {"WANDB_API_KEY": "canary-71b2", "SBATCH_ACCOUNT": "lab"}
    done = site.run("slurm/submit", "--dry-run", "slurm/dapo_int8.sbatch", *words, **secret)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "check passed: mine.yaml run={name: half, seed: 3}\n  sbatch --job"
    )
    assert not site.calls()
    done = site.run("slurm/submit", "slurm/dapo_int8.sbatch", *words, **secret)
    assert done.returncode == 0, done.stderr
    ((called, environment),) = site.calls()
    assert called[:5] == [
        "sbatch",
        "--parsable",
        "--job-name=half",
        "--nodes=1",
        "--ntasks-per-node=4",
    ]
    assert called[-2:] == ["--time=01:00:00", "slurm/dapo_int8.sbatch"]
    assert "--mem=0" in called, "all memory of the nodes"
    given = {"RECIPE": "mine.yaml", "OVERRIDES": "run={name: half, seed: 3}\n"}
    assert environment == given | {"SBATCH_ACCOUNT": "lab", "SBATCH_QOS": None}
    assert "job 11 is queued" in done.stdout
    assert "ls runs/half/logs/" in done.stdout
    assert "canary" not in done.stdout + done.stderr + site.record.read_text()


def test_what_a_site_says_of_gpus_and_memory_reaches_sbatch(site: Site) -> None:
    lines = (site.folder / "slurm/site.env").read_text()
    lines = lines.replace("SITE_GPUS:-gres=gpu", "SITE_GPUS:-gpus-per-node").replace(
        "SITE_MEM:-0", "SITE_MEM:-plan"
    )
    (site.folder / "slurm/site.env").write_text(lines)
    site.stand_in("sbatch", then="print('11;cluster')")
    site.write(MINE, like=read_card("Qwen3-8B"))
    done = site.run("slurm/submit", "slurm/dapo_int8.sbatch", "recipe=mine.yaml")
    assert done.returncode == 0, done.stderr
    ((called, _),) = site.calls()
    assert "--gpus-per-node=8" in called
    (asked,) = (word for word in called if word.startswith("--mem="))
    assert 40 < int(asked.removeprefix("--mem=").removesuffix("G")) < 100, (
        "of nine processes and a small model"
    )


CONTAINERS = {
    "": ("", []),
    "pyxis": (
        "lab/image:1",
        [
            "--container-image=lab/image:1",
            "--container-workdir={here}",
            "--container-mounts={here}:{here},/data:/data",
        ],
    ),
    "apptainer": (
        "/images/rl.sif",
        ["apptainer", "exec", "--nv", "--bind", "{here},/data:/data", "/images/rl.sif"],
    ),
}


@pytest.mark.parametrize("tool", CONTAINERS, ids=lambda tool: tool or "bare")
def test_what_runs_on_the_nodes(site: Site, tool: str) -> None:
    """Two nodes, a rank on each: modules, containers, addresses; secrets by the environment
    alone.
    """
    image, around = CONTAINERS[tool]
    around = [word.format(here=site.folder) for word in around]
    on_nodes(site)
    (site.folder / "secrets").write_text("WANDB_API_KEY=canary-5d0e\n")
    settings = {
        "SITE_CONTAINER": image,
        "SITE_CONTAINER_TOOL": tool,
        "SITE_MOUNTS": "/data:/data",
        "SITE_MODULES": "cuda/13.0 gcc/13",
        "SITE_SECRETS": str(site.folder / "secrets"),
    }
    done = run_script(site, "dapo_int8", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = site.calls()
    assert (["module", "load", "cuda/13.0", "gcc/13"]) in [words for words, _ in calls]
    steps = [(words, environment) for words, environment in calls if words[0] == "srun"]
    check, learner = (
        next(words for words, _ in steps if f"--job-name={name}" in words)
        for name in ("nodes", "learner")
    )
    for words, environment in steps:
        assert " ".join(around) in " ".join(words)
        assert environment["WANDB_API_KEY"] == "canary-5d0e"
    assert "MEGATRON_RL_NODES=n1=127.0.0.1,n2=127.0.0.1" in check
    assert ".venv/bin/python -m megatron_rl.apps.nodes.check 2 mine.yaml" in " ".join(check)
    assert {
        "--nodelist=n1,n2",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "MASTER_ADDR=127.0.0.1",
    } <= {*learner}
    end = learner[learner.index(".venv/bin/megatron-rl") :]
    assert end[1:] == [
        "train",
        "mine.yaml",
        "run.if_exists=resume",
        "run.name=x",
        "--ranks",
        "slurm",
    ]
    assert "canary" not in done.stdout + done.stderr
    assert not any("canary" in word for words, _ in calls for word in words)


@pytest.mark.parametrize("tool", CONTAINERS, ids=lambda tool: tool or "bare")
def test_a_report_is_written_where_python_lives(site: Site, tool: str) -> None:
    image, around = CONTAINERS[tool]
    on_nodes(site)
    settings = {"SITE_CONTAINER": image, "SITE_CONTAINER_TOOL": tool, "SITE_MOUNTS": "/data:/data"}
    job = {"SLURM_SUBMIT_DIR": str(site.folder), "SLURMD_NODENAME": "n1"}
    done = site.run("bash", "slurm/report.sh", "-c", "print('written')", **settings, **job)
    assert (done.returncode, done.stdout) == (0, "written\n"), done.stderr
    calls = [" ".join(words) for words, _ in site.calls()]
    assert len(calls) == bool(tool)
    assert all(" ".join(around).format(here=site.folder) in words for words in calls)


def test_servers_have_nodes_and_a_key_of_their_own(site: Site) -> None:
    on_nodes(site)
    done = run_script(
        site,
        "dapo_split",
        "\nsampler={engines: 2, dedicated_nodes: true}\nsync.dir=sync\nlearner.tensor_parallel=1\n",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = {
        word: call for call in site.calls() for word in call[0] if word.startswith("--job-name=")
    }
    servers, learner = (steps[f"--job-name={name}"] for name in ("servers", "learner"))
    first = 40000 + 7 * 64
    places = f"127.0.0.1:{first},127.0.0.1:{first + 1}"
    assert {"--nodelist=n2", "--ntasks=2", places, "slurm/serve.sh"} <= {*servers[0]}
    addresses = f"sampler.addresses=[http://127.0.0.1:{first},http://127.0.0.1:{first + 1}]"
    assert addresses in servers[0]
    assert addresses in learner[0]
    assert "--nodelist=n1" in learner[0]
    key = servers[1]["MEGATRON_RL_FLEET_KEY"]
    assert len(key or "") == 64
    assert key == learner[1]["MEGATRON_RL_FLEET_KEY"]
    assert not any(key in word for words, _ in site.calls() for word in words)


def on_nodes(site: Site) -> None:
    """Stand-ins of a node: `srun` runs the work of this node alone, and records the rest."""
    answers = f"said = ' '.join(sys.argv[1:])\nprint(next(text for words, text in {NODES!r}.items() if words in said))"
    site.stand_in("scontrol", then=answers)
    site.stand_in("squeue", then="print('7.0 servers')")
    site.stand_in("module")
    site.stand_in("scancel")
    alone = "if '--ntasks=1' in sys.argv and '--job-name=learner' not in sys.argv:"
    site.stand_in(
        "srun",
        "WANDB_API_KEY",
        "MEGATRON_RL_FLEET_KEY",
        then=alone + RUN_LAST.replace("\n", "\n    "),
    )
    site.stand_in(
        "apptainer",
        then=RUN_LAST.replace("words = sys.argv[1:]", "words = ['apptainer', *sys.argv[1:]]"),
    )
    site.write(HERE)


def run_script(
    site: Site, name: str, overrides: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURMD_NODENAME": "n1",
        "SLURM_NTASKS_PER_NODE": "1",
    }
    given = {
        "RECIPE": "mine.yaml",
        "OVERRIDES": f"run.name=x {overrides}",
        "SLURM_SUBMIT_DIR": str(site.folder),
    }
    return site.run("bash", f"slurm/{name}.sbatch", **job, **given, **environment)


HERE = f"""
base: {ROOT}/recipes/quickstart.yaml
model: {{{{path: {{toy}}/model, init: random}}}}
data: {{{{train: {{toy}}/train.jsonl, eval: {{toy}}/test.jsonl}}}}
"""
MINE = """
base: recipes/dapo-qwen3_8b-1n8g-int8-ahead.yaml
model: {{path: {toy}/model, init: random}}
data: {{train: {toy}/train.jsonl, eval: {toy}/test.jsonl, prompt_key: prompt, chat_template_kwargs: null}}
rollout: {{max_prompt_tokens: 12, max_response_tokens: 8}}
eval: {{max_response_tokens: 8}}
reward: {{overlong_buffer: 0}}
"""
