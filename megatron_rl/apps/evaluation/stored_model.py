"""Finds a stored model (a run's, a checkpoint, a Hugging Face folder, LoRA adapters), settles the
configuration that it is sampled with, and serves it by engines without a learner.
"""

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.apps.evaluation.adapters import alone, is_peft, merged, read
from megatron_rl.checkpoint import checkpoints
from megatron_rl.checkpoint.torch_dist import reader as torch_dist
from megatron_rl.config import ConfigError
from megatron_rl.config.load import from_base, recorded
from megatron_rl.config.schema import KEPT, Config, Format
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import stored_params
from megatron_rl.models.model import Model, read_hf_config
from megatron_rl.models.shape import Lora
from megatron_rl.models.shards import ShardGroups, local_shard
from megatron_rl.models.weight_files import is_checkpoint
from megatron_rl.processes.process import raise_interrupt
from megatron_rl.processes.scratch import entered
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.weight_sync.push import WeightSync


@dataclass(frozen=True)
class StoredModel:
    folder: Path  # of config.json and tokenizer
    weights: Path  # a Hugging Face folder, which is then the same, or a torch_dist checkpoint
    label: str  # for file names
    note: str = ""  # what is not obvious about it
    # of its run: the weights may be adapters alone, the model that they change is `folder`
    lora: Lora | None = None

    @property
    def base(self) -> Path:
        """A whole model's weights."""
        if alone(self.weights):
            return self.folder
        return self.weights


def run_of(path: Path) -> Path | None:
    """The run that MODEL is, or lies in: runs/NAME/model, runs/NAME/checkpoints/step_N."""
    path = path.resolve()
    path = path.parent if path.name == checkpoints.POLICY else path
    for place in (path, *path.parents[:2]):
        run = RunDir(place)
        if run.config.is_file() and (
            path in (place, run.model, run.best_model) or path.parent == run.checkpoints
        ):
            return place
    return None


def find(path: Path, config: Config | None, hf: Path | None) -> StoredModel:
    """`config`: the run's. `hf`: folder of config.json and tokenizer if not beside the weights."""
    return replace(_found(path, config, hf), lora=Lora.of(config.learner.lora) if config else None)


def _found(path: Path, config: Config | None, hf: Path | None) -> StoredModel:
    if not path.is_dir():
        raise ConfigError(
            f"{path}: no such folder; name a run, a checkpoint or a Hugging Face model folder"
        )
    if RunDir(path).config.is_file():
        return _of_run(path, config, hf)
    policy = path / checkpoints.POLICY
    if is_checkpoint(policy):  # a run's runs/NAME/checkpoints/step_N
        return StoredModel(_companions(path, config, hf), policy, f"{_of(path)}{path.name}")
    if is_checkpoint(path) and (path / KEPT / "config.json").is_file():
        hf = hf or path / KEPT
    if is_checkpoint(path) or is_peft(path):
        return StoredModel(_companions(path, config, hf), path, path.name)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{path}: neither a run (config.yaml), nor a checkpoint (metadata.json), nor a Hugging "
            "Face model (config.json); name one of these"
        )
    return StoredModel(path, path, f"{_of(path)}{path.name}")


def _of_run(path: Path, config: Config | None, hf: Path | None) -> StoredModel:
    model = RunDir(path).model
    root = RunDir(path).checkpoints
    if (model / "config.json").is_file():
        note = ""
        for step in checkpoints.steps(root):
            if checkpoints.path_of(root, step).stat().st_mtime > model.stat().st_mtime:
                note = (
                    f"{model} is older than the checkpoint of step {step}, which can be named too"
                )
                break
        return StoredModel(model, model, path.name, note)
    newest = next(checkpoints.complete_checkpoints(root, lambda line: None), None)
    if newest is None:
        raise ConfigError(
            f"{path}: no model/ and no complete checkpoint yet; a run leaves model/ at its end with "
            "checkpoint.export_hf=true, and checkpoints with checkpoint.every"
        )
    policy = newest.path / checkpoints.POLICY
    note = (
        f"{path} has no model/ yet, so that its newest checkpoint is taken (step {newest.step}); "
        f"`python tools/convert.py export {policy} FOLDER`, in the repository, makes a model of it"
    )
    return StoredModel(
        _companions(path, config, hf), policy, f"{path.name}-step_{newest.step}", note
    )


def _companions(path: Path, config: Config | None, hf: Path | None) -> Path:
    folder = hf or (config.model.folder if config else None)
    if folder is None or not (folder / "config.json").is_file():
        where = f"{folder} has none" if folder else "their folder is unknown"
        raise ConfigError(
            f"{path} holds weights alone, and {where}: name config.json and tokenizer with --hf FOLDER"
        )
    return folder


def _of(path: Path) -> str:
    run = run_of(path)
    return f"{run.name}-" if run else ""


class StoredWeights:
    """A learner to `weight_sync`, of one rank that never changes; read anew at each sync."""

    def __init__(self, stored: StoredModel) -> None:
        self._stored = stored
        try:
            self.model = Model.of(read_hf_config(stored.folder, key="MODEL"), Layout())
        except ValueError as error:
            raise ConfigError(f"{stored.folder}: {error}") from None
        self._adapters = None
        if stored.weights != stored.folder:
            self._adapters = read(stored.weights, self.model.shape, stored.lora)
        self.groups = ShardGroups()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters in BF16, from which live updates are quantized too."""
        shape = self.model.shape
        layout = self.model.layout
        get = self._getter()
        for param in stored_params(shape):
            shard = local_shard(param.megatron, shape, layout, self.groups.place, get)
            yield param.megatron, shard.to(torch.bfloat16)

    def _getter(self) -> Callable[[str], Tensor]:
        stored = self._stored
        if stored.weights == stored.folder:
            return HfFolder(stored.weights).get
        if self._adapters is not None:
            return merged(HfFolder(stored.folder), self._adapters)
        return torch_dist.getter(torch_dist.Reader(stored.weights), self.model.shape)

    def take_activation_amax(self) -> Tensor:
        raise NotImplementedError("smoothing is measured by a learner")

    def take_cache_amax(self) -> Tensor:
        raise NotImplementedError("scales of an FP8 cache are measured by a learner")


FORMATS = {"bf16": Format.none} | {
    format.value: format for format in Format if format != Format.none
}
# of a model that comes from no run, where its context is long enough
PROMPT_TOKENS = 2048
ANSWER_TOKENS = 8192
# what a run shares with other processes and machines, or measures in its learner
ALONE = (
    "run.stop=null",
    "checkpoint.best=null",
    "model.init=pretrained",
    "reward.overlong_buffer=0",
    "rollout={source: sampler, samples_per_prompt: 2, dynamic_sampling: false}",
    "sampler={engines: 1, dedicated_nodes: false, addresses: [], formats: []}",
    "sampler={devices: null, sleep: none}",
    "sync={transport: file, dir: null, every: 1, full_every: 1}",
    "eval.every=1",
    "quantization={smoothing: null, kv_cache: none}",
)


def settings(
    run: Path | None,
    stored: StoredModel,
    format: str,
    overrides: Sequence[str] = (),
    recipe: Config | None = None,
) -> Config:
    """Configuration for sampling and scoring: the run's, the recipe's, or the default one."""
    base: dict[str, Any] = asdict(recipe) if recipe else {"rollout": _lengths(stored.folder)}
    base = recorded(RunDir(run).config) if run else base
    for unused in ("correction", "advantage", "loss", "learner", "optim"):
        base.pop(unused, None)
    named = [f"model.path={stored.folder}", f"quantization.format={FORMATS[format].value}"]
    return from_base(base, [*ALONE, *named, *overrides])


def _lengths(folder: Path) -> dict[str, int]:
    given = read_hf_config(folder, key="MODEL").get("max_position_embeddings")
    context = int(given or PROMPT_TOKENS + ANSWER_TOKENS)
    prompt = min(PROMPT_TOKENS, context // 4)
    return {
        "max_prompt_tokens": prompt,
        "max_response_tokens": min(ANSWER_TOKENS, context - prompt),
    }


@contextmanager
def served(config: Config, stored: StoredModel, log_dir: Path | None = None) -> Iterator[Sampler]:
    """An engine that holds the model's weights in the format of the configuration."""
    # so that what was started ends with its owner's last words
    signal.signal(signal.SIGTERM, raise_interrupt)
    weights = StoredWeights(stored)
    with entered():
        logs = log_dir or Path(tempfile.gettempdir())
        sampler = Sampler(EngineSettings.from_config(config), stored.folder, logs)
        with closing(sampler):
            sampler.launch()
            sync = WeightSync(weights, sampler, config)
            with closing(sync):  # until the end: an engine that dies reads its weights again
                sync.push(0)
                yield sampler
