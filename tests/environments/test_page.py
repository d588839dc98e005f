"""docs/environments.md: its class and its recipe are what a newcomer types, and they are taken."""

import re
import shutil
from pathlib import Path

import pytest
from helpers import Command

from megatron_rl.config import load
from megatron_rl.data.toy import write_reasoning
from megatron_rl.environments.environment import load as load_environment
from megatron_rl.environments.pool import check_importable

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)[number]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "recipes" / "reasoning.yaml", tmp_path / "recipes")
    (tmp_path / "calculator.py").write_text(block("python"))
    (tmp_path / "recipes" / "mine.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    write_reasoning(Path("data/reasoning"))
    return tmp_path


def test_the_dry_run_takes_the_pages_recipe(place: Path, command: Command) -> None:
    given = ("model.path=data/reasoning/model", "model.init=random", "environment.tool_parser=hermes")
    said = command.dry_run(*given, recipe="recipes/mine.yaml")
    assert "environment calculator.py:Arithmetic" in said
    assert "a user's message appends" in said
    refused = command.refused(*given, "environment.name=calculator.py:Arithmetics", recipe="recipes/mine.yaml")
    assert "environment.name: 'calculator.py:Arithmetics' cannot be imported" in refused
    refused = command.refused(*given, "environment.turn=3", recipe="recipes/mine.yaml")
    assert "did you mean environment.turns?" in refused


def test_the_pages_class_is_an_environment(place: Path) -> None:
    section = load(place / "recipes" / "mine.yaml").environment
    (tool,) = check_importable(section).tools
    assert tool["function"]["name"] == "multiply"
    made = load_environment(str(section.name)).make
    assert made is not None
    assert list(made().reset({"prompt": "2*3=", "answer": "6"})) == [{"role": "user", "content": "2*3="}]
