"""model.path may be a checkpoint that the converter made: config.json and tokenizer are those that it keeps."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.config.schema import ModelSection

MODEL, IMPORTED = Path("data/toy/model"), Path("imported")


@pytest.fixture
def imported(place: Path) -> Path:
    """As far as a dry run looks at it."""
    shutil.copytree(MODEL, IMPORTED / "hf")
    (IMPORTED / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (IMPORTED / ".metadata").write_bytes(b"")
    return IMPORTED


def dry_run(*overrides: str) -> int:
    return cli.main(["train", "mine.yaml", "--dry-run", f"model.path={IMPORTED}", "model.init=pretrained", *overrides])


def test_a_dry_run_takes_an_import(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("log.export=true") == 0, capsys.readouterr().err
    assert "imported" in capsys.readouterr().out
    assert ModelSection(str(imported)).folder == imported / "hf"
    assert ModelSection(str(MODEL)).folder == MODEL


@pytest.mark.fault("an imported checkpoint lacks its index, its config.json or its tokenizer", "a dry run says so")
@pytest.mark.parametrize(
    ("lost", "word"),
    [(".metadata", "no .safetensors"), ("metadata.json", "no .safetensors"), ("hf/config.json", "no config.json"),
     ("hf/tokenizer.json", "tokenizer.json")],
)  # fmt: skip
def test_what_an_import_lacks(imported: Path, capsys: pytest.CaptureFixture[str], lost: str, word: str) -> None:
    (imported / lost).unlink()
    assert dry_run() == 2
    said = capsys.readouterr().err
    assert "model.path" in said
    assert word in said


@pytest.mark.fault("a file of the model's folder is a link to elsewhere", "a run that exports the model is refused")
def test_an_export_would_copy_what_a_link_leads_to(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("secret").write_text("secret")
    (imported / "hf" / "notes.txt").symlink_to(Path("secret").resolve())
    assert dry_run("log.export=false") == 0, capsys.readouterr().err
    assert dry_run("log.export=true") == 2
    assert "log.export: imported/hf/notes.txt is a link out of its folder" in capsys.readouterr().err
