"""Reader of PEFT's LoRA folders: adapter_config.json by a list of known keys, tensors by both.

A folder may come from anywhere: nothing in it is unpickled, and a key, a value or a tensor that is
not understood is refused by name.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.files import read_json
from megatron_rl.models.weight_files import FLOATS, Stored, refuse_links_out, stored_tensors

# as PEFT calls them
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of its names
LARGEST_CONFIG = 1 << 20
LARGEST_NUMBER = 1 << 30  # a larger rank or alpha is a mistake
Shapes = Mapping[str, tuple[int, ...]]

# keys that are checked where they are read, and keys on which merged weights do not depend
_FREE = (
    "r lora_alpha target_modules auto_mapping base_model_name_or_path inference_mode lora_dropout "
    "megatron_core peft_version qalora_group_size revision"
)
_FLAGS = "ensure_weight_tying fan_in_fan_out lora_bias use_dora use_qalora"
_EMPTY = (
    "exclude_modules layers_pattern layers_to_transform loftq_config modules_to_save target_parameters "
    "rank_pattern alpha_pattern"
)
_VARIANTS = (
    "alora_invocation_tokens arrow_config corda_config eva_config kasa_config layer_replication "
    "lora_ga_config megatron_config monteclora_config trainable_token_indices use_bdlora "
    "velora_config"
)
# all other keys that are known, with the values that are understood
UNDERSTOOD: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "use_rslora": (None, False, True),
    # others change the model beneath; PEFT writes true where it has converted such adapters
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    **dict.fromkeys(_FLAGS.split(), (None, False)),
    **dict.fromkeys(_EMPTY.split(), (None, [], {})),
    **dict.fromkeys(_VARIANTS.split(), (None,)),
}


def names_of(weight: str) -> tuple[str, str]:
    """Return the names of its A and B."""
    stem = weight.removesuffix("weight")
    return f"{stem}lora_A.weight", f"{stem}lora_B.weight"


def read_folder(path: Path, linear: Shapes) -> tuple[dict[str, float], dict[str, Stored]]:
    """Return alpha of each adapted weight, which gains alpha / rank * B A, and the places of A and
    B by their names without prefix. `linear`: shapes of the weights that may have adapters.
    """
    try:
        refuse_links_out(path, (CONFIG, WEIGHTS))
        about = read_json(path / CONFIG, LARGEST_CONFIG)
        _check_keys({"peft_type": None, **about})
        names = _targets(about.get("target_modules"), linear)
        rank = int(_number(about, "r", int))
        alpha = _number(about, "lora_alpha", int, float)
        if about.get("use_rslora"):  # the scale is alpha / sqrt(rank)
            alpha *= math.sqrt(rank)
        sizes = {name: (*linear[name], rank) for name in names}
        return dict.fromkeys(names, alpha), _tensors(path / WEIGHTS, sizes)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_keys(about: Mapping[str, Any]) -> None:
    for key, value in about.items():
        if key not in _FREE.split() and value not in UNDERSTOOD.get(key, ()):
            raise ValueError(
                f"{key[:100]!r} is {shortened(value)}, which is not understood; merge the adapters "
                "with PEFT itself"
            )


def _targets(given: Any, linear: Shapes) -> list[str]:
    """Return the weights of the layers that target_modules lists, as PEFT finds them."""
    hits: dict[Any, list[str]] = {}
    for target in given if isinstance(given, list) else ():
        end = f".{target}.weight"
        hits[str(target)] = [name for name in linear if f".{name}".endswith(end)]
    if not hits or not all(hits.values()):
        expected = "a list of names of linear layers, each of them one of the model's"
        raise ValueError(f"target_modules is {shortened(given)}, expected {expected}")
    found = set().union(*hits.values())
    return [name for name in linear if name in found]


def _number(about: Mapping[str, Any], key: str, *kinds: type) -> float:
    value: Any = about.get(key)
    if type(value) not in kinds or not 0 < value < LARGEST_NUMBER:
        raise ValueError(f"{key} is {shortened(value)}, expected a positive number")
    return float(value)


def _tensors(file: Path, sizes: Shapes) -> dict[str, Stored]:
    """Return the tensors: A and B of each weight. `sizes`: outputs, inputs and rank of each."""
    stored = stored_tensors(file)
    found = {}
    for name, one in stored.items():
        found[name] = one.shape if one.dtype in FLOATS else one.dtype
    wanted = {}
    for name, (outputs, inputs, rank) in sizes.items():
        a, b = names_of(name)
        wanted[PREFIX + a] = (rank, inputs)
        wanted[PREFIX + b] = (outputs, rank)
    for name in sorted(found.keys() | wanted.keys()):
        held = found.get(name, "missing")
        expected = wanted.get(name, "no such tensor")
        if held != expected:
            raise ValueError(
                f"{name[:200]!r} is {shortened(held)}, expected {expected} by target_modules, the "
                f"ranks and the model ({', '.join(FLOATS)}); merge the adapters with PEFT itself"
            )
    return {name.removeprefix(PREFIX): one for name, one in stored.items()}
