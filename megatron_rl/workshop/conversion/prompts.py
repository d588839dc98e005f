"""Texts that a conversion is calibrated with, or compared on, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.config.load import from_base
from megatron_rl.data.prompts import FolderTokenizer, load_dataset
from megatron_rl.types import Batch, Prompt, Rollout, Scored, collate, written

Rows = Sequence[tuple[int, ...]]
SAMPLES = 128
LONGEST = 512  # tokens; of a longer text the first ones


def token_rows(given: str, folder: Path, count: int = SAMPLES) -> list[tuple[int, ...]]:
    """`given`: a file of texts, one a line (.txt), a data set as `data.train` takes it, or a preset of conf/data.

    `folder`: of the tokenizer.
    """
    tokenizer, path = FolderTokenizer(folder), Path(given)
    if path.suffix == ".txt" and path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [tuple(ids) for ids in tokenizer.encode_texts(lines[:count], LONGEST)]
    else:
        words = [f"data.train={path}"] if path.exists() else [f"data={given}"]
        data = from_base({}, words).data
        rows = [prompt.token_ids for prompt in load_dataset("train", data, tokenizer, LONGEST).prompts[:count]]
    rows = [row[:LONGEST] for row in rows if len(row) > 1]
    if not rows:
        raise ConfigError(f"{given} holds no text of two tokens or more")
    return rows


def batch_of(rows: Rows) -> Batch:
    """Every token but the first is asked for."""
    return collate(
        [
            Scored(
                Rollout(
                    Prompt(number, row[:1], "", {}), number, 0, row[1:], [0.0] * (len(row) - 1),
                    written(len(row) - 1), "stop", 0,
                ),
                reward=0.0,
            )
            for number, row in enumerate(rows)
        ]
    )  # fmt: skip
