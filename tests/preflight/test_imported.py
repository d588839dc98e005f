"""model.path may be a checkpoint that the converter made: config.json and tokenizer are those that it keeps."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron_rl import cli
from megatron_rl.checkpoint.torch_dist.index import entries
from megatron_rl.checkpoint.torch_dist.writer import Block, write_blocks, write_index
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import ModelSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.checks import check_served

MODEL, IMPORTED = Path("data/toy/model"), Path("imported")


@pytest.fixture
def imported(place: Path) -> Path:
    """As the converter leaves it; every weight is zero."""
    shutil.copytree(MODEL, IMPORTED / "hf")
    shape = ModelShape.from_hf(read_hf_config(MODEL))
    blocks = []
    for param in params(shape):
        whole = param.local_shape(Layout())
        for entry in entries(param, shape, stacked=True)[: 0 if param.row.copy else 1]:
            lengths, places = [length for _, length in entry.axes], [index for index, _ in entry.axes]
            values = torch.zeros((*(1 for _ in lengths), *whole), dtype=torch.bfloat16)
            blocks.append(Block(entry.key, (*lengths, *whole), (*places, *(0 for _ in whole)), values))
    write_index(IMPORTED, write_blocks(IMPORTED / "rank_0.distcp", blocks))
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


@pytest.mark.fault("config.json lies about the shapes of an imported checkpoint", "a dry run and `serve` say so")
@pytest.mark.parametrize(
    ("key", "factor", "word"),
    [
        ("intermediate_size", 2, "has shape"),
        ("num_hidden_layers", 2, "lacks|stacks"),
        ("vocab_size", 2, "has shape"),
        ("num_key_value_heads", 2, "has shape"),
    ],
)
def test_shapes_that_lie(imported: Path, capsys: pytest.CaptureFixture[str], key: str, factor: int, word: str) -> None:
    path = imported / "hf" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {key: config[key] * factor}))
    assert dry_run() == 2
    said = capsys.readouterr().err
    assert "model.path" in said
    assert re.search(word, said)
    with pytest.raises(ConfigError, match=word):
        check_served(ModelSection(str(imported)))


@pytest.mark.fault("the index of an imported checkpoint would run code", "a dry run says so, and nothing runs")
def test_an_index_that_executes(imported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (imported / ".metadata").write_bytes(b"cos\nsystem\n(Vtouch executed\ntR.")
    assert dry_run() == 2
    assert "refers to os.system" in capsys.readouterr().err
    assert not Path("executed").exists()
