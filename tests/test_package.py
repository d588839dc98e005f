"""The package as a wheel, made by way of an sdist: its files, its commands in an empty folder, and
its public names.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("megatron_rl", "conf", "recipes", "constraints")
LEFT_OUT = ("*.pyc", "*.md", "results")  # of recipes/: their index, and results of comparisons


def run(*command: str | Path, folder: Path, **variables: str) -> str:
    environment = os.environ | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built without a network from a copy: setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("build")
    for name in BUILT_FROM:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    script = "from setuptools.build_meta import build_sdist; build_sdist('.')"
    run(sys.executable, "-c", script, folder=folder)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-index", "--no-build-isolation", "--no-deps")
    run(*pip, *folder.glob("*.tar.gz"), folder=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("target")
    pip = (sys.executable, "-m", "pip", "install", "--no-index", "--no-deps")
    run(*pip, "--target", target, wheel, folder=target)
    return target


def test_the_wheel_has_every_file(wheel: Path, tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", *LEFT_OUT)
    shutil.copytree(ROOT / "megatron_rl", tmp_path / "megatron_rl", ignore=ignore)
    expected = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {"megatron_rl/py.typed", "megatron_rl/conf/model/Qwen3-8B.json"} < found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("constraints overrides-cpu", (ROOT / "constraints" / "overrides-cpu.txt").read_text()),
        ("train tools --print-config", "name: tools\n"),
        ("train mine.yaml --explain run.steps", "megatron_rl/recipes/quickstart.yaml\n"),
        ("train quickstart --dry-run model.path=data/toy/model model.init=random", "(dry run)"),
    ],
)
def test_commands_run_in_a_folder_without_recipes(
    installed: Path, place: Path, words: str, said: str
) -> None:
    (place / "mine.yaml").write_text("base: recipes/quickstart.yaml\n")
    command = (sys.executable, "-m", "megatron_rl", *words.split())
    assert said in run(*command, folder=place, PYTHONPATH=str(installed))


def test_public_names_are_imported_without_torch(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, megatron_rl; from megatron_rl import *; print(megatron_rl.__file__); "
        "assert set(megatron_rl.__all__) == set(megatron_rl._PLACES) <= set(globals()); "
        "assert Environment().step(Answer('', '')) == Step(done=True); load_config('tools'); "
        "assert not {'torch', 'vllm', 'megatron', 'transformers'} & set(sys.modules)"
    )
    printed = run(sys.executable, "-c", code, folder=tmp_path, PYTHONPATH=str(installed))
    assert printed == f"{installed}/megatron_rl/__init__.py\n"
