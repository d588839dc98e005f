"""docs/environments.md: what a newcomer types is taken, and its commands run as they stand on the page."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers import Command, wait_for

from megatron_rl.config import load
from megatron_rl.environments.environment import load as load_environment
from megatron_rl.environments.pool import check_importable
from megatron_rl.processes.process import state_of
from megatron_rl.runs.metrics_file import read_metrics
from megatron_rl.workshop.toy_tools import write_tools

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()
GIVEN = ("model.path=data/tools/model", "model.init=random")
# what stands in the recipes that the page's begins with, made small
SMALL = """\
base: {base}
run: {{steps: 2}}
rollout: {{prompts_per_step: 8, samples_per_prompt: {samples}, max_gen_batches: 1}}
learner: {{n_minibatches: 1}}
eval: {{max_prompts: 8}}
log: {{record_every: 1}}
"""
HANGS = """
import time
from megatron_rl.environments.environment import Environment
class Hangs(Environment):
    def reset(self, row):
        time.sleep(600)
"""


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)[number]


def written(folder: Path) -> Path:
    """A folder with what the page has one write, on top of small recipes."""
    (folder / "recipes").mkdir()
    for name, samples in (("tools", 4), ("tools_sft", 1)):
        small = SMALL.format(base=ROOT / "recipes" / f"{name}.yaml", samples=samples)
        (folder / "recipes" / f"{name}.yaml").write_text(small)
    (folder / "calculator.py").write_text(block("python"))
    (folder / "recipes" / "mine.yaml").write_text(block("yaml"))
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tools(Path("data/tools"))
    return written(tmp_path)


def test_the_dry_run_takes_the_pages_recipe(place: Path, command: Command) -> None:
    said = command.dry_run(*GIVEN, recipe="recipes/mine.yaml")
    assert "environment calculator.py:Arithmetic" in said
    assert "a tool's answer appends; a user's message appends" in said
    refused = command.refused(*GIVEN, "environment.name=calculator.py:Arithmetics", recipe="recipes/mine.yaml")
    assert "environment.name: 'calculator.py:Arithmetics' cannot be imported" in refused
    refused = command.refused(*GIVEN, "environment.turn=3", recipe="recipes/mine.yaml")
    assert "did you mean environment.turns?" in refused


def test_the_pages_class_is_an_environment(place: Path) -> None:
    section = load(place / "recipes" / "mine.yaml").environment
    (tool,) = check_importable(section).tools
    assert tool["function"]["name"] == "calculate"
    made = load_environment(str(section.name)).make
    assert made is not None
    environment = made()
    assert list(environment.reset({"prompt": "2*3=", "answer": "6"})) == [{"role": "user", "content": "2*3="}]
    assert environment.tools[0]("2*3") == 6


def typed(place: Path, line: str, **more: object) -> subprocess.Popen[str]:
    """A line of the page, in a shell that finds this environment's programs."""
    around = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(["bash", "-c", line], cwd=place, env=around, text=True, **pipes, **more)  # type: ignore[call-overload]


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1200)
def test_the_pages_commands_run_as_they_stand(tmp_path: Path) -> None:
    place, said = written(tmp_path), dict[str, str]()
    for line in block("bash").splitlines():
        process = typed(place, line)
        said[line.split()[1] + " --dry-run" * ("--dry-run" in line)] = out = process.communicate(timeout=400)[0]
        assert process.returncode == 0, f"{line}\n{out[-3000:]}"
        if line.startswith("megatron-rl train") and "--dry-run" not in line:
            (tmp_path / "runs" / "mine" / "report.html").unlink()  # the report's command writes it again
    assert list(said) == ["quickstart", "train --dry-run", "train", "report", "chat"]
    assert "environment calculator.py:Arithmetic" in said["train --dry-run"]
    lines = read_metrics(place / "runs" / "mine" / "metrics.jsonl")
    assert [line["progress/step"] for line in lines] == [0, 1, 2]
    assert all(line["session/errors"] == 0 and line["session/turns_mean"] >= 1 for line in lines[1:])
    assert "turns, " in (place / "runs" / "mine" / "report.html").read_text()
    assert said["chat"].strip()
    interrupted(place)


def interrupted(place: Path) -> None:
    """Ctrl-C, while a tool's process hangs beside a live engine."""
    (place / "hangs.py").write_text(HANGS)
    slow = "environment.name=hangs.py:Hangs environment.tool_timeout_s=600"
    process = typed(place, f"exec megatron-rl chat runs/mine -p 1 {slow}", start_new_session=True)
    shell = psutil.Process(process.pid)

    def below(words: str = "") -> list[psutil.Process]:
        return [one for one in shell.children(recursive=True) if words in " ".join(one.cmdline())]

    wait_for(lambda: len(below("environments.worker")) == 2, "the nursery, and a process that hangs")
    assert below("engine")
    started = below()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(120) == 130, process.communicate()[0]
    wait_for(lambda: not any(state_of(one.pid) not in ("", "Z") for one in started), "end of all", 60)
