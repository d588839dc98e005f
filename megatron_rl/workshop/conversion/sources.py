"""Which weights a command line means: of a run, of one of its steps, of a checkpoint, of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.torch_dist import reader as torch_dist
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.schema import KEPT, Config
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.weight_files import refuse_links_out
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.conversion import kept
from megatron_rl.workshop.conversion.to_folder import Beside
from megatron_rl.workshop.conversion.weights import Weights, files_of, of_checkpoint, of_folder
from megatron_rl.workshop.evaluation import stored_model

AT_STEP = re.compile(r"(.+)@([0-9]{1,18})")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # of config.json
QUANTIZATION_FILE = "hf_quant_config.json"  # of modelopt, beside it


@dataclass(frozen=True)
class Source:
    """Weights somewhere on disk, and what is known of their model."""

    path: Path  # of the weights themselves
    folder: Path  # of config.json and tokenizer
    hf_config: dict[str, Any]
    run: Path | None = None

    @property
    def is_folder(self) -> bool:
        """Of Hugging Face; otherwise a torch_dist checkpoint."""
        return self.path == self.folder

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_hf(self.hf_config)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """What its config.json says of quantized weights; None where they are plain."""
        found = (self.hf_config.get(key) for key in QUANTIZATION_KEYS)
        given = next((value for value in found if value), None)
        if given is None and (self.folder / QUANTIZATION_FILE).is_file() and self.is_folder:
            return {"quant_method": "modelopt"}
        return given if isinstance(given, dict) or given is None else {"quant_method": str(given)}

    @property
    def weights(self) -> Weights:
        """As they are stored."""
        if not self.is_folder:
            return of_checkpoint(torch_dist.Reader(self.path), self.shape)
        folder = HfFolder(self.path)
        refuse_links_out(self.path, folder.files)
        return of_folder(folder)

    @property
    def plain(self) -> Weights:
        """ValueError where they are quantized."""
        if self.quantization is not None:
            raise ValueError(
                f"{self.folder} holds quantized weights ({self.quantization.get('quant_method')}), plain ones are "
                f"needed here: make them with `python tools/convert.py dequantize {self.folder} FOLDER`"
            )
        return self.weights

    @property
    def beside(self) -> Beside:
        """What an export puts beside the weights. An import knows the files that it came from."""
        imported = self.folder.name == KEPT and self.folder.parent == self.path
        return kept.beside(self.folder) if imported else Beside(self.folder)

    @property
    def job(self) -> dict[str, Any]:
        """What decides the bytes that are made of it."""
        beside = files_of(self.folder)
        return {"source": str(self.path.resolve()), "files": files_of(self.path) | (beside if self.run else {})}


def find(given: str, hf: Path | None = None, note: Callable[[str], None] = lambda line: None) -> Source:
    """`given`: a folder, or RUN@STEP. ConfigError and CheckpointError say what is wrong with it."""
    path, at = Path(given), AT_STEP.fullmatch(given)
    if at is not None and not path.exists():
        path = _of_step(Path(at[1]), int(at[2]))
    run = stored_model.run_of(path)
    config = recorded_config(RunDir(run).config) if run else None
    stored = stored_model.find(path, config, hf)
    if stored.note:
        note(stored.note)
    return Source(stored.weights, stored.folder, read_hf_config(stored.folder, key=given), run)


def run_config(source: Source) -> Config:
    if source.run is None:
        raise ConfigError(f"{source.path} belongs to no run")
    return recorded_config(RunDir(source.run).config)


def _of_step(run: Path, step: int) -> Path:
    root = RunDir(run).checkpoints
    present = checkpoints.steps(root)
    if step not in present:
        there = ", ".join(map(str, sorted(present))) or "none"
        raise ConfigError(f"{run}@{step}: no checkpoint of step {step} in {root} (there are: {there})")
    return checkpoints.verify(checkpoints.path_of(root, step)).path
