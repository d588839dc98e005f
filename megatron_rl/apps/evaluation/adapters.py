"""LoRA adapters on disk, a run's (learner.lora) or PEFT's: read, merged, written as PEFT's."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rl.apps.evaluation.peft_folder import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    names_of,
    read_folder,
)
from megatron_rl.checkpoint.torch_dist import reader as torch_dist
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import ALL_LINEAR
from megatron_rl.files import replacing
from megatron_rl.models.hf_folder import HfFolder, read_stored
from megatron_rl.models.mapping import adapters, params
from megatron_rl.models.shape import Lora, ModelShape
from megatron_rl.models.shards import merge
from megatron_rl.models.tensors import write_tensors
from megatron_rl.models.weight_files import is_checkpoint

Get = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Adapters:
    """LoRA weights; `get` takes Hugging Face names with lora_A or lora_B, without PEFT's prefix."""

    alphas: Mapping[str, float]  # of the weights that have one
    get: Get


def _linear(shape: ModelShape, lora: Lora) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that `lora` adapts."""
    whole = replace(shape, lora=lora)
    return {
        name: size
        for param in params(whole)
        if adapters(param, whole)
        for name, size in param.sizes.items()
        if lora.adapts(name)
    }


def is_peft(path: Path) -> bool:
    return (path / CONFIG).is_file()


def alone(path: Path) -> bool:
    """True for a folder of LoRA adapters without their base model."""
    if not is_checkpoint(path):
        return is_peft(path)
    return torch_dist.Reader(path).holds_adapters


def read(path: Path, shape: ModelShape, lora: Lora | None) -> Adapters | None:
    """Adapters of a torch_dist checkpoint (with its run's `lora`) or PEFT folder; else None."""
    if is_peft(path):
        alphas, stored = read_folder(path, _linear(shape, Lora(1, 1.0, (ALL_LINEAR,))))
        return Adapters(alphas, lambda name: read_stored(name, stored[name]).float())
    if not alone(path):
        return None
    if lora is None:
        raise ConfigError(
            f"{path} holds adapters alone, and what they belong to is in their run's config.yaml: "
            "name it"
        )
    get = torch_dist.getter(torch_dist.Reader(path), replace(shape, lora=lora))
    return Adapters(dict.fromkeys(_linear(shape, lora), lora.alpha), get)


def merged(base: HfFolder, held: Adapters) -> Get:
    """`get_hf` over the model with merged adapters, as in the run's sampler; keeps dtypes."""

    def get(name: str) -> torch.Tensor:
        weight = base.read(name)
        if name not in held.alphas:
            return weight
        a, b = map(held.get, names_of(name))
        narrow = weight.to(a.dtype)  # as the learner held it
        rows = [torch.arange(len(weight))]
        scale = held.alphas[name] / len(a)
        return merge(narrow, a, b, rows, scale).to(weight.dtype)

    return get


def write_peft(held: Adapters, lora: Lora, base: Path, target: Path) -> None:
    """Write a run's adapters as the folder that PEFT reads."""
    names = [one for name in held.alphas for one in names_of(name)]
    tensors = {f"{PREFIX}{name}": held.get(name).contiguous() for name in names}
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-2] for name in held.alphas}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with replacing(target) as partial:
        partial.mkdir(parents=True)
        write_tensors(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
