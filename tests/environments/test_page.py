"""docs/environments.md: its examples are accepted, and its commands run unchanged."""

from pathlib import Path

import pytest
from helpers import Command, block, small_recipes, typed

from megatron_rl.config import load
from megatron_rl.environments.environment import load as load_environment
from megatron_rl.environments.pool import check_importable
from megatron_rl.runs.metrics_file import read_metrics
from megatron_rl.workshop.toy_tools import write_tools

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
GIVEN = ("model.path=data/tools/model", "model.init=random")


def written(folder: Path) -> Path:
    """A folder with what the page has one write, on top of small recipes."""
    small_recipes(folder, tools=4, tools_sft=1)
    (folder / "calculator.py").write_text(block(PAGE, "python"))
    (folder / "recipes" / "mine.yaml").write_text(block(PAGE, "yaml"))
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tools(Path("data/tools"))
    return written(tmp_path)


def test_the_dry_run_takes_the_pages_recipe(place: Path, command: Command) -> None:
    said = command.dry_run(*GIVEN, recipe="recipes/mine.yaml")
    assert "environment calculator.py:Arithmetic" in said
    assert said.count(" appends") == 2
    refused = command.refused(
        *GIVEN, "environment.name=calculator.py:Arithmetics", recipe="recipes/mine.yaml"
    )
    assert "environment.name: 'calculator.py:Arithmetics'" in refused
    refused = command.refused(*GIVEN, "environment.turn=3", recipe="recipes/mine.yaml")
    assert "did you mean environment.turns?" in refused


def test_the_pages_class_is_an_environment(place: Path) -> None:
    section = load(place / "recipes" / "mine.yaml").environment
    (tool,) = check_importable(section, ()).tools
    assert tool["function"]["name"] == "calculate"
    made = load_environment(str(section.name)).make
    environment = made()
    assert list(environment.reset({"prompt": "2*3=", "answer": "6"})) == [
        {"role": "user", "content": "2*3="}
    ]
    assert environment.tools[0]("2*3") == 6


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1200)
def test_the_pages_commands_run_as_they_stand(tmp_path: Path) -> None:
    place = written(tmp_path)
    said = dict[str, str]()
    for line in block(PAGE, "bash").splitlines():
        name = line.split()[1] + " --dry-run" * ("--dry-run" in line)
        said[name] = typed(place, line)
        if name == "train":
            # the report's command writes it again
            (tmp_path / "runs" / "mine" / "report.html").unlink()
    assert list(said) == ["quickstart", "train --dry-run", "train", "report", "chat"]
    assert "environment calculator.py:Arithmetic" in said["train --dry-run"]
    lines = read_metrics(place / "runs" / "mine" / "metrics.jsonl")
    assert [line["progress/step"] for line in lines] == [0, 1, 2]
    assert all(
        line["session/errors"] == 0 and line["session/turns_mean"] >= 1 for line in lines[1:]
    )
    assert "turns, " in (place / "runs" / "mine" / "report.html").read_text()
    assert said["chat"]  # what a policy says that knows nothing
    noting = f"open({str(place / 'asked')!r}, 'a').close(); self.right = "
    (place / "calculator.py").write_text(block(PAGE, "python").replace("self.right = ", noting))
    told = typed(
        place, "megatron-rl eval runs/mine --set data/tools/test.jsonl eval.sets.test.max_prompts=2"
    )
    assert "test" in told
    assert (place / "asked").is_file(), "a set's prompts are sessions of the run's environment"
