"""Checkpoints of one tensor with valid checksums and arbitrary content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.torch_dist.writer import Block, write_blocks, write_index

WEIGHT = torch.arange(64, dtype=torch.float32).view(8, 8)
KEY = "embedding.word_embeddings.weight"


def save(
    root: Path, step: int, change: Callable[[Path], object] = lambda folder: None, score: Any = None
) -> Path:
    """`score`: of eval/accuracy, or another metric's name and its own."""
    partial = checkpoints.partial_of(root, step)
    (partial / "policy").mkdir(parents=True)
    (partial / "ranks").mkdir()
    write_parts(partial / "policy", 0, 4)
    save_file({"rng.cpu": torch.get_rng_state()}, partial / "ranks" / "rank_0.safetensors")
    save_file({}, partial / "sync.safetensors")
    change(partial)
    files = {
        str(path.relative_to(partial)): list(checkpoints.digest(path))
        for path in partial.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    about: dict[str, Any] = {
        "best": score if isinstance(score, list) else score and ["eval/accuracy", score]
    }
    about |= {
        "driver": {"position": 10 * step, "seen": {"samples": 9, "tokens": 99}},
        "files": files,
    }
    return checkpoints.publish(
        partial, root, step=step, updates=2 * step, layout={"tp": 1}, **about
    ).path


def write_parts(folder: Path, *rows: int) -> None:
    """The tensor in parts of four rows, the first of which are given."""
    blocks = [Block(KEY, (8, 8), (row, 0), WEIGHT[row : row + 4]) for row in rows]
    write_index(folder, write_blocks(folder / "rank_0.distcp", blocks))


def forge(path: Path, content: dict[str, Any]) -> None:
    """Write a manifest with a valid checksum."""
    stored = {"content": content, "checksum": checkpoints._checksum(content)}
    (path / "checkpoint.json").write_text(json.dumps(stored))


def newest(root: Path) -> tuple[int | None, list[str]]:
    """The step that a run would go on from, and what is said of those that are passed over."""
    said: list[str] = []
    found = next(checkpoints.complete_checkpoints(root, said.append), None)
    return found and found.step, said
