"""docs/environments.md: what a newcomer types is taken, and its commands run as they stand on the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Command

from megatron_rl.config import load
from megatron_rl.environments.environment import load as load_environment
from megatron_rl.environments.pool import check_importable
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


def typed(place: Path, line: str) -> str:
    """What a line of the page says, in a shell that finds this environment's programs."""
    around = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], cwd=place, env=around, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1200)
def test_the_pages_commands_run_as_they_stand(tmp_path: Path) -> None:
    place, said = written(tmp_path), dict[str, str]()
    for line in block("bash").splitlines():
        name = line.split()[1] + " --dry-run" * ("--dry-run" in line)
        said[name] = typed(place, line)
        if name == "train":
            (tmp_path / "runs" / "mine" / "report.html").unlink()  # the report's command writes it again
    assert list(said) == ["quickstart", "train --dry-run", "train", "report", "chat"]
    assert "environment calculator.py:Arithmetic" in said["train --dry-run"]
    lines = read_metrics(place / "runs" / "mine" / "metrics.jsonl")
    assert [line["progress/step"] for line in lines] == [0, 1, 2]
    assert all(line["session/errors"] == 0 and line["session/turns_mean"] >= 1 for line in lines[1:])
    assert "turns, " in (place / "runs" / "mine" / "report.html").read_text()
    assert said["chat"]  # what a policy says that knows nothing
