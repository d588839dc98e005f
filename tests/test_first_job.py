"""docs/guides/recipes.md: its four commands, run as they stand, against a hub on loopback."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import dapo_row
from hub_server import hub_server, variables

from megatron_rl.data.toy import write_chat_tokenizer
from megatron_rl.models.hf_folder import write_folder
from megatron_rl.models.mapping import stored_params
from megatron_rl.models.shape import ModelShape
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


# Qwen3-8B, made small in what the layout of its recipe leaves free
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 1024,
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A clone, as far as the commands can tell; `make` finds everything installed."""
    for name in HERE:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").mkdir()
    for path in (ROOT / ".venv").iterdir():
        if not path.name.startswith(".installed"):
            (tmp_path / ".venv" / path.name).symlink_to(path)
    for extra in ("cpu", "gpu"):
        (tmp_path / ".venv" / f".installed-{extra}").touch()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    return tmp_path


@pytest.fixture
def env(place: Path) -> Iterator[dict[str, str]]:
    """Variables of a shell that sees a hub with small repositories of the published names."""
    model = place / "published"
    write_chat_tokenizer(model, iter(["What is 1 + 2?"]))
    hf_config = read_card("Qwen3-8B") | SMALL
    tensors = {
        name: torch.zeros(size, dtype=torch.bfloat16)
        for param in stored_params(ModelShape.from_hf(hf_config))
        for name, size in param.sizes.items()
    }
    write_folder(model, tensors, hf_config)
    rows = [dapo_row(f"{ASKED}What is {n} + {n}?", str(2 * n), n) for n in range(1, 40)]
    with hub_server() as server:
        server.add("Qwen/Qwen3-8B", model)
        server.add("BytedTsinghua-SIA/DAPO-Math-17k", table(rows * 3), "dataset")
        server.add("BytedTsinghua-SIA/AIME-2024", table([dapo_row("1 + 2?", "003")]), "dataset")
        path = f"{place / 'bin'}:{os.environ['PATH']}"
        yield os.environ | {"PATH": path} | variables(server, place / "home")


def table(rows: list[dict[str, object]]) -> dict[str, bytes]:
    """Files of a published table."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return {"data/train-00000-of-00001.parquet": sink.getvalue().to_pybytes()}


def test_the_four_commands(place: Path, env: dict[str, str]) -> None:
    block = SHELL.search((ROOT / "docs" / "guides" / "recipes.md").read_text())
    assert block is not None
    said = []
    for command in block[1].splitlines():
        words = ["bash", "-c", command]
        done = subprocess.run(
            words, cwd=place, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        said.append(done.stdout)
    _, planned, fetched, submitted = said
    assert "fetch      Qwen/Qwen3-8B@" in planned
    assert re.search(r"DAPO-Math-17k@\w{40}\[train\] \(data.train\): complete", fetched)
    assert re.search(r"Qwen3-8B@\w{40} \(model.path\): complete", fetched)
    assert "recipes/dapo_fp8.yaml" in submitted
