"""Checks of files, folders, W&B key and servers in a recipe; consistency of config.json, weights
and tokenizer. `read_card`: config.json of a model, from conf/model/ if its folder is missing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl import hub
from megatron_rl.checkpoint.torch_dist import index as torch_dist_index
from megatron_rl.config import ConfigError, schema
from megatron_rl.config.evaluation import HeldOut
from megatron_rl.config.plain_yaml import CONF
from megatron_rl.data.hub_sets import parse
from megatron_rl.data.rows import data_files
from megatron_rl.files import read_json
from megatron_rl.models import weight_files
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import HfConfig, ModelShape
from megatron_rl.models.weight_files import is_checkpoint
from megatron_rl.preflight import downloads
from megatron_rl.tracking.trackers import PACKAGES
from megatron_rl.tracking.wandb_log import resolve_mode

LARGEST_TOKENIZER = 256 << 20


@dataclass(frozen=True)
class Absent:
    what: str  # description, in a list of missing files
    error: str  # error message, if the run is to start here


def read_card(path: Path | str, key: str = "model.path") -> dict[str, Any]:
    """Read the config.json of a model: from its folder, from the card of its name if that is
    missing, or from the hub.
    """
    folder = hub.local_folder(str(path))
    if (folder / "config.json").is_file():
        return read_hf_config(folder, key)
    one = hub.parse(str(path))
    name = Path(path).name
    if one:
        name = one.name.rpartition("/")[2]
    cards = sorted(card.stem for card in (CONF / "model").glob("*.json"))
    if name not in cards:
        if one:
            return read_hf_config(downloads.fetched(str(path), key, weights=False), key)
        raise ConfigError(
            f"{key}: no config.json in {str(path)!r}, and no card in conf/model/ is of that name "
            f"(cards: {', '.join(cards)}); bring the folder, or put its config.json there as "
            f"{name or 'NAME'}.json"
        )
    return read_hf_config(CONF / "model" / f"{name}.json")


def absent_model(model: schema.ModelSection) -> Iterator[Absent]:
    if hub.parse(model.path):
        return  # it is fetched, or reported by downloads.py
    folder = Path(model.path)
    weights = model.init == schema.ModelInit.pretrained
    if not (model.folder / "config.json").is_file():
        parts = "config.json and tokenizer"
        if weights:
            parts = "config.json, tokenizer and .safetensors"
        yield Absent(f"{folder}: {parts} (model.path)", "")  # reported by read_hf_config
    elif weights and not _holds_weights(model):
        yield Absent(
            f"{folder}: .safetensors (model.path)",
            f"model.path: {model.path} holds no .safetensors weights; bring them there (for the "
            "toy, the run of recipes/toy_sft.yaml makes them), or set model.init=random",
        )


def absent_data(data: schema.DataSection, sets: Sequence[HeldOut]) -> Iterator[Absent]:
    given = [("data.train", path) for path in data.sources("train")]
    given += [(one.key, one.path) for one in sets if one.path]
    hint = "bring it there, or name another file"
    if any(Path(value).is_relative_to("data/toy") for _, value in given):
        hint = "`megatron-rl toy` makes the toy's data"
    for key, value in given:
        if parse(value):
            continue  # it is fetched, or reported by downloads.py
        if not all(file.is_file() for file in data_files(key, Path(value))):
            yield Absent(f"{value} ({key})", f"{key}: no file {value!r}; {hint}")


def absent_dir(sync: schema.SyncSection) -> Iterator[Absent]:
    if sync.dir is not None and not Path(sync.dir).is_dir():
        error = f"sync.dir: no folder {sync.dir!r}; make it, or leave null for shared memory"
        yield Absent(f"{sync.dir}, a folder that learner and servers share (sync.dir)", error)


def absent_key(log: schema.LogSection) -> Iterator[Absent]:
    try:
        resolve_mode(log.wandb_mode)
    except (ValueError, RuntimeError) as error:
        yield Absent("a key for W&B (log.wandb)", str(error))


def absent_trackers(log: schema.LogSection) -> Iterator[Absent]:
    for name, package in PACKAGES.items():
        if name in log.trackers and find_spec(name) is None:
            error = (
                f"log.trackers: {name} needs the package {package}, which is not installed; run "
                f"`pip install {package}`, or leave {name} out"
            )
            yield Absent(f"the package {package} (log.trackers)", error)


def absent_servers(sampler: schema.SamplerSection) -> Iterator[Absent]:
    if sampler.dedicated_nodes and not sampler.addresses:
        yield Absent(
            f"{sampler.engines} servers of {sampler.tensor_parallel} GPU(s) each, on nodes of their "
            "own (slurm/dapo_split.sbatch starts them)",
            f"sampler.addresses: none for {sampler.engines} servers on dedicated nodes; submit "
            "slurm/dapo_split.sbatch, which starts them, or name them",
        )


def unnamed_data(
    data: schema.DataSection, eval: schema.EvalSection, sets: Sequence[HeldOut]
) -> Iterator[str]:
    if not data.train:
        yield "data.train: not set; name a .jsonl or .parquet file"
    if eval.every > 0 and not sets:
        yield "data.eval: not set; name a .jsonl or .parquet file, or set eval.every=0"
    for one in sets:
        if not one.path:
            yield f"{one.key}: null, and there is no data.eval; name a .jsonl or .parquet file"


class _Token(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]  # Unigram: pieces in the order of their ids


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Token] = []


def weight_errors(folder: Path, shape: ModelShape) -> Iterator[str]:
    """Differences between config.json and weights, of a checkpoint or a Hugging Face folder."""
    if is_checkpoint(folder):
        return torch_dist_index.weight_errors(folder, shape)
    return weight_files.weight_errors(folder, shape)


def weights(model: schema.ModelSection, shape: ModelShape) -> Iterator[str]:
    """Check stored weights against config.json, if a run starts from them."""
    if model.init == schema.ModelInit.pretrained and _holds_weights(model):
        yield from (f"model.path: {each}" for each in weight_errors(model.weights, shape))


def _holds_weights(model: schema.ModelSection) -> bool:
    folder = model.weights
    one = hub.parse(model.path)
    if one and hub.cached(one, hub.WEIGHTS) is None:
        return False  # not downloaded, or only some of its files
    return any(folder.glob("*.safetensors")) or is_checkpoint(folder)


def vocabulary(model: schema.ModelSection, shape: ModelShape) -> Iterator[str]:
    """Report tokens without a row in the embedding."""
    file = model.folder / "tokenizer.json"
    if not file.is_file():  # reported when the data is read
        return
    try:
        if file.stat().st_size > LARGEST_TOKENIZER:
            raise ValueError(f"it has more than {LARGEST_TOKENIZER} bytes")
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    except (OSError, ValueError, RecursionError) as error:
        yield f"model.path: {file} is not a readable tokenizer ({error})"
        return
    vocab = tokenizer.model.vocab
    if isinstance(vocab, list):
        vocab = {str(piece): number for number, piece in enumerate(vocab)}
    ids = vocab | {token.content: token.id for token in tokenizer.added_tokens}
    beyond = {name: number for name, number in ids.items() if not 0 <= number < shape.vocab}
    if beyond:
        name, number = min(beyond.items(), key=lambda item: item[1])
        more = f" and {len(beyond) - 1} more tokens" if len(beyond) > 1 else ""
        yield (
            f"model.path: vocab_size of config.json is {shape.vocab}, but {file} has {name!r} (id "
            f"{number}){more} beyond it; name the tokenizer of this model, or a model with rows "
            "for them"
        )


def end_of_text(
    model: schema.ModelSection, shape: ModelShape, hf_config: HfConfig
) -> Iterator[str]:
    """Check the ids that end a response; without them every response has
    rollout.max_response_tokens.
    """
    found = {"config.json": hf_config}
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (model.folder / name).is_file():
            try:
                found[name] = read_json(model.folder / name)
            except ValueError as error:
                yield f"model.path: {error}"
    found.pop("tokenizer_config.json", None)  # only its syntax is checked
    for name, content in found.items():
        given = content.get("eos_token_id")
        ids = given if isinstance(given, list) else [given]
        known = [type(number) is int and 0 <= number < shape.vocab for number in ids]
        if given is not None and not (known and all(known)):
            yield (
                f"model.path: eos_token_id of {model.folder / name} is {given!r}, expected ids "
                f"from 0 to {shape.vocab - 1}; take it from the model's authors"
            )


def exported(model: schema.ModelSection, checkpoint: schema.CheckpointSection) -> Iterator[str]:
    """Check the files that the export at the end of the run would copy."""
    if checkpoint.export_hf and model.folder.is_dir():
        try:
            weight_files.companions(model.folder)
        except ValueError as error:
            yield f"checkpoint.export_hf: {error}"


MODEL_RULES = (weights, vocabulary, end_of_text, exported)
