"""Version, citation, changelog and CI of a release."""

import re
from pathlib import Path

import pytest
import yaml

import megatron_rl
from megatron_rl import cli

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_one_version_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megatron-rl {megatron_rl.__version__}\n"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == megatron_rl.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d.*)\] - (.*)$", changes, re.M)
    assert released[0] == (citation["version"], citation["date-released"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_exists(path: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert runs
    for line in "\n".join(runs).splitlines():
        program, *words = line.split()
        if program == "make":
            assert words
            assert set(words) <= set(targets), line
        else:
            assert (ROOT / program).is_file(), line
