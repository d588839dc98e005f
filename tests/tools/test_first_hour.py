"""The first hour's script, with stand-ins for its programs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# the stand-in of an interpreter: asked for a recipe's model it reads the recipe, the rest it only
# repeats
PYTHON = f"""#!/bin/sh
case "$2" in *model.path*) exec {sys.executable} "$@" ;; esac
echo "python $*"
case "$*" in *pytest*) exit 1 ;; esac
"""
PROGRAM = """#!/bin/sh
echo "megatron-rl $*"
case "$*" in *qwen3_8b*) ;; *dry-run*) echo "error: learner: too many ranks"; exit 2 ;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the script's files, and programs that print their arguments."""
    for name in ("recipes", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "first_hour.sh", tmp_path / "tools")
    experiments = Path("tools") / "offline" / "experiments"
    shutil.copytree(ROOT / experiments, tmp_path / experiments)
    programs = {".venv/bin/python": PYTHON, ".venv/bin/megatron-rl": PROGRAM}
    programs |= {f"bin/{name}": f'#!/bin/sh\necho "{name} $*"\n' for name in ("make", "nvidia-smi")}
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def first_hour(checkout: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{checkout}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    command = ["bash", str(checkout / "tools" / "first_hour.sh"), *parts]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_part_that_fails_does_not_stop_the_others(checkout: Path) -> None:
    done = first_hour(checkout, "machine", "install", "tests", "quickstart", "sync")
    report = (checkout / "first_hour.md").read_text()
    heads = [line.partition(",")[0] for line in report.splitlines() if line.startswith("## ")]
    assert heads == [
        "## machine: done",
        "## install: done",
        "## tests: failed",
        "## quickstart: done",
        "## sync: done",
    ]
    assert "make EXTRA=gpu install-dev" in report
    assert "nvidia-smi topo -m" in report
    assert "python -m pytest tests/gpu" in report
    assert "send back: first_hour.md" in done.stderr


def test_recipes_that_fit_take_two_steps_and_the_others_say_why_not(checkout: Path) -> None:
    for recipe in (checkout / "recipes").glob("*-*.yaml"):
        if "qwen3_8b-1n8g-int8.yaml" not in recipe.name and "llama3.1_70b" not in recipe.name:
            recipe.unlink()
    first_hour(checkout, "recipes")
    report = (checkout / "first_hour.md").read_text()
    assert "## dapo-qwen3_8b-1n8g-int8: done" in report
    assert "run.steps=2" in report
    assert "model.init=random" in report, "its own model is not here"
    assert not [
        word
        for word in report.split()
        if word.startswith(("learner.", "loss.", "correction", "sampler."))
    ]
    assert "grpo-llama3.1_70b-16n128g-int8 is left out" in report


def test_from_one_gpu_up_and_one_thing_more_each_time(checkout: Path) -> None:
    for recipe in (checkout / "recipes").glob("*-*.yaml"):
        if "grpo-qwen3_" not in recipe.name and "4n32g-int8.yaml" not in recipe.name:
            recipe.unlink()
    first_hour(checkout, "turns", "size", "recipes")
    lines = (checkout / "first_hour.md").read_text().splitlines()
    left_out = [line.split()[1] for line in lines if "left out" in line]
    turns = [f"turns_{what}" for what in ("kept", "discarded", "optimizer", "ipc", "engines")]
    assert left_out[:5] == turns
    nodes = [int(name.split("-")[2].partition("n")[0]) for name in left_out[5:]]
    assert nodes == sorted(nodes)
    done = [line for line in lines if line.startswith("## ")]
    assert len(left_out) + len(done) == 7 + len(list((checkout / "recipes").glob("*-*.yaml")))
    assert "log.profile_steps=[5]" in next(line for line in lines if "run.steps=6" in line)
