"""Sources of weights: finds, lazily reads and hashes those of a run, checkpoint or model folder.

A source is a run, RUN@STEP, a checkpoint, a Hugging Face or PEFT folder, or an id of the hub.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from megatron_rl.apps.evaluation import stored_model
from megatron_rl.apps.evaluation.adapters import Adapters, merged, read
from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.torch_dist import index as torch_dist_index
from megatron_rl.checkpoint.torch_dist import reader as torch_dist
from megatron_rl.checkpoint.torch_dist.index import CheckpointError
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.logs import logger
from megatron_rl.models import weight_files
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import Lora, ModelShape
from megatron_rl.models.tensors import DTYPES, TensorSpec, as_bytes, dtype_name
from megatron_rl.models.weight_files import refuse_links_out
from megatron_rl.preflight.downloads import fetched
from megatron_rl.tracking.run_dir import RunDir

AT_STEP = re.compile(r"(.+)@([0-9]{1,18})")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # of config.json
QUANTIZATION_FILE = "hf_quant_config.json"  # of modelopt, beside it
Get = Callable[[str], Tensor]


@dataclass(frozen=True)
class Weights:
    """Names, dtypes and shapes of all tensors, in a cheap order of reading; reads none yet."""

    specs: Mapping[str, TensorSpec]
    open: Callable[[], Get]  # each gives its own `get`, which may hold on to what it has read last

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def made_into(
        self, specs: Mapping[str, TensorSpec], made: Callable[[str, Get], Tensor]
    ) -> "Weights":
        """Other weights, each of which is `made(name, get)` of these."""

        def opened() -> Get:
            get = self.open()
            return lambda name: made(name, get)

        return Weights(specs, opened)


def of_folder(path: Path) -> Weights:
    folder = HfFolder(path)
    refuse_links_out(path, folder.files)
    return Weights({name: folder.spec(name) for name in folder.names}, lambda: folder.read)


def of_checkpoint(path: Path, shape: ModelShape) -> Weights:
    reader = torch_dist.Reader(path)
    return Weights(torch_dist.specs(reader, shape), lambda: torch_dist.getter(reader, shape))


@dataclass(frozen=True)
class Source:
    """Weights somewhere on disk, and what is known of their model."""

    path: Path  # of the weights themselves
    folder: Path  # of config.json and tokenizer
    hf_config: dict[str, Any]
    run: Path | None = None
    lora: Lora | None = None  # of the run

    @property
    def is_folder(self) -> bool:
        """True for a Hugging Face folder, False for a torch_dist checkpoint."""
        return self.path == self.folder

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_hf(self.hf_config)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The words of config.json on quantized weights; None where they are plain."""
        found = (self.hf_config.get(key) for key in QUANTIZATION_KEYS)
        given = next((value for value in found if value), None)
        if given is None and (self.folder / QUANTIZATION_FILE).is_file() and self.is_folder:
            return {"quant_method": "modelopt"}
        if isinstance(given, dict) or given is None:
            return given
        return {"quant_method": str(given)}

    @property
    def weights(self) -> Weights:
        """The weights as they are stored."""
        if self.is_folder:
            return of_folder(self.path)
        if (held := self.adapters) is not None:
            base = HfFolder(self.folder)
            return Weights(
                {name: base.spec(name) for name in base.names}, lambda: merged(base, held)
            )
        return of_checkpoint(self.path, self.shape)

    @cached_property
    def adapters(self) -> Adapters | None:
        """LoRA adapters, whose base model is in `folder`; None for weights of a whole model."""
        if self.is_folder:
            return None
        return read(self.path, self.shape, self.lora)

    @property
    def plain(self) -> Weights:
        """ValueError where they are quantized."""
        if self.quantization is not None:
            raise ValueError(
                f"{self.folder} holds quantized weights ({self.quantization.get('quant_method')}), "
                "plain ones are needed here: make them with `python tools/convert.py dequantize "
                f"{self.folder} FOLDER`"
            )
        return self.weights

    @property
    def weight_errors(self) -> list[str]:
        """Differences between the weights and what config.json promises."""
        whole = self.is_folder or self.adapters is not None
        room = weight_files if whole else torch_dist_index
        return list(room.weight_errors(self.folder if whole else self.path, self.shape))

    def refuse_misfits(self) -> None:
        if found := self.weight_errors:
            raise CheckpointError(found[0])


def find(given: str, hf: Path | None = None) -> Source:
    """`given`: a folder, RUN@STEP, or an id of the hub. Raises ConfigError or CheckpointError if it
    is unusable.
    """
    path = fetched(given, "SOURCE")
    at = AT_STEP.fullmatch(given)
    if at is not None and not path.exists():
        path = _of_step(Path(at[1]), int(at[2]))
    run = stored_model.run_of(path)
    stored = stored_model.find(path, recorded_config(RunDir(run).config) if run else None, hf)
    if stored.note:
        note(stored.note)
    return Source(
        stored.weights, stored.folder, read_hf_config(stored.folder, key=given), run, stored.lora
    )


def _of_step(run: Path, step: int) -> Path:
    root = RunDir(run).checkpoints
    present = checkpoints.steps(root)
    if step not in present:
        there = ", ".join(map(str, sorted(present))) or "none"
        raise ConfigError(
            f"{run}@{step}: no checkpoint of step {step} in {root} (there are: {there})"
        )
    return checkpoints.verify(checkpoints.path_of(root, step)).path


note = logger("convert").info


def digest(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and bytes, independent of the device."""
    flat = as_bytes(tensor)
    about = f"{DTYPES[dtype_name(tensor.dtype)][0]} {'x'.join(map(str, tensor.shape))}"
    return f"{about} {xxhash.xxh3_64_hexdigest(flat.numpy().data)}"


def content_digest(digests: Mapping[str, str]) -> str:
    """Digest of a whole model: equal for folders of equal numbers, however divided into files."""
    lines = (f"{name} {digests[name]}\n" for name in sorted(digests))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())
