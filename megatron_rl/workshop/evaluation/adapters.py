"""LoRA adapters on disk, a run's (learner.lora) or PEFT's: read, merged into the model's weights, written as PEFT's."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_rl.config import ConfigError
from megatron_rl.files import read_json, replacing
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.models.mapping import adapters, params
from megatron_rl.models.shape import Lora, ModelShape
from megatron_rl.models.shards import merge
from megatron_rl.models.tensors import write_tensors
from megatron_rl.models.weight_files import is_checkpoint

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as PEFT calls them
PREFIX = "base_model.model."  # of its names
LARGEST_CONFIG = 1 << 20
# what changes what an adapter means, and is not built; and values of it that change nothing
UNFIT = {
    "use_rslora": (False, None), "use_dora": (False, None), "rank_pattern": ({}, None), "alpha_pattern": ({}, None),
    "modules_to_save": ([], None), "fan_in_fan_out": (False, None), "bias": ("none",), "lora_bias": (False, None),
    "target_parameters": ([], None), "layers_to_transform": ([], None),
}  # fmt: skip
Get = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Adapters:
    """`get` knows them by Hugging Face's names with lora_A or lora_B, as PEFT's are without its prefix."""

    lora: Lora
    get: Get

    def names(self, shape: ModelShape) -> Iterator[str]:
        """Of the weights that have one."""
        whole = replace(shape, lora=self.lora)
        for param in params(whole):
            if adapters(param, whole):
                yield from (name for name in param.hf if self.lora.adapts(name))

    def pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        stem = name.removesuffix("weight")
        return self.get(f"{stem}lora_A.weight"), self.get(f"{stem}lora_B.weight")


def is_peft(path: Path) -> bool:
    return (path / CONFIG).is_file()


def alone(path: Path) -> bool:
    """Whether adapters are there without the model that they change."""
    if not is_checkpoint(path):
        return is_peft(path)
    from megatron_rl.checkpoint.torch_dist import reader as torch_dist

    return torch_dist.Reader(path).holds_adapters


def read(path: Path, shape: ModelShape, lora: Lora | None) -> Adapters | None:
    """Of a torch_dist checkpoint, with its run's `lora`, or of PEFT's folder; None where a whole model is there."""
    if is_peft(path):
        return _of_peft(path)
    if not alone(path):
        return None
    from megatron_rl.checkpoint.torch_dist import reader as torch_dist

    if lora is None:
        raise ConfigError(
            f"{path} holds adapters alone, and what they belong to is in their run's config.yaml: name it"
        )
    return Adapters(lora, torch_dist.getter(torch_dist.Reader(path), replace(shape, lora=lora)))


def _of_peft(path: Path) -> Adapters:
    from safetensors.torch import load_file

    try:
        about = read_json(path / CONFIG, LARGEST_CONFIG)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if about.get("peft_type") != "LORA":
        raise ConfigError(f"{path / CONFIG}: peft_type is {about.get('peft_type')!r}, only LORA is read")
    for key, plain in UNFIT.items():
        if about.get(key, plain[0]) not in plain:
            raise ConfigError(
                f"{path / CONFIG}: {key} is {about[key]!r}, which is not built; merge it with PEFT itself"
            )
    given = load_file(path / WEIGHTS)
    held = {name.removeprefix(PREFIX): tensor for name, tensor in given.items()}
    targets = {name.split(".")[-3] for name in held if name.endswith("lora_A.weight")}
    if not targets:
        raise ConfigError(f"{path / WEIGHTS} holds no lora_A.weight; give a folder that PEFT has written")

    def get(name: str) -> torch.Tensor:
        if name not in held:
            raise ConfigError(f"{path / WEIGHTS} lacks {PREFIX}{name}: adapters of some layers alone are not built")
        return held[name]

    return Adapters(Lora(int(about["r"]), float(about["lora_alpha"]), tuple(sorted(targets))), get)


def merged(base: HfFolder, shape: ModelShape, held: Adapters) -> Get:
    """`get_hf` over the model with its adapters, as the run's sampler had it. Each weight keeps its own dtype."""
    adapted = set(held.names(shape))

    def get(name: str) -> torch.Tensor:
        weight = base.read(name)
        if name not in adapted:
            return weight
        a, b = held.pair(name)
        narrow = weight.to(a.dtype)  # as the learner held it
        return merge(narrow, a, b, [torch.arange(len(weight))], held.lora.scale).to(weight.dtype)

    return get


def write_peft(held: Adapters, shape: ModelShape, base: Path, target: Path) -> None:
    """The folder that PEFT reads."""
    names = list(held.names(shape))
    tensors = {}
    for name in names:
        for letter, tensor in zip("AB", held.pair(name), strict=True):
            tensors[f"{PREFIX}{name.removesuffix('weight')}lora_{letter}.weight"] = tensor.contiguous()
    about = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": held.lora.rank,
        "lora_alpha": held.lora.alpha, "target_modules": sorted({name.split(".")[-2] for name in names}),
        "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
    }  # fmt: skip
    with replacing(target) as partial:
        partial.mkdir(parents=True)
        write_tensors(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
