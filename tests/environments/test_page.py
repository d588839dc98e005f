"""The commands of docs/guides/environments.md run unchanged."""

from pathlib import Path

import pytest
from helpers import block, small_recipes, typed

from megatron_rl.tracking.metrics_file import read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "environments.md"


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1200)
def test_the_pages_commands_run_as_they_stand(tmp_path: Path) -> None:
    small_recipes(tmp_path, tools=4, tools_sft=1)
    (tmp_path / "calculator.py").write_text(block(PAGE, "python"))
    (tmp_path / "recipes" / "mine.yaml").write_text(block(PAGE, "yaml"))
    said = dict[str, str]()
    for line in block(PAGE, "bash").splitlines():
        name = line.split()[1] + " --dry-run" * ("--dry-run" in line)
        said[name] = typed(tmp_path, line)
        if name == "train":
            # the report's command writes it again
            (tmp_path / "runs" / "mine" / "report.html").unlink()
    assert list(said) == ["quickstart", "train --dry-run", "train", "report", "chat"]
    assert "environment calculator.py:Arithmetic" in said["train --dry-run"]
    lines = read_metrics(tmp_path / "runs" / "mine" / "metrics.jsonl")
    assert [line["progress/step"] for line in lines] == [0, 1, 2]
    assert all(
        line["session/errors"] == 0 and line["session/turns_mean"] >= 1 for line in lines[1:]
    )
    assert "turns, " in (tmp_path / "runs" / "mine" / "report.html").read_text()
    assert said["chat"]  # what a policy says that knows nothing
    noting = f"open({str(tmp_path / 'asked')!r}, 'a').close(); self.right = "
    (tmp_path / "calculator.py").write_text(block(PAGE, "python").replace("self.right = ", noting))
    typed(
        tmp_path,
        "megatron-rl eval runs/mine --set data/tools/test.jsonl eval.sets.test.max_prompts=2",
    )
    assert (tmp_path / "asked").is_file(), "a set's prompts are sessions of the run's environment"
