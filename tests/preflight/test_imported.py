"""model.path may be a checkpoint that the converter made: config.json and tokenizer are those that
it keeps.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import Command

from megatron_rl.checkpoint.torch_dist.index import entries
from megatron_rl.checkpoint.torch_dist.writer import Block, write_blocks, write_index
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import ModelSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.checks import check_served

MODEL = Path("data/toy/model")
IMPORTED = Path("imported")


@pytest.fixture
def imported(place: Path) -> Path:
    """As the converter leaves it; every weight is zero."""
    shutil.copytree(MODEL, IMPORTED / "hf")
    shape = ModelShape.from_hf(read_hf_config(MODEL))
    blocks = []
    for param in params(shape):
        whole = param.local_shape(Layout())
        for entry in entries(param, shape, stacked=True)[: 0 if param.row.copy else 1]:
            lengths = [length for _, length in entry.axes]
            places = [index for index, _ in entry.axes]
            values = torch.zeros((*(1 for _ in lengths), *whole), dtype=torch.bfloat16)
            blocks.append(
                Block(
                    entry.key,
                    (*lengths, *whole),
                    (*places, *(0 for _ in whole)),
                    values,
                )
            )
    write_index(IMPORTED, write_blocks(IMPORTED / "rank_0.distcp", blocks))
    return IMPORTED


STARTS = (f"model.path={IMPORTED}", "model.init=pretrained")


def test_a_dry_run_takes_an_import(imported: Path, command: Command) -> None:
    assert "imported" in command.dry_run(*STARTS, "checkpoint.export_hf=true")
    assert ModelSection(str(imported)).folder == imported / "hf"
    assert ModelSection(str(MODEL)).folder == MODEL


@pytest.mark.fault(
    "an imported checkpoint lacks its index, its config.json or its tokenizer", "a dry run says so"
)
@pytest.mark.parametrize(
    ("lost", "word"),
    [
        (".metadata", "no .safetensors"),
        ("metadata.json", "no .safetensors"),
        ("hf/config.json", "no config.json"),
        ("hf/tokenizer.json", "tokenizer.json"),
    ],
)
def test_what_an_import_lacks(imported: Path, command: Command, lost: str, word: str) -> None:
    (imported / lost).unlink()
    said = command.refused(*STARTS)
    assert "model.path" in said
    assert word in said


@pytest.mark.fault(
    "a file of the model's folder is a link to elsewhere", "a run that exports the model is refused"
)
def test_an_export_would_copy_what_a_link_leads_to(imported: Path, command: Command) -> None:
    Path("secret").write_text("secret")
    (imported / "hf" / "notes.txt").symlink_to(Path("secret").resolve())
    command.dry_run(*STARTS, "checkpoint.export_hf=false")
    assert "checkpoint.export_hf: imported/hf/notes.txt" in command.refused(
        *STARTS, "checkpoint.export_hf=true"
    )


@pytest.mark.fault(
    "config.json lies about the shapes of an imported checkpoint", "a dry run and `serve` say so"
)
@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("intermediate_size", "has shape"),
        ("num_hidden_layers", "lacks|stacks"),
        ("vocab_size", "has shape"),
        ("num_key_value_heads", "has shape"),
    ],
)
def test_shapes_that_lie(imported: Path, command: Command, key: str, word: str) -> None:
    path = imported / "hf" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {key: config[key] * 2}))
    said = command.refused(*STARTS)
    assert "model.path" in said
    assert re.search(word, said)
    with pytest.raises(ConfigError, match=word):
        check_served(ModelSection(str(imported)))
