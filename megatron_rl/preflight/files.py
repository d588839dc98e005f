"""The files that a recipe names: what is absent, for a run here and for one that will be elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.evaluation import HeldOut
from megatron_rl.config.load import CONF
from megatron_rl.config.schema import (
    DataSection,
    EvalSection,
    LogSection,
    ModelInit,
    ModelSection,
    SamplerSection,
    SyncSection,
)
from megatron_rl.data.rows import data_files
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.weight_files import is_checkpoint
from megatron_rl.runs.wandb_log import resolve_mode


@dataclass(frozen=True)
class Absent:
    what: str  # for whoever brings it
    error: str  # for whoever wants to start here


def read_card(path: str) -> dict[str, Any]:
    """The config.json of a model that is elsewhere: its own where the folder is here, or the card of its name."""
    if (Path(path) / "config.json").is_file():
        return read_hf_config(path)
    cards = sorted(card.stem for card in (CONF / "model").glob("*.json"))
    if Path(path).name not in cards:
        raise ConfigError(
            f"model.path: no config.json in {path!r}, and no card in conf/model/ is of that name (cards: "
            f"{', '.join(cards)}); bring the folder, or put its config.json there as {Path(path).name or 'NAME'}.json"
        )
    return read_hf_config(CONF / "model" / f"{Path(path).name}.json")


def absent_model(model: ModelSection) -> Iterator[Absent]:
    folder, weights = Path(model.path), model.init == ModelInit.pretrained
    if not (model.folder / "config.json").is_file():
        parts = "config.json, tokenizer and .safetensors" if weights else "config.json and tokenizer"
        yield Absent(f"{folder}: {parts} (model.path)", "")  # read_hf_config has said so
    elif weights and not list(folder.glob("*.safetensors")) and not is_checkpoint(folder):
        yield Absent(
            f"{folder}: .safetensors (model.path)",
            f"model.path: {model.path} holds no .safetensors weights; bring them there (for the toy, the run of "
            "recipes/toy_sft.yaml makes them), or set model.init=random",
        )


def absent_data(data: DataSection, sets: Sequence[HeldOut]) -> Iterator[Absent]:
    given = [("data.train", path) for path in data.sources("train")]
    given += [(one.key, one.path) for one in sets if one.path]
    toy = any(Path(value).is_relative_to("data/toy") for _, value in given)
    way_out = "`megatron-rl toy` makes the toy's data" if toy else "bring it there, or name another file"
    for key, value in given:
        if not all(file.is_file() for file in data_files(key, Path(value))):
            yield Absent(f"{value} ({key})", f"{key}: no file {value!r}; {way_out}")


def absent_dir(sync: SyncSection) -> Iterator[Absent]:
    if sync.dir is not None and not Path(sync.dir).is_dir():
        error = f"sync.dir: no folder {sync.dir!r}; make it, or leave null for shared memory"
        yield Absent(f"{sync.dir}, a folder that learner and servers share (sync.dir)", error)


def absent_key(log: LogSection) -> Iterator[Absent]:
    try:
        resolve_mode(log.wandb)
    except (ValueError, RuntimeError) as error:
        yield Absent("a key for W&B (log.wandb)", str(error))


def absent_servers(sampler: SamplerSection) -> Iterator[Absent]:
    fleet = sampler.fleet
    if fleet.servers and not fleet.addresses:
        yield Absent(
            f"{fleet.servers} servers of {sampler.tensor_parallel} GPU(s) each, on nodes of their own (slurm/"
            "dapo_split.sbatch starts them)",
            f"sampler.fleet.servers: {fleet.servers} servers on other nodes, whose addresses nobody has given; submit "
            "slurm/dapo_split.sbatch, which starts them, or name them in sampler.fleet.addresses",
        )


def unnamed_data(data: DataSection, eval: EvalSection, sets: Sequence[HeldOut]) -> Iterator[str]:
    for key, needed in (("train", True), ("eval", eval.every > 0 and not eval.sets)):
        if needed and not getattr(data, key):
            yield f"data.{key}: not set; name a .jsonl or .parquet file" + (
                ", or set eval.every=0" if key == "eval" else ""
            )
    for one in sets:
        if not one.path:
            yield f"{one.key}: null, and there is no data.eval; name a .jsonl or .parquet file"
