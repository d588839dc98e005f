"""docs/guides/recipes.md: its five commands, run as they stand, on small files."""

import json
import os
import re
import subprocess
from math import prod
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import dapo_row

from megatron_rl.data.toy import write_chat_tokenizer
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.model import Model
from megatron_rl.preflight.files import read_card

ROOT = Path(__file__).parent.parent
HERE = (
    "conf",
    "recipes",
    "slurm",
    "tools",
    "megatron_rl",
    "pyproject.toml",
    "constraints",
    "Makefile",
)
ASKED = "Solve step by step. Answer: $Answer last.\n\n"
SHELL = re.compile(r"^```bash\n# not run[^\n]*\n(make install\n.*?)^```$", re.DOTALL | re.MULTILINE)
# says that it was called, and does what the job does first: its check, without the nodes
SBATCH = """#!/usr/bin/env bash
recipe=$(bash -c "$(grep '^RECIPE=' "$1"); echo \\$RECIPE")
.venv/bin/python -m megatron_rl.apps.planner.slurm "$1" "$recipe" && echo "Submitted batch job 7 for $recipe"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A clone, as far as the commands can tell, with three downloads; `make` finds everything
    installed.
    """
    for name in HERE:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    for path in (ROOT / ".venv").iterdir():
        if not path.name.startswith(".installed"):
            (tmp_path / ".venv" / path.name).symlink_to(path)
    for extra in ("cpu", "gpu"):
        (tmp_path / ".venv" / f".installed-{extra}").touch()
    downloads = tmp_path / "downloads"
    model = tmp_path / "models" / "Qwen3-8B"
    downloads.mkdir()
    rows = [
        dapo_row(
            f"{ASKED}What is {n} + {n}?",
            str(2 * n),
            n,
        )
        for n in range(1, 40)
    ]
    pq.write_table(pa.Table.from_pylist(rows * 3), downloads / "dapo-math-17k.parquet")
    pq.write_table(
        pa.Table.from_pylist([dapo_row(f"{ASKED}1 + 2?", "003")]), downloads / "aime-2024.parquet"
    )
    write_chat_tokenizer(model, iter(["What is 1 + 2?"]))
    (model / "config.json").write_text(json.dumps(read_card("Qwen3-8B")))
    write_weights(model)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    return tmp_path


def write_weights(model: Path) -> None:
    """Names and shapes of all tensors, and a hole where their 16 GB would be."""
    header = {}
    end = 0
    for param in params(Model.of(json.loads((model / "config.json").read_text()), Layout()).shape):
        for name, shape in param.sizes.items():
            begun = end
            end = end + 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begun, end]}
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_the_five_commands(place: Path) -> None:
    block = SHELL.search((ROOT / "docs" / "guides" / "recipes.md").read_text())
    assert block is not None
    commands = block[1].splitlines()
    assert len(commands) == 5
    env = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    said = []
    for command in commands:
        words = ["bash", "-c", command]
        done = subprocess.run(
            words, cwd=place, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        said.append(done.stdout)
    assert "39" in said[1]
    assert pq.read_table(place / "data" / "aime_2024.parquet").to_pylist()[0]["answer"] == "3"
    assert "recipes/dapo_fp8.yaml" in said[4]
